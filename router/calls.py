"""The Generate calls that are under way: counted in and out by `serving`, and all ended by the composition root."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.service.errors import SplitserveError


class OpenCalls:
    """Lives on the event loop. `ending` is what calls end with from the moment that the router gives up on them."""

    def __init__(self) -> None:
        self.ending: SplitserveError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_changed = asyncio.Event()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The call that the current task serves is one of these while the body runs."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._has_changed.set()

    def end_all(self, error: SplitserveError) -> None:
        """Interrupts every call, wherever it is; each tells its client `error`."""
        self.ending = error
        for task in self._tasks:
            task.cancel()

    async def until_none(self) -> None:
        while self._tasks:
            self._has_changed.clear()
            await self._has_changed.wait()
