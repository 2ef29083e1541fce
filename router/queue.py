"""The one long queue of the cluster: bounded, ordered, and where a dead client or a deadline is acted on.

Re-attempts go before new work, then higher priority, then earlier arrival. Owned by `dispatcher`; state of
the event loop's thread.
"""

import asyncio
import bisect
from dataclasses import dataclass, field

from router.attempt import Attempt
from router.scheduler import Demand
from splitserve.service.errors import Overloaded


@dataclass(eq=False)
class Waiting:
    """One attempt that waits for its pair: `attempt` once it is granted."""

    demand: Demand
    is_retry: bool
    priority: int
    arrival: int
    blocked_since: float | None = None
    "When it first was the one that waits for room while others may pass it."
    _granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    attempt: Attempt | None = None
    is_paused: bool = False
    "Keeps its place and its room, and is granted nothing yet."

    @property
    def rank(self) -> tuple[bool, int, int]:
        return (not self.is_retry, -self.priority, self.arrival)

    async def granted_within(self, timeout_s: float) -> Attempt | None:
        """The attempt, None if there is none in time."""
        await asyncio.wait([self._granted], timeout=timeout_s)
        return self.attempt

    def grant(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._granted.set_result(None)


class RequestQueue:
    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: list[Waiting] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def in_order(self) -> list[Waiting]:
        """Who waits, first to last; a copy, so that it may be walked while entries leave."""
        return list(self._waiting)

    def check_room(self, num_tokens: int) -> None:
        """Raises Overloaded, with the true numbers, when a new request may not wait here."""
        if len(self._waiting) >= self._max_requests:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, the limit is {self._max_requests}",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        if self._waiting and self._num_tokens + num_tokens > self._max_tokens:
            raise Overloaded(
                f"{self._num_tokens} prompt tokens are waiting: {num_tokens} more would pass {self._max_tokens}",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )

    def add(self, waiting: Waiting) -> None:
        """A re-attempt is never refused: it was admitted once."""
        bisect.insort(self._waiting, waiting, key=lambda entry: entry.rank)
        self._num_tokens += waiting.demand.num_tokens

    def remove(self, waiting: Waiting) -> None:
        """Idempotent."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._num_tokens -= waiting.demand.num_tokens
