"""`splitserve up` over processes that live and die as told: what should live is started again, nothing outlives it."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.cli.keeper import Policy
from tests.cli.up_process import Up, eventually, is_alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_left_a_process_or_a_bad_exit_status(start: Callable[..., Up], number: int) -> None:
    up = start(prefill=2, decode=2, env={"FAKE_DECODE": "parent"})
    up.wait_for("The cluster is ready")
    assert eventually(lambda: len(up.pids()) == 7)
    up.signal_group(number)
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGINT"), (signal.SIGTERM, "SIGTERM")],
    ids=lambda value: str(value),
)
def test_ctrl_c_waits_for_streams_or_sigterm_does_not(start: Callable[..., Up], number: int, passed_on: str) -> None:
    """Roles drain on SIGTERM and end at once on SIGINT."""
    up = start()
    up.wait_for("The cluster is ready")
    for role in ("decode", "prefill"):
        up.wait_for(f"{role} is up")
    up.process.send_signal(number)
    assert up.end() == 0
    for role in ("router", "prefill", "decode"):
        assert [path.suffix for path in up.directory.glob(f"{role}.SIG*")] == [f".{passed_on}"]


def test_ready_cluster_hid_what_its_start_took(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start(env={"FAKE_ROUTER": "patient", "FAKE_PREFILL": "telling"})
    up.wait_for("prefill is up")
    (tmp_path / "go").touch()
    up.wait_for("The cluster is ready")
    up.wait_for("| prefill-0 started in")  # the other stream: nothing orders the two
    own = [line.partition("| ")[2] for line in up.lines if line.startswith("splitserve ")]
    assert own[0].startswith("ready after ")
    assert own[1] == "prefill-0 started in 3.5 s: imports 3.0, other 0.5; all of it"


def test_process_that_ignores_sigterm_kept_the_cluster_from_ending(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_PREFILL": "stubborn"})
    up.wait_for("prefill is up")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []


def test_second_interrupt_was_ignored(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_PREFILL": "stubborn", "FAKE_GRACE": "600"})
    up.wait_for("prefill is up")
    up.process.send_signal(signal.SIGINT)
    up.wait_for("stopping")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []


def test_killed_supervisor_left_orphans(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_for("The cluster is ready")
    up.wait_for("decode is up")
    up.wait_for("prefill is up")
    pids = up.pids()
    assert len(pids) == 3
    up.process.kill()
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_dead_worker_stayed_dead_or_left_its_own_child(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_DECODE": "parent"})
    up.wait_for("The cluster is ready")
    up.wait_for("decode is up")
    (first,), (grandchild,) = up.starts("decode"), up.starts("grandchild")
    os.kill(first, signal.SIGKILL)
    up.wait_for("decode-0 was killed by SIGKILL")
    assert eventually(lambda: len(up.starts("decode")) == 2)
    assert not is_alive(grandchild)
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []


def test_dead_router_stayed_dead(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_for("The cluster is ready")
    (first,) = up.starts("router")
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: len(up.starts("router")) == 2)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0


def test_hopeless_worker_was_started_for_ever(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_PREFILL": "config", "FAKE_ROUTER": "patient"})
    assert up.end() == 1
    assert len(up.starts("prefill")) == 1
    assert "splitserve: prefill-0 cannot start: block size 7 does not divide 16" in up.lines
    assert [pid for pid in up.pids() if is_alive(pid)] == []


@pytest.mark.parametrize("role", ["decode", "router"])
def test_one_that_cannot_start_again_ended_the_others(start: Callable[..., Up], tmp_path: Path, role: str) -> None:
    """It is tried again, slowly, and serves once what became wrong is mended."""
    up = start(decode=2)
    up.wait_for("The cluster is ready")
    assert eventually(lambda: len(up.pids()) == 4)
    victim, others = next(iter(up.starts(role))), set(up.pids())
    others.remove(victim)
    behaviour = tmp_path / f"{role}.behaviour"
    behaviour.write_text("config")
    os.kill(victim, signal.SIGKILL)
    up.wait_for(" cannot start: block size 7 does not divide 16; starting it again in 0.2 s")
    assert eventually(lambda: len(up.pids()) >= 7)
    assert all(is_alive(pid) for pid in others)
    behaviour.write_text("")
    assert eventually(lambda: any(is_alive(pid) and pid not in others for pid in up.starts(role)))
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0


def test_worker_that_always_dies_kept_the_start_going_for_ever(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_DECODE": "crash", "FAKE_ROUTER": "crash"})
    assert up.end() == 1
    assert any("3 times before the cluster was ready: out of luck" in line for line in up.lines)
    assert [pid for pid in up.pids() if is_alive(pid)] == []


@pytest.mark.parametrize("flag", ["grpc_port", "http_port", "internal_port"])
def test_taken_port_was_found_out_too_late(start: Callable[..., Up], flag: str) -> None:
    with socket.socket() as held:
        # gRPC servers share their ports with whoever asks; that must count as taken, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        up = start(**{flag: port})
        assert up.end() == 1
    assert any(f"port {port} " in line and f"--{flag.replace('_', '-')}" in line for line in up.lines)
    assert up.pids() == []


def test_interrupt_while_the_model_is_fetched_failed(start: Callable[..., Up]) -> None:
    up = start(env={"FAKE_LOCATE": "slow"})
    up.wait_for("locating")
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert up.pids() == []


def test_output_was_torn_or_lost(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start(log_dir=str(tmp_path / "logs"), env={"FAKE_DECODE": "chatty"})
    up.wait_for("The cluster is ready")
    up.wait_for("halfdecode is up")
    up.wait_for("prefill is up")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert sum(line.count("x") for line in up.lines if line.startswith("decode-0")) == 200_000
    assert "decode-0   | halfdecode is up" in up.lines
    assert "router     | router is up" in up.lines
    assert (tmp_path / "logs" / "prefill-0.log").read_text() == "prefill is up\n"


def test_closed_output_blocked_the_cluster(start: Callable[..., Up], tmp_path: Path) -> None:
    fifo = tmp_path / "stderr"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    up = start(stderr_path=fifo)
    up.wait_for("The cluster is ready")
    assert eventually(lambda: len(up.pids()) == 3)
    os.close(reader)
    os.kill(next(iter(up.starts("decode"))), signal.SIGKILL)  # makes the supervisor write
    assert up.end() == 0
    assert [pid for pid in up.pids() if is_alive(pid)] == []


def test_settings_of_up_leaked_into_its_children(start: Callable[..., Up]) -> None:
    up = start(
        env={"SPLITSERVE_CORES": "0", "SPLITSERVE_MODEL": "/other", "SPLITSERVE_MAX_ATTEMPTS": "7"}, cores="none"
    )
    up.wait_for("The cluster is ready")
    assert eventually(lambda: len(up.pids()) == 3)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    for role in ("router", "prefill", "decode"):
        (recorded,) = up.starts(role).values()
        assert "SPLITSERVE_CORES" not in recorded["env"]
        assert "SPLITSERVE_MODEL" not in recorded["env"]
        assert recorded["env"]["SPLITSERVE_MAX_ATTEMPTS"] == "7"
        assert "--cores" not in recorded["argv"]
        assert recorded["argv"][recorded["argv"].index("--model") + 1] == "/models/fake"


def test_back_off_stood_still_or_overflowed() -> None:
    policy = Policy(first_delay_s=0.5, longest_delay_s=30.0)
    assert [policy.delay_s(n) for n in (1, 2, 3, 7, 5000)] == [0.5, 1.0, 2.0, 30.0, 30.0]
