"""How long a request was in each stage: one measurement, which `/metrics` counts and a client may ask for.

A request is in exactly one stage from its arrival on, so its stages add up to its whole time. Its clock is owned by its
`RequestRecord` (`metrics`), which starts and ends it; `flow` and `attempt` tell it every change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where a request spends its time, in order; a lost attempt leads back to the queue."""

    TOKENIZE = "tokenize"
    "Being checked and, if it is text, tokenized."
    QUEUE = "queue"
    "Waiting for workers: in the queue, for its reservation, and for another prefill worker."
    PREFILL = "prefill"
    HANDOFF = "handoff"
    "The first token is known, and the blocks are on their way."
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Timings:
    """`seconds` in each stage, over all attempts; `transfer_bytes` of KV blocks in the transfers that came whole."""

    seconds: Mapping[Stage, float]
    transfer_bytes: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class StageClock:
    """Begins in the first stage. Each stay in a stage is told to `observe` when it ends."""

    def __init__(self, observe: Callable[[Stage, float], None], clock: Callable[[], float]) -> None:
        self._observe = observe
        self._clock = clock
        self._stage: Stage | None = Stage.TOKENIZE
        self._began = clock()
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._transfers: dict[str, int] = {}

    def enter(self, stage: Stage) -> None:
        """Goes on with the stay where the request is in `stage` already; nothing follows the end."""
        if self._stage is not None and stage is not self._stage:
            self._leave(self._stage)
            self._stage = stage

    def end(self) -> None:
        """Idempotent."""
        if self._stage is not None:
            self._leave(self._stage)
            self._stage = None

    def transferred(self, transfer_id: str, num_bytes: int) -> None:
        """Said twice it counts once."""
        self._transfers[transfer_id] = num_bytes

    def timings(self) -> Timings:
        """Up to now, or to the end."""
        seconds = dict(self._seconds)
        if self._stage is not None:
            seconds[self._stage] += self._clock() - self._began
        return Timings(seconds, sum(self._transfers.values()))

    def _leave(self, stage: Stage) -> None:
        now = self._clock()
        self._seconds[stage] += now - self._began
        self._observe(stage, now - self._began)
        self._began = now
