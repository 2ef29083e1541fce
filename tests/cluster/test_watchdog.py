"""One of a worker's two processes is stopped or killed while the other lives on: the other ends itself, and the router
loses the worker."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.harness import Cluster, Process, wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = pytest.mark.cluster

# Far above what it takes: a second for the watchdog and some for an orderly end.
ENDING_S = 60.0


@pytest.fixture
def watched(pair: Cluster) -> Iterator[Process]:
    """One more decode worker, whose two processes give each other two seconds."""
    process = pair.add("decode", stall_timeout="2s")
    pair.wait_ready(3)
    yield process
    if process.popen.poll() is None:
        process.kill()


def is_joined(cluster: Cluster, process: Process) -> bool:
    return any(worker["pid"] == process.pid for worker in cluster.state()["workers"])


def health(process: Process) -> tuple[int, str]:
    """What an orchestrator sees of the worker: status and reason."""
    answer = httpx.get(f"http://127.0.0.1:{process.event('ready')['http_port']}/health/ready", timeout=30)
    return answer.status_code, answer.json()["status"]


def stop_engine(process: Process) -> int:
    process.is_killed = True
    pid = process.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped; what nobody has collected yet does neither."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_given_up(cluster: Cluster, process: Process, engine_pid: int) -> None:
    """Nobody wakes the engine or ends the front: it ends by itself, says why, and takes its engine along."""
    try:
        assert process.popen.wait(ENDING_S) == 1
    except subprocess.TimeoutExpired as error:
        raise AssertionError("the front lives on:\n" + "\n".join(process.lines[-15:])) from error
    process.event("the engine stands still")
    assert not is_alive(engine_pid)
    wait_for("the router to lose the worker", lambda: not is_joined(cluster, process))


def test_idle_engine_that_is_frozen_is_kept(pair: Cluster, watched: Process) -> None:
    engine_pid = stop_engine(watched)
    assert_given_up(pair, watched, engine_pid)
    assert len(pair.client.generate(prompt_of(20), max_tokens=2, ignore_eos=True).token_ids) == 2


def test_worker_with_a_frozen_engine_is_healthy(pair: Cluster) -> None:
    """Whoever restarts what is unhealthy would wait for ever (C69). It is healthy again as soon as the engine is."""
    process = pair.add("decode", stall_timeout="6s")
    pair.wait_ready(3)
    engine_pid = stop_engine(process)
    try:
        wait_for("the worker to be unhealthy", lambda: health(process)[0] == 503)
        assert "the engine has stood still for" in health(process)[1]
    finally:
        os.kill(engine_pid, signal.SIGCONT)
    wait_for("the worker to be healthy again", lambda: health(process)[0] == 200)


def test_engine_frozen_while_it_computes_is_kept(pair: Cluster, watched: Process) -> None:
    """Its requests end elsewhere, whole."""
    for worker in pair.of_role("decode"):
        if worker is not watched:
            worker.kill()
    pair.wait_ready(2)
    with pair.client.stream(prompt_of(20), max_tokens=400, ignore_eos=True) as stream:
        num_tokens = len(next(iter(stream)).token_ids)
        engine_pid = stop_engine(watched)
        pair.add("decode")
        num_tokens += sum(len(chunk.token_ids) for chunk in stream)
        assert num_tokens == 400
        assert stream.result().attempts == 2
    assert_given_up(pair, watched, engine_pid)


def test_engine_computes_for_a_front_that_is_frozen(pair: Cluster, watched: Process) -> None:
    """The router misses the front, its requests end elsewhere, the engine ends; a front that wakes ends, too."""
    engine_pid = watched.engine_pid()
    watched.is_killed = True
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    with ExitStack() as stack:
        # One for each of the two decode workers.
        streams = [stack.enter_context(pair.client.stream(prompt_of(20, seed), **options)) for seed in (1, 2)]
        num_tokens = [len(next(iter(stream)).token_ids) for stream in streams]
        os.kill(watched.pid, signal.SIGSTOP)
        for number, stream in enumerate(streams):
            num_tokens[number] += sum(len(chunk.token_ids) for chunk in stream)
    assert num_tokens == [400, 400]
    wait_for("the router to lose the worker", lambda: not is_joined(pair, watched))
    wait_for("the engine to end", lambda: not is_alive(engine_pid), ENDING_S)
    assert watched.event("the engine ends")["reason"] == "the front stands still"
    os.kill(watched.pid, signal.SIGCONT)
    assert watched.popen.wait(ENDING_S) == 1


def test_engine_that_is_stuck_outlives_a_killed_front(pair: Cluster, watched: Process) -> None:
    """An orphan would hold the memory of its pool until someone finds it."""
    engine_pid = stop_engine(watched)
    os.kill(watched.pid, signal.SIGKILL)
    watched.popen.wait(ENDING_S)
    wait_for("the engine to end", lambda: not is_alive(engine_pid), ENDING_S)
    wait_for("the router to lose the worker", lambda: not is_joined(pair, watched))
