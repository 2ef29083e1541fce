"""Fake clusters, each of which is gone after its test."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.up_process import Up


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Where a test's clusters listen for `splitserve scale`: a short path, because a socket's may not be long."""
    with tempfile.TemporaryDirectory(prefix="ss-") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def make(
        *,
        env: dict[str, str] | None = None,
        stderr_path: Path | None = None,
        directory: Path = tmp_path,
        **settings: Any,
    ) -> Up:
        env = {"SPLITSERVE_RUNTIME_DIR": str(runtime_dir)} | (env or {})
        started.append(Up(directory, settings, env, stderr_path))
        return started[-1]

    yield make
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait()
        for stream in up.streams():
            stream.close()
