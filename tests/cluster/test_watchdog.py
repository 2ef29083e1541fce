"""An engine process that is stopped while its front lives on: the front ends itself and the router loses the worker."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, Process, wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = pytest.mark.cluster

# Far above what it takes: a second for the watchdog and some for an orderly end.
ENDING_S = 60.0


@pytest.fixture
def watched(pair: Cluster) -> Iterator[Process]:
    """One more decode worker, which gives its engine a second."""
    process = pair.add("decode", stall_timeout="1s")
    pair.wait_ready(3)
    yield process
    if process.popen.poll() is None:
        process.kill()


def is_joined(cluster: Cluster, process: Process) -> bool:
    return any(worker["pid"] == process.pid for worker in cluster.state()["workers"])


def stop_engine(process: Process) -> int:
    process.is_killed = True
    pid = process.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    return pid


def assert_given_up(cluster: Cluster, process: Process, engine_pid: int) -> None:
    """Nobody wakes the engine or ends the front: it ends by itself, says why, and takes its engine along."""
    try:
        assert process.popen.wait(ENDING_S) == 1
    except subprocess.TimeoutExpired as error:
        raise AssertionError("the front lives on:\n" + "\n".join(process.lines[-15:])) from error
    process.event("the engine stands still")
    assert not Path(f"/proc/{engine_pid}").exists()
    wait_for("the router to lose the worker", lambda: not is_joined(cluster, process))


def test_idle_engine_that_is_frozen_is_kept(pair: Cluster, watched: Process) -> None:
    engine_pid = stop_engine(watched)
    assert_given_up(pair, watched, engine_pid)
    assert len(pair.client.generate(prompt_of(20), max_tokens=2, ignore_eos=True).token_ids) == 2


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
