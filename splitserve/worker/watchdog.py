"""How an engine process notices that those it works for, or with, live no more or stand still.

Its front watches it, and it watches back: an engine that nobody listens to would compute, and hold its memory, for
ever. Used by the engine process alone.
"""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# A process that looks less often than this was itself stopped, swapped out, or deep in a step.
_LONGEST_GAP_S = 1.0


class StandstillError(RuntimeError):
    """Another part of this worker stands still; what it holds can only be freed by the end of the process."""


class Watchdog:
    """Watches a sign of life that has to change at least every `limit_s` seconds.

    Only time in which the looking process ran itself counts: two that were stopped together, and of which this one
    wakes first, are both given their time.
    """

    def __init__(self, what: str, sign: Callable[[], int], limit_s: float) -> None:
        self._what = what
        self._sign = sign
        self._limit_s = limit_s
        self._last_sign = -1
        self._looked_at = 0.0
        self._unchanged_s = 0.0

    def look(self, now: float) -> None:
        """Raises StandstillError when the sign has been the same for too long; `now` is monotonic seconds."""
        sign = self._sign()
        if sign == self._last_sign:
            self._unchanged_s += min(now - self._looked_at, _LONGEST_GAP_S)
        else:
            self._last_sign, self._unchanged_s = sign, 0.0
        self._looked_at = now
        if self._unchanged_s > self._limit_s:
            raise StandstillError(f"{self._what} stands still")


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, whatever it is stuck in then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
