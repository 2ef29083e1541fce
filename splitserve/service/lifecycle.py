"""How a process starts its event loop and learns that it should end: signals, or the end of its parent."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop


class StopRequest:
    """Set once, by whoever comes first; carries the exit status to use."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.status = 0
        self.reason = ""

    def set(self, reason: str, status: int = 0) -> None:
        if not self._event.is_set():
            self.status, self.reason = status, reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


def run_loop(main: Callable[[StopRequest], Coroutine[Any, Any, int]], parent_fd: int | None) -> int:
    """Runs `main` on uvloop and returns its exit status; SIGINT, SIGTERM and the parent's end set its StopRequest."""

    async def supervised() -> int:
        stop = StopRequest()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set, signal.Signals(number).name)
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
