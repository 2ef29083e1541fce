"""The step clock: a few words of shared memory in which the engine thread leaves signs of life for the front, and the
front for the engine.

Messages would not do: an engine that is stuck in a step, stopped, or swapped out sends none, and telling these apart
from an idle one is the point. A front that hangs sends none either, and an idle engine expects none.
"""

import mmap
import os
import struct
import time
from typing import NamedTuple

# Finished steps, last progress of the running step (ns, 0 = idle), last sign of life (ns).
_WORDS = struct.Struct("<QQQ")
# Behind them: how often the front has shown a sign of life.
_FRONT_BEATS = struct.Struct("<Q")


class Signs(NamedTuple):
    """What the front sees: counters, and ages in seconds. `step_age_s` counts from the running step's last progress."""

    steps: int
    step_age_s: float
    silence_s: float

    @property
    def standstill_s(self) -> float:
        """How long the engine has got no further, in a step or idle."""
        return self.step_age_s or self.silence_s


class StepClock:
    """One writer of each word (the engine thread, or the front), any number of readers. Torn reads are harmless: the
    next read corrects them."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._steps = 0
        self._front_beats = 0

    @staticmethod
    def create() -> int:
        """A descriptor of fresh shared memory, to be inherited by the engine process."""
        fd = os.memfd_create("splitserve-step-clock")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def beat(self) -> None:
        self._write(0)

    def begin_step(self) -> None:
        self._write(time.monotonic_ns())

    # A step of many tokens may take longer than anything that is stuck is waited for.
    advance_step = begin_step

    def end_step(self) -> None:
        self._steps += 1
        self._write(0)

    def _write(self, began: int) -> None:
        _WORDS.pack_into(self._memory, 0, self._steps, began, time.monotonic_ns())

    def read(self) -> Signs:
        steps, began, seen = _WORDS.unpack_from(self._memory, 0)
        now = time.monotonic_ns()
        return Signs(steps, (now - began) / 1e9 if began else 0.0, (now - seen) / 1e9 if seen else 0.0)

    # The front's word

    def beat_front(self) -> None:
        self._front_beats += 1
        _FRONT_BEATS.pack_into(self._memory, _WORDS.size, self._front_beats)

    def front_beats(self) -> int:
        (beats,) = _FRONT_BEATS.unpack_from(self._memory, _WORDS.size)
        return int(beats)
