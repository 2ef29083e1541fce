"""One compose project for all tests of this folder: an image takes minutes to build and a cluster seconds to start."""

from collections.abc import Generator, Iterator

import pytest

from tests.e2e.engine import why_no_engine
from tests.e2e.project import Project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Up, with a prefill and a decode worker. Skips where no engine can be had."""
    if reason := why_no_engine():
        pytest.skip(reason)
    project = Project(tmp_path_factory.mktemp("wheels"))
    try:
        project.build()
        project.fill_cache()
        try:
            project.up()
        except AssertionError as error:
            error.add_note(project.logs())
            raise
        yield project
    finally:
        project.down()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The containers are gone when a failure is read, so that it takes their logs along."""
    report = yield
    project = getattr(item, "funcargs", {}).get("project")
    if report.failed and isinstance(project, Project):
        report.sections.append(("containers", project.logs()))
    return report
