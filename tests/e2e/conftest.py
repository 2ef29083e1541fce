"""One compose project for all tests of this folder: an image takes minutes to build and a cluster seconds to start."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.engine import why_no_engine
from tests.e2e.project import Project, eventually


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for Prometheus's own, empty to begin with."""
    return tmp_path_factory.mktemp("prometheus")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Iterator[Project]:
    """Up, as compose.cpu.yaml says: a prefill worker and two decode workers. Skips where no engine can be had."""
    if reason := why_no_engine():
        pytest.skip(reason)
    project = Project(tmp_path_factory.mktemp("wheels"), programs)
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


@pytest.fixture
def cluster(project: Project) -> Project:
    """The project, whole again whatever the test before has left, and idle."""
    # Not `--wait`, which gives up at once where something is unhealthy for a moment longer.
    project.compose("up", "--detach", "--no-build", "--no-recreate")
    eventually("the workers of compose.cpu.yaml are ready", lambda: project.counts() == {"prefill": 1, "decode": 2})
    eventually("every container is healthy", project.is_healthy)
    eventually("nothing is held", project.is_drained)
    return project


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The containers are gone when a failure is read, so that it takes their logs along."""
    report = yield
    project = getattr(item, "funcargs", {}).get("project")
    if report.failed and isinstance(project, Project):
        report.sections.append(("containers", project.logs()))
    return report
