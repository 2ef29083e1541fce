"""How long a worker may owe an attempt an answer: as long as the step lasts that it cannot interrupt, and, where the
answer waits for blocks, as long as blocks arrive.

Asked by `attempt` once a limit has passed. A worker that is dead, silent or stuck in a step is none of its business:
`membership` ends its session, and the attempt hears of that.
"""

from router.worker import Worker

# It answers between two steps: a step may have begun before it was asked, and the one after that only by a mishap.
_STEPS_TO_ANSWER = 2


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
