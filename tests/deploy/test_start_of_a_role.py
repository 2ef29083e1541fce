"""What Docker is told of a role that starts: one that never can is waited for, or one that died comes back late."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PATIENCE_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    """Runs a fake role, or the health check, as containers do, over a folder of their own for temporary files."""
    started: list[subprocess.Popen[str]] = []
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(behaviour: str | None = None, *, pause_s: float = 600.0, settings: str = "") -> "subprocess.Popen[str]":
        name = "healthcheck" if behaviour is None else "run_role"
        argument = f"{port}" if behaviour is None else f"['tests.deploy.fake_role', {behaviour!r}, '{port}']"
        changed = settings or ("" if behaviour is None else f"run_role.PAUSE_S = {pause_s}")
        found = f"import sys; sys.path.insert(0, {str(DEPLOY)!r})"
        program = f"{found}; import {name}; {changed}\nsys.exit({name}.main({argument}))"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_start_that_failed_is_waited_for_or_ends_before_it_is_seen(start: Start) -> None:
    role = start("refuse")
    check = start()
    said, _ = check.communicate(timeout=PATIENCE_S)
    assert check.returncode == 1
    assert said == "failed: tests.deploy.fake_role ended with status 78, and its log says why"
    assert role.poll() is None, "Docker would start it again before the second check"
    role.terminate()
    assert role.wait(PATIENCE_S) == 78, "a container that is stopped must not sit out the pause"


def test_start_that_failed_was_for_good(start: Start) -> None:
    assert start("refuse", pause_s=0.1).wait(PATIENCE_S) == 78


def assert_waits(check: "subprocess.Popen[str]") -> None:
    """It asks twice a second."""
    with pytest.raises(subprocess.TimeoutExpired):
        check.wait(1.2)


def test_slow_start_fails_checks_and_later_failures_are_waited_for(start: Start, tmp_path: Path) -> None:
    start("serve")
    check = start()
    eventually((tmp_path / "pid").exists)
    assert_waits(check)
    (tmp_path / "go").touch()
    assert check.communicate(timeout=PATIENCE_S)[0] == "ready"
    assert check.returncode == 0
    (tmp_path / "go").unlink()
    check = start()
    assert check.communicate(timeout=PATIENCE_S)[0] == "not ready"
    assert check.returncode == 1


def test_router_is_blamed_for_workers_that_are_replaced(start: Start, tmp_path: Path) -> None:
    start("serve")
    (tmp_path / "go").touch()
    assert start().wait(PATIENCE_S) == 0
    (tmp_path / "waits").touch()
    (tmp_path / "go").unlink()
    check = start()
    assert_waits(check)
    (tmp_path / "go").touch()
    assert check.wait(PATIENCE_S) == 0


def test_start_without_an_end_is_waited_for(start: Start) -> None:
    start("serve")
    check = start(settings="healthcheck.PATIENCE_S = 0.5")
    check.communicate(timeout=PATIENCE_S)
    assert check.returncode == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 137), (signal.SIGTERM, 0)])
def test_role_that_was_ready_and_ended_comes_back_late(
    start: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """And how it ended is passed on."""
    role = start("serve")
    (tmp_path / "go").touch()
    assert start().wait(PATIENCE_S) == 0
    os.kill(int((tmp_path / "pid").read_text()), number)
    assert role.wait(PATIENCE_S) == status


def test_container_that_is_stopped_does_not_let_its_role_drain(start: Start, tmp_path: Path) -> None:
    role = start("serve")
    eventually((tmp_path / "pid").exists)
    role.terminate()
    assert role.wait(PATIENCE_S) == 0
