"""How a process starts its event loop and learns that it should end: signals, or the end of its parent."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop


class StopRequest:
    """Set once, by whoever comes first; carries the exit status to use.

    A drain may come before it: no new work, and what runs goes on for a while. Asked a second time it is a stop.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._drain = asyncio.Event()
        self.status = 0
        self.reason = ""

    def set(self, reason: str, status: int = 0) -> None:
        if not self._event.is_set():
            self.status, self.reason = status, reason
            self._event.set()

    def drain(self, reason: str) -> None:
        if self._drain.is_set():
            self.set(f"{reason} again")
        self._drain.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def wait_for_drain(self) -> None:
        """Until a drain is asked for; a stop without one ends no wait here."""
        await self._drain.wait()


def run_loop(main: Callable[[StopRequest], Coroutine[Any, Any, int]], parent_fd: int | None) -> int:
    """Runs `main` on uvloop and returns its exit status. SIGTERM asks for a drain, and again for a stop; SIGINT and the
    parent's end stop it at once."""

    async def supervised() -> int:
        stop = StopRequest()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.drain, signal.SIGTERM.name)
        loop.add_signal_handler(signal.SIGINT, stop.set, signal.SIGINT.name)
        if parent_fd is not None:
            _stop_at_end_of(parent_fd, stop)
        return await main(stop)

    return uvloop.run(supervised())


def _stop_at_end_of(fd: int, stop: StopRequest) -> None:
    """The parent holds the other end of this pipe for as long as it lives, however it dies."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop.set("the parent process is gone")

    loop.add_reader(fd, readable)


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Waits until one ends and cancels the others; raises what the finished one raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
