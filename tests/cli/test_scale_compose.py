"""`splitserve scale` on a compose project, over a fake engine: which containers are made, let go, and left alone."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests.exceptions

from splitserve.cli.scale.compose import ComposeProject, compose_projects, run_command
from splitserve.cli.scale.docker_engine import DockerEngine
from splitserve.cli.scale.serialized import serialized
from splitserve.service.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    SplitserveError,
    Unavailable,
)
from tests.cli.fake_docker import FakeDocker


@pytest.fixture
def engine(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """A project with one worker of each role, and another one of somebody else's."""
    monkeypatch.setenv("SPLITSERVE_RUNTIME_DIR", str(runtime_dir))
    engine = FakeDocker(tmp_path)
    for service in ("router", "prefill", "decode"):
        engine.add(service, 1)
    engine.add("router", 1, project="nginx", words=["nginx"])
    engine.add("decode", 1, project="nginx", words=["ffmpeg"])
    return engine


def projects(engine: FakeDocker, *files: Path, name: str | None = None) -> list[ComposeProject]:
    return compose_projects(files, name, engine=DockerEngine(engine), run=engine.run, poll_s=0.01)


def scale(engine: FakeDocker, *, timeout_s: float = 5.0, is_waited_for: bool = True, **target: int) -> list[str]:
    (project,) = projects(engine)
    said: list[str] = []
    project.scale(target, timeout_s=timeout_s, is_waited_for=is_waited_for, say=said.append)
    return said


def test_other_role_or_a_running_worker_was_touched(engine: FakeDocker) -> None:
    said = scale(engine, decode=3)
    assert engine.log == ["start splitserve-decode-2", "start splitserve-decode-3"]
    (command,) = engine.commands
    assert command == (
        f"docker compose --ansi never --project-name splitserve --file {engine.folder}/compose.yaml "
        f"--project-directory {engine.folder} up --no-start --no-recreate --no-build --scale decode=3 decode"
    ).split(" ")
    assert said == [
        "decode: 1 → 3",
        "splitserve-decode-2 starts",
        "splitserve-decode-3 starts",
        "splitserve-decode-2 is ready",
        "splitserve-decode-3 is ready",
    ]
    assert engine.names("prefill") == ["splitserve-prefill-1"]


def test_oldest_worker_was_let_go_or_killed_early(engine: FakeDocker) -> None:
    """One that was made later has the smaller number: its predecessor of that number is gone."""
    engine.add("decode", 3, stop_timeout=300)
    engine.add("decode", 2, stop_timeout=None)
    said = scale(engine, decode=1)
    assert sorted(engine.log) == [
        "remove splitserve-decode-2",
        "remove splitserve-decode-3",
        "stop splitserve-decode-2 within 10",
        "stop splitserve-decode-3 within 300",
    ]
    assert said == [
        "decode: 3 → 1",
        "splitserve-decode-2 drains",
        "splitserve-decode-3 drains",
        "splitserve-decode-2 is gone",
        "splitserve-decode-3 is gone",
    ]
    assert engine.commands == []
    engine.log.clear()
    scale(engine, decode=1)
    assert engine.log == []


def test_worker_that_serves_was_let_go_before_one_that_does_not(engine: FakeDocker) -> None:
    engine.add("decode", 2, fate=("restarting", None, 1))
    engine.add("decode", 3)
    scale(engine, decode=2)
    assert engine.names("decode") == ["splitserve-decode-1", "splitserve-decode-3"]


def test_containers_that_were_stopped_by_hand_counted_as_workers(engine: FakeDocker) -> None:
    stopped = engine.add("decode", 2)
    stopped.attrs["State"] = {"Status": "exited", "ExitCode": 0}
    said = scale(engine, decode=2)
    assert said[0] == "decode: 1 → 2"
    assert engine.log[:2] == ["stop splitserve-decode-2 within 20", "remove splitserve-decode-2"]
    assert engine.log[2:] == ["start splitserve-decode-2"]


def test_worker_that_somebody_else_removes_failed_the_command(engine: FakeDocker) -> None:
    doomed = engine.add("decode", 2)

    def stop(timeout: int) -> None:
        engine.present.remove(doomed)
        raise docker.errors.NotFound("no such container")

    doomed.stop = stop  # type: ignore[method-assign]
    assert scale(engine, decode=1)[-1] == "splitserve-decode-2 is gone"


def test_project_that_was_scaled_by_hand_meanwhile_counted_as_done(engine: FakeDocker) -> None:
    run = engine.run

    def run_and_meddle(command: Sequence[str], timeout_s: float) -> None:
        run(command, timeout_s)
        engine.add("decode", 9)

    engine.run = run_and_meddle  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="decode has 3 containers"):
        scale(engine, decode=2, timeout_s=0.05)


def test_worker_that_drained_too_long_was_passed_over(engine: FakeDocker) -> None:
    engine.add("decode", 2).exit_status = 137
    assert scale(engine, decode=1)[-1] == "splitserve-decode-2 is gone: it ended with status 137"


