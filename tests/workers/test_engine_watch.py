"""The engine's own watch: over its front, over its KV thread, and what happens when either is gone."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.engine.pool import KVPool
from splitserve.worker import engine_process, reports
from splitserve.worker.clock import Signs, StepClock
from splitserve.worker.engine_process import EngineLoop
from splitserve.worker.link import EngineLink, socket_pair
from splitserve.worker.watchdog import StandstillError, Watchdog
from tests.workers.pair import PATIENCE_S, EngineRig, NoClock, Pair
from tests.workers.test_hand_off import prompt_of

MakePair = Callable[..., Pair]

LIMIT_S = 10.0


class Sign:
    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        return self.value


@pytest.fixture
def sign() -> Sign:
    return Sign()


def look_until(watchdog: Watchdog, start: float, end: float, interval_s: float = 0.2) -> None:
    for number in range(round((end - start) / interval_s) + 1):
        watchdog.look(start + number * interval_s)


def test_one_that_stands_still_is_kept(sign: Sign) -> None:
    watchdog = Watchdog("the front", sign, LIMIT_S)
    look_until(watchdog, 100.0, 109.9)
    with pytest.raises(StandstillError, match="the front stands still"):
        look_until(watchdog, 110.0, 110.4)


def test_one_that_shows_signs_is_taken_for_dead(sign: Sign) -> None:
    """Each sign buys the whole limit, also the last one before it stands still."""
    watchdog = Watchdog("the front", sign, LIMIT_S)
    for second in range(100, 200, 9):
        sign.value += 1
        look_until(watchdog, second, second + 8.8)
    with pytest.raises(StandstillError):
        look_until(watchdog, 200.0, 210.0)


def test_front_pays_for_an_engine_that_was_stopped(sign: Sign) -> None:
    """Both were stopped for a minute and the engine wakes first: the front gets its time."""
    watchdog = Watchdog("the front", sign, LIMIT_S)
    look_until(watchdog, 100.0, 101.0)
    look_until(watchdog, 161.0, 168.0)
    sign.value += 1
    look_until(watchdog, 168.2, 178.0)
    with pytest.raises(StandstillError):
        look_until(watchdog, 178.2, 178.6)


def test_engine_of_long_steps_never_misses_its_front(sign: Sign) -> None:
    watchdog = Watchdog("the front", sign, LIMIT_S)
    with pytest.raises(StandstillError):
        look_until(watchdog, 100.0, 160.0, interval_s=3.0)


def test_front_that_does_not_beat_yet_is_never_missed(sign: Sign) -> None:
    """It may hang between the engine's word that it is ready and its own first beat."""
    fd = StepClock.create()
    watchdog = Watchdog("the front", StepClock(fd).front_beats, LIMIT_S)
    os.close(fd)
    with pytest.raises(StandstillError):
        look_until(watchdog, 100.0, 110.4)


def test_beats_of_the_front_do_not_cross_the_processes() -> None:
    fd = StepClock.create()
    engine, front = StepClock(fd), StepClock(fd)
    os.close(fd)
    engine.begin_step()
    for _ in range(3):
        front.beat_front()
    assert engine.front_beats() == 3
    engine.end_step()
    engine.beat()
    assert engine.front_beats() == 3
    assert front.read().steps == Signs(1, 0.0, 0.0).steps


# The KV thread


class StuckStore:
    """A pool whose KV thread hangs in its first write until it is let go."""

    def __init__(self, pool: KVPool, let_go: threading.Event) -> None:
        self._pool = pool
        self._let_go = let_go
        self.block_nbytes = pool.block_nbytes
        self.lend = pool.lend
        self.view = pool.view

    def write(self, block_id: int, data: memoryview) -> None:
        self._let_go.wait(PATIENCE_S)
        self._pool.write(block_id, data)


def watched_loop(rig: EngineRig, limit_s: float) -> EngineLoop:
    """The rig's engine, with the watch over its KV thread that a worker has."""
    watchdogs = engine_process.watchdogs(StepClock(StepClock.create()), rig.agent, limit_s)
    return EngineLoop(rig.engine, rig.reports.append, rig.inbox, NoClock(), watchdogs=watchdogs[1:])


def test_engine_lives_on_without_its_kv_thread(make_pair: MakePair) -> None:
    """A KV thread that hangs answers no cancel: what it holds would be held for ever by a worker that looks healthy."""
    let_go = threading.Event()
    pair = make_pair(make_store=lambda pool: StuckStore(pool, let_go))
    try:
        pair.decode.loop = watched_loop(pair.decode, 0.3)
        pair.begin(prompt_of(20), max_tokens=2)
        with pytest.raises(StandstillError, match="the KV thread stands still"):
            pair.until(lambda: False)
    finally:
        let_go.set()


def test_idle_kv_thread_shows_no_sign_of_life(make_pair: MakePair) -> None:
    pair = make_pair()
    for agent in (pair.prefill.agent, pair.decode.agent):
        before = agent.num_turns
        give_up = time.monotonic() + PATIENCE_S
        while agent.num_turns < before + 3:
            assert time.monotonic() < give_up
            time.sleep(0.01)


# The front's end


class ExitedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise ExitedError(status)

    monkeypatch.setattr(engine_process, "_FRONT_GONE_GRACE_S", 0.0)
    monkeypatch.setattr(engine_process, "os", SimpleNamespace(_exit=leave))


def read_commands(link: EngineLink) -> list[Any]:
    """What reaches the engine until its process would end."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with pytest.raises(ExitedError):
        engine_process._read_commands(link, inbox)
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


def test_engine_stuck_in_a_step_outlives_its_front(exits: None) -> None:
    """It would never read the end in its inbox: the reader waits a while and ends the process."""
    front, engine = socket_pair()
    front.close()
    assert read_commands(EngineLink(engine)) == [None]


def test_engine_outlives_a_front_killed_with_reports_unread(exits: None) -> None:
    """The kernel then resets the connection instead of ending it."""
    front, engine = socket_pair()
    link = EngineLink(engine)
    link.send(reports.Progress(text="unread"))
    front.close()
    assert read_commands(link) == [None]


def test_engine_goes_deaf_by_a_command_that_it_does_not_know(exits: None) -> None:
    front, engine = socket_pair()
    front.sendall(b"\x01\x00\x00\x00\xc0")
    assert read_commands(EngineLink(engine)) == [None]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
"""
CHILD = """
import os, time
from splitserve.worker.watchdog import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_process_stuck_in_native_code_outlives_its_parent() -> None:
    """Nothing of its own runs any more: only the kernel can end it. Here it is stopped, which is as good as stuck."""
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    give_up = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped: an orphan may stay a zombie where nobody collects it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
