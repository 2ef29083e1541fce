"""Threads for what would hold up the event loop, and with it everybody's tokens. State of the event loop's thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

# What is being made is several times as large as what it is made of: never much of it at once.
_MAX_AT_ONCE = 2


class LongWork:
    """Only for pure Python, or for calls that are short one by one: a long call into C holds up all threads."""

    def __init__(self) -> None:
        self._idle = asyncio.Semaphore(_MAX_AT_ONCE)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` gives or raises. A hop costs about 50 µs."""
        await self._idle.acquire()
        running = asyncio.get_running_loop().run_in_executor(None, work)
        running.add_done_callback(lambda _: self._idle.release())
        # A thread cannot be interrupted: it is busy also after its caller has left.
        return await asyncio.shield(running)