@pytest.mark.parametrize(
    ("attributes", "is_refused"),
    [
        ({}, True),
        ({"env": ["SPLITSERVE_WITHOUT_PREFILL=local"]}, False),
        ({"words": ["router", "--without-prefill", "local"]}, False),
        ({"words": ["router", "--without-prefill=local"]}, False),
        ({"words": ["router", "--without-prefill", "refuse"]}, True),
    ],
)
def test_project_was_left_unable_to_serve(engine: FakeDocker, attributes: dict[str, Any], is_refused: bool) -> None:
    engine.present = [container for container in engine.present if "router" not in container.name]
    engine.add("router", 1, **attributes)
    with pytest.raises(InvalidRequest, match="decode=0"):
        scale(engine, decode=0)
    if is_refused:
        with pytest.raises(InvalidRequest, match="--without-prefill local"):
            scale(engine, prefill=0, decode=2)
    else:
        scale(engine, prefill=0)
    assert engine.names("prefill") == (["splitserve-prefill-1"] if is_refused else [])
    assert engine.names("decode") == ["splitserve-decode-1"]


def test_workers_with_other_settings_joined(engine: FakeDocker) -> None:
    """Compose reads the environment of whoever calls it, which may lack what the project was started with."""
    engine.made_like = {"config_hash": "another"}
    with pytest.raises(InvalidRequest, match="not be like those that run"):
        scale(engine, decode=3)
    assert engine.names("decode") == ["splitserve-decode-1"]
    assert not any(line.startswith("start") for line in engine.log)


@pytest.mark.parametrize(
    ("fate", "error", "reason"),
    [
        (("running", "starting", 0), DeadlineExceeded, "not in time: splitserve-decode-2 is running, starting"),
        (("restarting", None, 1), DeadlineExceeded, "splitserve-decode-2 is restarting, status 1"),
    ],
)
def test_worker_that_never_is_ready_counted_as_done(
    engine: FakeDocker, fate: tuple[str, str | None, int], error: type[SplitserveError], reason: str
) -> None:
    engine.made_like = {"fate": fate}
    with pytest.raises(error, match=reason):
        scale(engine, decode=2, timeout_s=0.05)
    # Who does not wait for it is not told.
    scale(engine, decode=2, is_waited_for=False)


@pytest.mark.parametrize("fate", [("running", "unhealthy", 0), ("restarting", None, 78), ("restarting", None, 75)])
def test_worker_that_cannot_start_was_left_behind(engine: FakeDocker, fate: tuple[str, str | None, int]) -> None:
    """What the command made goes with it, unless it is ready; what was there before stays, whatever its state."""
    engine.add("decode", 2, fate=("running", "unhealthy", 0))
    run = engine.run

    def run_and_fail(command: Sequence[str], timeout_s: float) -> None:
        run(command, timeout_s)
        for container in engine.present:
            if container.name == "splitserve-decode-4":
                container.fate = fate

    engine.run = run_and_fail  # type: ignore[method-assign]
    engine.made_like = {"fate": ("running", "starting", 0)}
    with pytest.raises(Unavailable, match="splitserve-decode-4 cannot start: no GPU is left"):
        scale(engine, decode=4)
    assert engine.names("decode") == ["splitserve-decode-1", "splitserve-decode-2"]


def test_another_project_was_scaled(engine: FakeDocker, tmp_path: Path) -> None:
    assert list(map(str, projects(engine))) == ["the compose project splitserve"]
    for service in ("router", "decode"):
        engine.add(service, 1, "other", labels={"com.docker.compose.project.config_files": f"{tmp_path}/other.yaml"})
    engine.add("decode", 1, "run", oneoff="True")
    assert [project.name for project in projects(engine)] == ["other", "splitserve"]
    assert [project.name for project in projects(engine, name="other")] == ["other"]
    assert [project.name for project in projects(engine, tmp_path / "compose.yaml")] == ["splitserve"]
    assert projects(engine, name="nginx") == []


def test_file_that_is_gone_was_looked_for_by_compose(engine: FakeDocker) -> None:
    engine.files[0].unlink()
    with pytest.raises(NotFound, match=r"compose\.yaml, which is not here; name its files with --file"):
        scale(engine, decode=2)
    (project,) = projects(engine, Path("moved.yaml"))
    project.scale({"decode": 2}, timeout_s=5, is_waited_for=True, say=print)
    assert engine.commands[-1][6:8] == ["--file", "moved.yaml"]


def test_two_commands_worked_at_once(engine: FakeDocker) -> None:
    with serialized("compose-splitserve", 1), pytest.raises(DeadlineExceeded, match="another scale command"):
        scale(engine, decode=2, timeout_s=0.01)
    assert engine.commands == []
    scale(engine, decode=2)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (docker.errors.APIError("conflict"), Internal),
        (docker.errors.DockerException("no such socket"), Unavailable),
        (requests.exceptions.ReadTimeout("too late"), Unavailable),
    ],
)
def test_error_of_the_sdk_came_through(
    engine: FakeDocker, raised: Exception, expected: type[SplitserveError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(engine.containers, "list", fail)
    with pytest.raises(expected):
        projects(engine)


def test_missing_sdk_or_command_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="no docker command"):
        run_command(["/nowhere/docker", "compose"], 1)
    with pytest.raises(Internal, match="docker compose failed: what it said last"):
        run_command([sys.executable, "-c", "print('what it said last'); raise SystemExit(1)"], 30)
    with pytest.raises(DeadlineExceeded):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.05)
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(Unavailable, match=r"pip install 'splitserve\[deploy\]'"):
        DockerEngine.connect()


def test_engine_of_another_context_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "nowhere")
    with pytest.raises(Unavailable, match="context"):
        DockerEngine.connect()
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"no Docker engine answers: .*127\.0\.0\.1"):
        DockerEngine.connect()
