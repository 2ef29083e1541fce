"""One request's path: queued, attempted, and attempted again elsewhere until it is done or may no longer be tried.

A request of one sample is one chain of attempts and runs in the task of the client's call. Samples of one prompt may
part on the way; so that they run at the same time, each of their chains has a task of its own, owned by this one.

Made by `dispatcher`, which grants its attempts, and iterated by `serving`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from router.chain import Chain, Loss, PairSource, Progress
from router.config import RouterConfig
from router.failures import Failures
from router.metrics import RouterMetrics
from router.request import Event, GenerationRequest
from router.stages import StageClock
from splitserve.service.errors import DeadlineExceeded


class RequestFlow:
    """An admitted request: iterate it once, and close it however the iteration ended."""

    def __init__(
        self,
        request: GenerationRequest,
        stages: StageClock,
        pairs: PairSource,
        config: RouterConfig,
        metrics: RouterMetrics,
        arrival: int,
    ) -> None:
        num_samples = request.sampling.n
        outputs: dict[int, list[int]] = {index: [] for index in range(num_samples)}
        self._progress = Progress(request, stages, pairs, config, metrics, arrival, Failures(pairs, config), outputs)
        first = Chain(self._progress, tuple(outputs), Loss())
        # With the task that runs each of them, where there are several samples.
        self._chains: dict[Chain, asyncio.Task[None] | None] = {first: None}
        self._arrived: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._events = self._run(self._one(first) if num_samples == 1 else self._several(first))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    @property
    def attempts(self) -> int:
        return self._progress.attempts

    @property
    def cached_tokens(self) -> int:
        return self._progress.cached_tokens or 0

    def stop(self, sample: int) -> None:
        """Nobody wants any more of this sample: it holds nothing from now on, and no attempt takes it up again."""
        for chain, task in list(self._chains.items()):
            if sample not in chain.samples:
                continue
            if len(chain.samples) > 1:
                chain.drop(sample)
            else:
                chain.let_go("the sample has ended at a stop string")
                if task is not None:
                    task.cancel()

    async def aclose(self) -> None:
        """Releases the workers at any stage; idempotent."""
        self._let_go("the client is gone")
        await self._events.aclose()

    async def _run(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None
        finally:
            self._let_go("the request has ended")

    async def _one(self, chain: Chain) -> AsyncGenerator[Event, None]:
        async with aclosing(chain.run()) as events:
            async for event in events:
                assert not isinstance(event, Chain), "one sample has nobody to part from"
                yield event

    async def _several(self, first: Chain) -> AsyncGenerator[Event, None]:
        """What all chains bring, as it comes, until none is left or one fails."""
        self._go_on(first)
        try:
            while self._chains or not self._arrived.empty():
                arrived = await self._arrived.get()
                if isinstance(arrived, Exception):
                    raise arrived
                if arrived is not None:
                    yield arrived
        finally:
            tasks = [task for task in self._chains.values() if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _go_on(self, chain: Chain) -> None:
        def end(_: asyncio.Task[None]) -> None:  # also of a task that was cancelled before it began
            chain.let_go("the sample has ended")
            del self._chains[chain]
            self._arrived.put_nowait(None)

        self._chains[chain] = task = asyncio.create_task(self._collect(chain))
        task.add_done_callback(end)

    async def _collect(self, chain: Chain) -> None:
        try:
            async with aclosing(chain.run()) as events:
                async for event in events:
                    if isinstance(event, Chain):
                        self._go_on(event)
                    else:
                        self._arrived.put_nowait(event)
        except Exception as error:  # the client's call tells it
            self._arrived.put_nowait(error)

    def _let_go(self, reason: str) -> None:
        for chain in self._chains:
            chain.let_go(reason)
