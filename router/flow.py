"""One request's path: queued, attempted, and attempted again elsewhere until it is done or may no longer be tried.

Everything that goes wrong after admission takes the same way: the attempt is lost, and the next one continues from the
prompt and the outputs that the client already has. Runs in the task of the client's call.

Made by `dispatcher`, which grants its attempts, and iterated by `serving`. Owns the outputs so far and the request's
`failures`; an attempt sees both through `carried`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import structlog

from router.attempt import Attempt
from router.carried import Carried
from router.causes import AttemptLostError
from router.config import RouterConfig
from router.events import PromptLogprobsArrived, TokenArrived
from router.failures import Deaths, Failures
from router.metrics import RouterMetrics
from router.queue import Waiting
from router.request import Event, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
from router.scheduler import Demand
from router.stages import Stage, StageClock
from router.worker import Start
from splitserve.service.errors import DeadlineExceeded, Unavailable
from splitserve.service.reasons import Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A worker that just refused is not asked again in the same breath. Whoever was refused waits for that in the queue,
# where nobody takes its place.
_REFUSAL_PAUSE_S = 0.05


class PairSource(Deaths, Protocol):
    """Where attempts come from; `dispatcher` is the one."""

    def could_place(self, demand: Demand) -> bool: ...

    def no_pair(self, demand: Demand, interrupted_by: str) -> Unavailable: ...

    def enqueue(self, waiting: Waiting, pause_s: float = 0.0) -> None: ...

    def withdraw(self, waiting: Waiting) -> None: ...

    def close(self, attempt: Attempt, reason: str) -> None: ...


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
        self.attempts = 0
        self._request = request
        self._stages = stages
        self._pairs = pairs
        self._config = config
        self._metrics = metrics
        self._arrival = arrival
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._outputs: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
        self._num_scored = 0
        self._failures = Failures(pairs, config)
        self._numerics = ""
        self._cached_tokens: int | None = None
        self._next_reason = "first"
        self._was_preempted = False
        self._was_failure = False
        # Queued at once, so that the bound of the queue counts it from admission on.
        self._waiting: Waiting | None = self._enqueue(self._start(tuple(self._outputs)))
        self._attempt: Attempt | None = None
        self._tokens = self._run()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._tokens

    @property
    def cached_tokens(self) -> int:
        """What the first attempt found that a prefill worker accepted: a later one finds, in part, what this request
        has left there itself."""
        return self._cached_tokens or 0

    async def aclose(self) -> None:
        """Releases the workers at any stage; idempotent."""
        self._let_go("the client is gone")
        await self._tokens.aclose()

    # The sequence of attempts

    async def _run(self) -> AsyncGenerator[Event, None]:
        # The first attempt serves all samples; a later one exactly one, because samples fail apart from each other.
        groups: list[tuple[int, ...]] = [tuple(self._outputs)]
        try:
            while groups:
                group = groups.pop(0)
                unfinished = set(group)
                try:
                    async with aclosing(self._attempt_once(group)) as arrived:
                        async for token in arrived:
                            if isinstance(token, PromptLogprobsArrived):
                                if fresh := self._fresh_prompt_logprobs(token):
                                    yield PromptLogprobs(fresh)
                                continue
                            self._outputs[token.sample].append(token.token_id)
                            if token.finish_reason is not None:
                                unfinished.discard(token.sample)
                            yield TokenEvent(
                                token.sample, token.position, token.token_id, token.finish_reason, token.logprobs
                            )
                except AttemptLostError as lost:
                    self._stages.enter(Stage.QUEUE)
                    await self._judge(lost)
                    groups.extend((sample,) for sample in sorted(unfinished))
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None
        finally:
            self._let_go("the request has ended")

    async def _attempt_once(
        self, samples: tuple[int, ...]
    ) -> AsyncGenerator[TokenArrived | PromptLogprobsArrived, None]:
        waiting, self._waiting = self._waiting, None
        attempt = self._attempt = await self._granted(waiting or self._enqueue(self._start(samples)))
        self.attempts += 1
        self._metrics.count_attempt(self._next_reason)
        self._numerics = self._numerics or attempt.decode.identity.numerics
        carried = Carried(
            lambda: self._start(samples), self._seconds_left, self._failures, self._stages, self._request.traceparent
        )
        running = attempt.tokens(carried)
        try:
            async with aclosing(running) as tokens:
                async for token in tokens:
                    self._note_cached_tokens(attempt)
                    yield token
        finally:
            self._note_cached_tokens(attempt)
            self._let_go("the attempt has ended")

    async def _granted(self, waiting: Waiting) -> Attempt:
        """Waits in the queue until the deadline; after a failure, or where no pair could take it,
        `failover_timeout`."""
        self._waiting = waiting
        while True:
            limit = min(self._config.failover_timeout, self._seconds_left())
            try:
                async with asyncio.timeout(limit):
                    attempt = await asyncio.shield(waiting.granted)
                break
            except TimeoutError:
                if self._seconds_left() <= 0:
                    raise
                if self._was_failure or not self._pairs.could_place(waiting.demand):
                    interrupted_by = self._next_reason if self.attempts else ""
                    raise self._pairs.no_pair(waiting.demand, interrupted_by) from None
        self._waiting = None
        return attempt

    async def _judge(self, lost: AttemptLostError) -> None:
        """Decides whether the request may be tried again; raises the client's error when not."""
        log.warning(
            "attempt lost",
            request_id=self._request.request_id,
            attempt=self.attempts,
            reason=lost.reason,
            detail=lost.message,
            outputs=sum(map(len, self._outputs.values())),
        )
        self._next_reason = lost.reason
        self._was_failure = lost.is_failure
        if lost.reason != Reason.NO_ROOM:  # one that was preempted and then refused still has to find a lasting place
            self._was_preempted = lost.reason == Reason.PREEMPTED
        if lost.is_failure and not lost.is_counted:
            await self._failures.count(lost)

    # Pieces

    def _start(self, samples: tuple[int, ...]) -> Start:
        sampling, prompt_ids = self._request.sampling, self._request.prompt_ids
        if self._num_scored == len(prompt_ids):  # the client has the prompt's logprobs: no attempt makes them again
            sampling = replace(sampling, prompt_logprobs=None)
        outputs = {sample: tuple(self._outputs[sample]) for sample in samples}
        return Start(prompt_ids=prompt_ids, outputs=outputs, sampling=sampling)

    def _fresh_prompt_logprobs(self, arrived: PromptLogprobsArrived) -> tuple[TokenLogprobs, ...]:
        """Those that no earlier attempt has brought."""
        fresh = arrived.tokens[max(self._num_scored - arrived.start, 0) :]
        self._num_scored += len(fresh)
        return fresh

    def _enqueue(self, start: Start) -> Waiting:
        self._stages.enter(Stage.QUEUE)
        waiting = Waiting(
            demand=Demand(
                start.num_tokens,
                len(start.outputs),
                was_preempted=self._was_preempted,
                avoid=frozenset(self._failures.avoid),
                numerics=self._numerics,
            ),
            is_retry=self.attempts > 0,
            priority=self._request.priority,
            arrival=self._arrival,
        )
        self._pairs.enqueue(waiting, _REFUSAL_PAUSE_S if self._next_reason == Reason.NO_ROOM else 0.0)
        return waiting

    def _note_cached_tokens(self, attempt: Attempt) -> None:
        if self._cached_tokens is None:
            self._cached_tokens = attempt.num_cached_tokens

    def _seconds_left(self) -> float:
        return max(self._request.deadline - self._clock(), 0.0)

    def _let_go(self, reason: str) -> None:
        if self._waiting is not None:
            self._pairs.withdraw(self._waiting)
            self._waiting = None
        if self._attempt is not None:
            self._pairs.close(self._attempt, reason)
            self._attempt = None
