"""`splitserve scale` on a local cluster of fake processes: who is started, who is let go, and what the caller hears."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.cli.roles import Model, Ports, Roles
from splitserve.cli.scale.messages import MAX_LINE_BYTES, Refused, decode_answer
from splitserve.cli.scale.sockets import listen, paths
from splitserve.cli.setup import Setup
from splitserve.cli.up_config import UpConfig
from splitserve.service.errors import Unavailable
from tests.cli.up_process import PATIENCE_S, Up, eventually, is_alive

SCALE = (sys.executable, "-P", "-c", "from splitserve.cli.main import run; run()", "scale")
Start = Callable[..., Up]


@pytest.fixture
def scale(runtime_dir: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts the command; no Docker engine is there for it."""
    env = os.environ | {"SPLITSERVE_RUNTIME_DIR": str(runtime_dir), "DOCKER_HOST": f"unix://{runtime_dir}/no.engine"}

    def run(*words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([*SCALE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    return run


Scale = Callable[..., "subprocess.Popen[str]"]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def ready(up: Up) -> Up:
    up.wait_for("The cluster is ready")
    for role in ("decode", "prefill"):
        up.wait_for(f"{role} is up")
    return up


def alive(up: Up, role: str) -> list[int]:
    return [pid for pid in up.starts(role) if is_alive(pid)]


def test_worker_that_was_let_go_came_back_or_was_the_oldest(start: Start, scale: Scale, tmp_path: Path) -> None:
    up = ready(start(log_dir=str(tmp_path / "logs")))
    (oldest,) = up.starts("decode")
    (prefill,) = up.starts("prefill")
    status, out, _ = ended(scale("decode=3"))
    assert status == 0
    lines = out.splitlines()
    assert lines[0].endswith("(fake; prefill=1, decode=1)")
    assert lines[1] == "  decode: 1 → 3"
    assert [line.split()[:2] for line in lines[2:4]] == [["decode-1", "starts"], ["decode-2", "starts"]]
    assert sorted(lines[4:]) == ["  decode-1 is ready", "  decode-2 is ready"]
    assert len(alive(up, "decode")) == 3
    assert (tmp_path / "logs" / "decode-2.log").read_text() == "decode is up\n"
    status, out, _ = ended(scale("decode=1"))
    assert status == 0
    assert out.splitlines()[1:4] == ["  decode: 3 → 1", "  decode-2 drains", "  decode-1 drains"]
    assert sorted(out.splitlines()[4:]) == ["  decode-1 is gone", "  decode-2 is gone"]
    assert alive(up, "decode") == [oldest]
    assert [path.suffix for path in up.directory.glob("decode.SIG*")] == [".SIGTERM"]
    os.kill(oldest, signal.SIGKILL)  # what is left is still kept
    assert eventually(lambda: len(up.starts("decode")) == 4)
    assert alive(up, "prefill") == [prefill]
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert len(up.starts("decode")) == 4
    restarts = [line.partition("| ")[2].partition(" ")[0] for line in up.lines if "starting it again" in line]
    assert restarts == ["decode-0"]
    assert [pid for pid in up.pids() if is_alive(pid)] == []


def test_roles_were_scaled_together_or_a_number_was_given_out_twice(start: Start, scale: Scale) -> None:
    up = ready(start())
    assert ended(scale("prefill=3", "decode=2"))[0] == 0
    os.kill(min(up.starts("prefill")), signal.SIGKILL)  # restarts are no new workers
    assert ended(scale("prefill=2"))[0] == 0
    status, out, _ = ended(scale("prefill=3"))
    assert status == 0
    assert "  prefill-2 starts" in out
    assert (len(alive(up, "prefill")), len(alive(up, "decode"))) == (3, 2)


IMPOSSIBLE = [
    ("decode=0", "nothing would be served without a decode worker"),
    ("prefill=0 decode=2", "--without-prefill local"),
    ("decode=x", "'decode=x' is not a role and a number"),
    ("decode=9999", "decode=9999: 64 workers of a role are the most on one host"),
    ("decode=2 decode=3", "decode is given twice"),
    ("router=2", "'router=2' is not a role and a number"),
    ("", "say what to scale"),
    ("decode=2 --port 1", "no local cluster at port 1. Here run: the cluster at port "),
    ("decode=2 --port 1 --compose", "--port chooses a local cluster"),
    ("decode=2 --compose", "no Docker engine answers"),
]


def test_what_cannot_be_was_done_halfway(start: Start, scale: Scale) -> None:
    up = ready(start())
    for words, reason in IMPOSSIBLE:
        status, _, err = ended(scale(*words.split()))
        assert (status, reason in err) == (1, True), err
    assert (len(up.starts("prefill")), len(up.starts("decode"))) == (1, 1)


@pytest.mark.parametrize("env", [{}, {"SPLITSERVE_WITHOUT_PREFILL": "local"}])
def test_cluster_that_can_do_without_prefill_had_to_keep_it(start: Start, scale: Scale, env: dict[str, str]) -> None:
    up = start(env=env, prefill=1 if env else 0)
    up.wait_for("The cluster is ready")
    assert ended(scale("prefill=1"))[0] == 0
    assert len(alive(up, "prefill")) == 1
    assert ended(scale("prefill=0"))[0] == 0
    assert alive(up, "prefill") == []


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("config", "decode-1 cannot start: block size 7 does not divide 16; it was given up"),
        ("crash", "decode-1 ended with exit status 3 3 times before it was ready: out of luck; it was given up"),
    ],
)
def test_worker_that_cannot_start_ended_the_cluster(start: Start, scale: Scale, behaviour: str, reason: str) -> None:
    up = ready(start())
    (up.directory / "decode.behaviour").write_text(behaviour)
    status, _, err = ended(scale("decode=2"))
    assert status == 1
    assert f"splitserve: {reason}" in err
    (up.directory / "decode.behaviour").unlink()
    status, out, _ = ended(scale("decode=2"))
    assert status == 0
    assert "  decode: 1 → 2" in out
    assert up.process.poll() is None


def test_worker_that_never_is_ready_counted_as_done(start: Start, scale: Scale) -> None:
    up = ready(start())
    (up.directory / "decode.behaviour").write_text("unready")
    status, _, err = ended(scale("decode=2", "--timeout", "300ms"))
    assert status == 1
    assert "not within 0.3 s: decode-1 is starting" in err
    # Whoever waits for it still hears that another command has decided otherwise.
    waiting = scale("decode=2")
    assert waiting.stdout is not None
    assert any("decode: 2 → 2" in line for line in waiting.stdout)
    assert ended(scale("decode=1"))[0] == 0
    status, _, err = ended(waiting)
    assert (status, "another command has scaled decode" in err) == (1, True)


def test_command_that_need_not_wait_waited(start: Start, scale: Scale) -> None:
    up = ready(start())
    (up.directory / "decode.behaviour").write_text("unready")
    assert ended(scale("decode=2", "--no-wait"))[0] == 0
    assert eventually(lambda: len(up.starts("decode")) == 2)


def test_worker_was_killed_before_it_had_drained(start: Start, scale: Scale) -> None:
    """It may take its drain timeout, however short the patience of `up` itself is."""
    up = ready(start(env={"FAKE_GRACE": "0.1", "FAKE_DECODE": "draining"}, decode=2))
    status, out, _ = ended(scale("decode=1"))
    assert status == 0
    assert out.splitlines()[-1] == "  decode-1 is gone"
    assert [path.suffix for path in up.directory.glob("decode.SIG*")] == [".SIGTERM"]


def test_drain_that_was_set_was_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def grace_s() -> float:
        model = Model(directory=Path("/m"), served_name="m")
        return Setup.of(UpConfig(), Roles(), model, Ports(1, 2, 3), [0, 1]).drain_grace_s

    monkeypatch.delenv("SPLITSERVE_DRAIN_TIMEOUT", raising=False)
    assert grace_s() > 7 + 6
    monkeypatch.setenv("SPLITSERVE_DRAIN_TIMEOUT", "2m")
    assert grace_s() > 120 + 6


def test_ctrl_c_waited_for_a_worker_that_drains(start: Start, scale: Scale) -> None:
    up = ready(start(env={"FAKE_DECODE": "stubborn", "SPLITSERVE_DRAIN_TIMEOUT": "10m"}, decode=2))
    waiting = scale("decode=1")
    up.wait_for("decode-1 drains")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []
    status, _, err = ended(waiting)
    # It hears that from the cluster, or from the end of their connection.
    assert (status, bool(re.search("the cluster (ends|at port .* ended)", err))) == (1, True)


def test_wrong_cluster_was_scaled(start: Start, scale: Scale, tmp_path: Path, runtime_dir: Path) -> None:
    status, _, err = ended(scale("decode=2"))
    assert status == 1
    assert "no `splitserve up` of this user runs here, and no compose project: no Docker engine answers" in err
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (ready(start(directory=folder)) for folder in folders)
    ports = list(paths(runtime_dir))
    status, _, err = ended(scale("decode=2"))
    assert status == 1
    assert all(f"the cluster at port {port} (fake; prefill=1, decode=1)" in err for port in ports)
    mine = next(port for port in ports if f"--grpc-port {port}" in _command_line(second))
    assert ended(scale("decode=2", "--port", str(mine)))[0] == 0
    assert (len(first.starts("decode")), len(second.starts("decode"))) == (1, 2)
    second.process.kill()  # it leaves its socket behind
    second.process.wait()
    assert ended(scale("decode=2"))[0] == 0
    assert len(alive(first, "decode")) == 2


def _command_line(up: Up) -> str:
    (router,) = up.starts("router").values()
    return " ".join(router["argv"])


def test_another_user_can_reach_the_cluster_or_bad_words_end_it(start: Start, scale: Scale, runtime_dir: Path) -> None:
    up = ready(start())
    (path,) = paths(runtime_dir).values()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    for words in (
        b"hello\n",
        b'{"type": "scale", "target": {"decode": "3"}, "wait_s": null}\n',
        b'{"type": "scale", "target": {"router": 3}, "wait_s": null}\n',
        b'{"type": "scale", "target": {"decode": -1}, "wait_s": null}\n',
        b'{"type": "scale", "target": {}, "wait_s": null}\n',
        b"x" * (MAX_LINE_BYTES + 1),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(path))
            connection.sendall(words)
            answer = decode_answer(connection.makefile("rb").readline())
        assert isinstance(answer, Refused)
        assert answer.code == "INVALID_ARGUMENT"
    assert ended(scale("decode=1"))[0] == 0
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert paths(runtime_dir) == {}


def test_folder_that_others_can_enter_was_used(runtime_dir: Path, start: Start) -> None:
    runtime_dir.chmod(0o755)
    with pytest.raises(Unavailable, match="not this user's alone"):
        listen(runtime_dir, 1)
    (runtime_dir / "2.sock").touch()
    assert paths(runtime_dir) == {}
    up = ready(start())  # it says so, and serves
    assert any("`splitserve scale` cannot reach this cluster" in line for line in up.lines)


def test_path_that_no_socket_can_have_was_tried(runtime_dir: Path) -> None:
    with pytest.raises(Unavailable, match="too long"):
        listen(runtime_dir / ("x" * 100), 1)


def test_cluster_that_does_not_answer_held_the_command_up(
    runtime_dir: Path, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splitserve.cli.scale import local

    listener, _ = listen(runtime_dir, 5)  # nobody accepts
    with listener:
        monkeypatch.setattr(local, "_ANSWER_TIMEOUT_S", 0.1)
        (cluster,) = local.local_clusters(runtime_dir)
        assert str(cluster) == "the cluster at port 5, which does not answer"
        with pytest.raises(Unavailable, match="nobody answers"):
            cluster.scale({"decode": 2}, timeout_s=1, is_waited_for=True, say=print)


def test_pasted_command_scales_another_cluster(start: Start) -> None:
    up = ready(start())
    up.wait_for("Ctrl-C here ends it")
    (port,) = re.findall(r"--grpc-port (\d+)", _command_line(up))
    assert any(line.endswith(f"scale decode=2 --port {port}") for line in up.lines)
