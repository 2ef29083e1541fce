"""The front's watchdog: an engine that stands still and is kept, or a healthy one that is ended."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.service.lifecycle import StopRequest
from splitserve.worker import clock as clock_module
from splitserve.worker import front as front_module
from splitserve.worker.child import EngineProcess
from splitserve.worker.clock import Signs, StepClock
from splitserve.worker.config import WorkerConfig
from splitserve.worker.front import Front, Role

LIMIT_S = 10.0


class FakeProcess:
    """An engine process that is there until it is killed; with `is_gone` it has ended by itself."""

    def __init__(self, is_gone: bool = False) -> None:
        self.is_killed = False
        self._is_gone = is_gone

    def kill(self) -> None:
        if self._is_gone:
            raise ProcessLookupError
        self.is_killed = True


class ScriptedClock:
    """Gives one of `signs` after another, and stays with the last."""

    def __init__(self, signs: Sequence[Signs]) -> None:
        self._signs = list(signs)
        self.num_reads = 0
        self.num_front_beats = 0

    def beat_front(self) -> None:
        self.num_front_beats += 1

    def read(self) -> Signs:
        self.num_reads += 1
        return self._signs[min(self.num_reads, len(self._signs)) - 1]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_WATCH_INTERVAL_S", 0.0)


async def watch(clock: Any, process: FakeProcess) -> StopRequest:
    """Runs the watchdog until it gives up on the engine."""
    front = Front(Role.DECODE, WorkerConfig(stall_timeout=LIMIT_S))
    unused: Any = None
    front._engine = EngineProcess(process, unused, clock)  # type: ignore[arg-type]
    stop = StopRequest()
    async with asyncio.timeout(30):
        await front._watch(stop)
    return stop


# steps, age of the running step, silence
STARTING = Signs(0, 0.0, 0.0)
IDLE = Signs(7, 0.0, 0.2)
COMPUTING = Signs(7, 9.9, 9.9)
STUCK_IN_A_STEP = Signs(7, 10.1, 10.1)
FROZEN_WHILE_IDLE = Signs(7, 0.0, 10.1)
QUIET_FOR_A_WHILE = Signs(7, 0.0, 9.9)


@pytest.mark.parametrize("end", [STUCK_IN_A_STEP, FROZEN_WHILE_IDLE], ids=["in-a-step", "idle"])
async def test_engine_that_stands_still_is_kept(end: Signs) -> None:
    """The engine is killed, because it may never listen again, and the worker ends with an error status."""
    clock, process = ScriptedClock([end]), FakeProcess()
    stop = await watch(clock, process)
    assert process.is_killed
    assert (stop.status, stop.reason) == (1, "the engine stands still")


@pytest.mark.parametrize("end", [STUCK_IN_A_STEP, FROZEN_WHILE_IDLE], ids=["in-a-step", "idle"])
async def test_healthy_engine_is_ended(end: Signs) -> None:
    """Starting, idle, quiet or deep in a step below the limit: looked at and left alone, until one is above it."""
    healthy = [STARTING, IDLE, COMPUTING, QUIET_FOR_A_WHILE, IDLE]
    clock, process = ScriptedClock([*healthy, end]), FakeProcess()
    await watch(clock, process)
    assert clock.num_reads == len(healthy) + 1
    assert clock.num_front_beats == clock.num_reads, "the engine has to see that the front watches"


async def test_engine_that_is_gone_already_breaks_the_watchdog() -> None:
    stop = await watch(ScriptedClock([STUCK_IN_A_STEP]), FakeProcess(is_gone=True))
    assert stop.status == 1


async def test_engine_pays_for_a_front_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were stopped and wake together, the front first: the engine gets its time to show a sign of life."""
    monkeypatch.setattr(front_module, "_WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(front_module, "_OWN_STANDSTILL_S", 0.1)
    stale = 0

    class Stopped(ScriptedClock):
        def read(self) -> Signs:
            nonlocal stale
            signs = super().read()
            if self.num_reads == 1:
                time.sleep(0.3)  # the whole event loop with it
            stale += signs == STUCK_IN_A_STEP
            return signs

    clock, process = Stopped([COMPUTING, STUCK_IN_A_STEP, STUCK_IN_A_STEP, IDLE]), FakeProcess()
    watching = asyncio.create_task(watch(clock, process))
    while clock.num_reads < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert stale == 2
    assert not watching.done()
    watching.cancel()
    assert not process.is_killed


async def test_engine_that_never_wakes_is_kept_by_a_front_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(front_module, "_OWN_STANDSTILL_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", 0.2)

    class Stopped(ScriptedClock):
        def read(self) -> Signs:
            if self.num_reads == 0:
                time.sleep(0.3)
            return super().read()

    process = FakeProcess()
    stop = await watch(Stopped([COMPUTING._replace(step_age_s=0.1), STUCK_IN_A_STEP]), process)
    assert process.is_killed
    assert stop.status == 1


# The step clock


class Time:
    """Nanoseconds that move when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def pass_by(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic_ns=fake.monotonic_ns))
    return fake


@pytest.fixture
def clocks(now: Time) -> Iterator[tuple[StepClock, StepClock]]:
    """The engine's and the front's, over one piece of memory."""
    fd = StepClock.create()
    yield StepClock(fd), StepClock(fd)
    os.close(fd)


def test_engine_that_still_starts_looks_frozen(now: Time, clocks: tuple[StepClock, StepClock]) -> None:
    now.pass_by(1000)
    assert clocks[1].read() == Signs(0, 0.0, 0.0)


def test_signs_do_not_cross_the_processes(now: Time, clocks: tuple[StepClock, StepClock]) -> None:
    engine, front = clocks
    engine.beat()
    now.pass_by(2)
    assert front.read() == Signs(0, 0.0, 2.0)
    engine.begin_step()
    now.pass_by(3)
    assert front.read() == Signs(0, 3.0, 3.0)
    engine.advance_step()
    now.pass_by(1)
    assert front.read() == Signs(0, 1.0, 1.0)
    engine.end_step()
    assert front.read() == Signs(1, 0.0, 0.0)
    engine.begin_step()
    now.pass_by(1)
    engine.end_step()
    now.pass_by(4)
    assert front.read() == Signs(2, 0.0, 4.0)
    engine.beat()
    assert front.read() == Signs(2, 0.0, 0.0)


@pytest.mark.parametrize("stage", ["in-a-step", "idle"])
async def test_clock_of_a_stopped_engine_reaches_no_watchdog(
    stage: str, now: Time, clocks: tuple[StepClock, StepClock]
) -> None:
    """Both together: the engine's last sign, time that passes, and the front that acts on it."""
    engine, front = clocks
    engine.beat()
    if stage == "in-a-step":
        engine.begin_step()
    process = FakeProcess()
    watching = asyncio.create_task(watch(front, process))
    for _ in range(9):
        now.pass_by(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not watching.done()
    assert not process.is_killed
    now.pass_by(1.1)
    await watching
    assert process.is_killed
