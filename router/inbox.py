"""What the workers of one attempt say, in the order in which it came; read by the attempt's task alone."""

import asyncio
from collections import deque

from router.worker import AttemptEvent


class Inbox:
    def __init__(self) -> None:
        self._events: deque[AttemptEvent] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, event: AttemptEvent) -> None:
        """Never blocks."""
        self._events.append(event)
        self._arrived.set()

    def put_back(self, events: list[AttemptEvent]) -> None:
        """In front of all others, in their order."""
        self._events.extendleft(reversed(events))

    async def next(self, timeout_s: float) -> AttemptEvent | None:
        """The next event, None when none has come within `timeout_s`; what came in its last moment counts."""
        if not self._events:
            try:
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                async with asyncio.timeout(timeout_s):
                    while not self._events:
                        self._arrived.clear()
                        await self._arrived.wait()
            except TimeoutError:
                if not self._events:
                    return None
        return self._events.popleft()
