"""How long a worker may owe an attempt a word: as long as the step lasts that it cannot interrupt, and, where the word
waits for blocks, as long as blocks arrive.

Asked by `attempt`. A worker that is dead, silent or stuck in a step is none of its business: `membership` ends its
session, and the attempt hears of that.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.events import AttemptEvent, Ended
from router.inbox import Inbox
from router.worker import Worker
from splitserve.service.reasons import Reason

# It answers between two steps: a step may have begun before it was asked, and the one after that only by a mishap.
_STEPS_TO_ANSWER = 2


@dataclass(frozen=True, slots=True)
class Debt:
    """Who has to speak next, and within what time. While blocks arrive there, its time begins anew for `blocks_s`."""

    worker: Worker
    limit_s: float
    blocks_s: float = 0.0


class Patience:
    """For one answer of one worker; `is_over` is asked again and again, with time for a load report in between."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._looks: list[int] = []
        self._num_bytes = worker.load.kv_bytes_received

    def is_over(self) -> bool:
        """Whether it has had every chance to answer since the first look: it is idle, or has finished two steps.

        The first look never decides. What is known there of its steps may be older than what it was asked, and the
        report that its step has ended comes before its answer.
        """
        load = self._worker.load
        self._looks.append(load.engine_steps)
        if len(self._looks) == 1:
            return False
        is_idle = load.step_age_s == 0.0 and self._looks[-1] == self._looks[-2]
        return is_idle or self._looks[-1] - self._looks[0] >= _STEPS_TO_ANSWER

    def blocks_have_come(self) -> bool:
        """Whether the worker has received any since this was asked last; if so the wait begins anew."""
        before, self._num_bytes = self._num_bytes, self._worker.load.kv_bytes_received
        if self._num_bytes > before:
            self._looks.clear()
        return self._num_bytes > before


async def next_word(
    inbox: Inbox, debt: Debt, seconds_left: Callable[[], float], report_interval_s: float
) -> AttemptEvent:
    """The next event; the debtor's end if there is none in time, and then within the step that it is in.

    `report_interval_s` is within what a live worker reports its load. TimeoutError is the request's deadline, not the
    attempt's.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    patience = Patience(debt.worker)
    wait_s = debt.limit_s
    while True:
        left = seconds_left()
        event = await inbox.next(min(wait_s, left))
        if event is not None:
            return event
        if left <= wait_s:
            raise TimeoutError
        # Not for ever: those may be the blocks of others.
        if clock() - began < debt.blocks_s and patience.blocks_have_come():
            wait_s = debt.limit_s
        elif patience.is_over():
            message = f"{debt.worker.worker_id} said nothing for more than {debt.limit_s:g} s, and is in no long step"
            return Ended(debt.worker.worker_id, Reason.TIMEOUT, message)
        else:
            wait_s = report_interval_s
