"""Under more load than the router can carry, tokens of a stream wait a little for those that follow: what they cost
together is then paid once.

One `Pacer` per router: run by the composition root, asked by every attempt.
"""

import asyncio
import os
import time

_INTERVAL_S = 0.1
# The event loop's thread is busy for this share of the time, or all of the process for this share of its cores, or the
# loop is late by so much, when there is too much to do.
_BUSY, _CALM = 0.9, 0.7
_LATE_S = 0.05
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.2


class Pacer:
    """`pause_s` is how long the tokens that are here wait for more; 0 except under overload."""

    def __init__(self) -> None:
        self.pause_s = 0.0

    async def watch(self) -> None:
        """Runs until cancelled, on the event loop whose load it measures."""
        clock = asyncio.get_running_loop().time
        while True:
            began, worked, all_worked = clock(), time.thread_time(), time.process_time()
            await asyncio.sleep(_INTERVAL_S)
            took = clock() - began
            thread_s, process_s = time.thread_time() - worked, time.process_time() - all_worked
            # gRPC's own threads take their part of the cores, which may be but one.
            busy = max(thread_s, process_s / len(os.sched_getaffinity(0))) / took
            self.note(busy=busy, late_s=took - _INTERVAL_S)

    def note(self, *, busy: float, late_s: float) -> None:
        """What one interval was like; `busy` is between 0 and 1."""
        if busy > _BUSY or late_s > _LATE_S:
            self.pause_s = min(max(2 * self.pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
        elif busy < _CALM and self.pause_s:
            self.pause_s = self.pause_s / 2 if self.pause_s > _MIN_PAUSE_S else 0.0
