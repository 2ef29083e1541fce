"""What the workers of one attempt say, in the order in which it came.

Made by `dispatcher`, one for an attempt and all its legs, which put in what their workers say; read by the attempt's
task alone, through `patience` where a word is owed and `causes` where another one may explain it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from router.events import AttemptEvent


class Inbox:
    """Each event comes from a mailbox: the attempt itself, or one of its legs."""

    def __init__(self) -> None:
        self._events: deque[tuple[object, AttemptEvent]] = deque()
        self._arrived = asyncio.Event()

    def put(self, mailbox: object, event: AttemptEvent) -> None:
        """Never blocks."""
        self._events.append((mailbox, event))
        self._arrived.set()

    def drop(self, mailbox: object) -> None:
        """Nobody wants to hear any more of what came through `mailbox`."""
        self._events = deque(entry for entry in self._events if entry[0] is not mailbox)

    async def next(self, timeout_s: float) -> AttemptEvent | None:
        """The next event, None when none has come within `timeout_s`; what came in its last moment counts."""
        await self.find(lambda _: True, timeout_s)
        return self._events.popleft()[1] if self._events else None

    async def find(self, is_wanted: Callable[[AttemptEvent], bool], timeout_s: float) -> AttemptEvent | None:
        """As `next`, the first one that is wanted; it stays where it is."""
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            async with asyncio.timeout(timeout_s):
                while (found := self.first(is_wanted)) is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                return found
        except TimeoutError:
            return self.first(is_wanted)

    def first(self, is_wanted: Callable[[AttemptEvent], bool]) -> AttemptEvent | None:
        """As `find`, of what is here already."""
        return next((event for _, event in self._events if is_wanted(event)), None)
