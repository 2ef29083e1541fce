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
        self._reader: asyncio.Future[None] | None = None

    def put(self, mailbox: object, event: AttemptEvent) -> None:
        """Never blocks."""
        self._events.append((mailbox, event))
        if self._reader is not None:
            _wake(self._reader)

    def drop(self, mailbox: object) -> None:
        """Nobody wants to hear any more of what came through `mailbox`."""
        self._events = deque(entry for entry in self._events if entry[0] is not mailbox)

    async def next(self, timeout_s: float) -> AttemptEvent | None:
        """The next event, None when none has come within `timeout_s`; what came in its last moment counts."""
        if not self._events:
            await self._wait(timeout_s)
        return self.take()

    def take(self) -> AttemptEvent | None:
        """The next event, None where none is here."""
        return self._events.popleft()[1] if self._events else None

    def is_next(self, kind: type[AttemptEvent]) -> bool:
        """Whether an event is here, and the next one is of this kind."""
        return bool(self._events) and isinstance(self._events[0][1], kind)

    async def find(self, is_wanted: Callable[[AttemptEvent], bool], timeout_s: float) -> AttemptEvent | None:
        """As `next`, the first one that is wanted; it stays where it is."""
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s
        while (found := self.first(is_wanted)) is None and (left := until - clock()) > 0:
            await self._wait(left)
        return found

    def first(self, is_wanted: Callable[[AttemptEvent], bool]) -> AttemptEvent | None:
        """As `find`, of what is here already."""
        return next((event for _, event in self._events if is_wanted(event)), None)

    async def _wait(self, timeout_s: float) -> None:
        """Until something is put in, or the time is over. Once for each token of every stream: so with nothing but a
        future and a timer."""
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_later(timeout_s, _wake, reader)
        try:
            await reader
        finally:
            timer.cancel()
            self._reader = None


def _wake(reader: "asyncio.Future[None]") -> None:
    if not reader.done():
        reader.set_result(None)
