"""The attempts that serve some samples of one request, one after another, until these samples are done.

Everything that goes wrong after admission takes the same way: the attempt is lost, and the next one continues from the
prompt and the outputs that the client already has. Samples that have begun go on apart from each other, in a chain for
each. `flow` makes the first chain and runs all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from router.attempt import Arrived, Attempt
from router.carried import Carried
from router.causes import AttemptLostError, SampleLost
from router.config import RouterConfig
from router.events import PromptLogprobsArrived
from router.failures import ChainFailures, Deaths, Failures
from router.metrics import RouterMetrics
from router.queue import Waiting
from router.request import Event, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
from router.scheduler import Demand
from router.stages import Stage, StageClock
from router.worker import Start
from splitserve.service.errors import Unavailable
from splitserve.service.reasons import Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A worker that just refused is not asked again in the same breath. Whoever was refused waits for that in the queue,
# where nobody takes its place.
_REFUSAL_PAUSE_S = 0.05
# How often, while it lasts, a request that waits for a pair finds out whether there could be one.
_LOOKS = 10


class PairSource(Deaths, Protocol):
    """Where attempts come from; `dispatcher` is the one."""

    def could_place(self, demand: Demand) -> bool: ...

    def no_pair(self, demand: Demand, interrupted_by: str) -> Unavailable: ...

    def enqueue(self, waiting: Waiting, pause_s: float = 0.0) -> None: ...

    def withdraw(self, waiting: Waiting) -> None: ...

    def close(self, attempt: Attempt, reason: str) -> None: ...


@dataclass(slots=True)
class Progress:
    """What the chains of one request share: how far it is, and what it has met with."""

    request: GenerationRequest
    stages: StageClock
    pairs: PairSource
    config: RouterConfig
    metrics: RouterMetrics
    arrival: int
    failures: Failures
    outputs: dict[int, list[int]]
    clock: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    attempts: int = 0
    num_running: int = 0
    "Attempts that are under way."
    num_scored: int = 0
    numerics: str = ""
    cached_tokens: int | None = None
    "What the first attempt found that a prefill worker accepted: a later one finds what this request has left there."

    def seconds_left(self) -> float:
        return max(self.request.deadline - self.clock(), 0.0)

    def enter_queue(self) -> None:
        """The request as a whole waits only while none of its samples has an attempt."""
        if not self.num_running:
            self.stages.enter(Stage.QUEUE)

    def start(self, samples: Sequence[int]) -> Start:
        sampling, prompt_ids = self.request.sampling, self.request.prompt_ids
        if self.num_scored == len(prompt_ids):  # the client has the prompt's logprobs: no attempt makes them again
            sampling = replace(sampling, prompt_logprobs=None)
        outputs = {sample: tuple(self.outputs[sample]) for sample in samples}
        return Start(prompt_ids=prompt_ids, outputs=outputs, sampling=sampling)

    def fresh_prompt_logprobs(self, arrived: PromptLogprobsArrived) -> tuple[TokenLogprobs, ...]:
        """Those that no earlier attempt has brought."""
        fresh = arrived.tokens[max(self.num_scored - arrived.start, 0) :]
        self.num_scored += len(fresh)
        return fresh


@dataclass(frozen=True, slots=True)
class Loss:
    """How a chain's last attempt was lost, as far as it matters for the next one."""

    reason: str = "first"
    is_failure: bool = False
    was_preempted: bool = False

    def followed_by(self, lost: AttemptLostError) -> "Loss":
        # One that was preempted and then refused still has to find a lasting place.
        was_preempted = self.was_preempted if lost.reason == Reason.NO_ROOM else lost.reason == Reason.PREEMPTED
        return Loss(lost.reason, lost.is_failure, was_preempted)


class Chain:
    """Owns its place in the queue and on the workers until it has run, or `let_go`."""

    def __init__(self, progress: Progress, samples: Sequence[int], last: Loss) -> None:
        self._progress = progress
        self._unfinished = list(samples)
        self._last = last
        self._failures = ChainFailures(progress.failures)
        # Queued at once, so that the bound of the queue counts a request from admission on.
        self._waiting: Waiting | None = self._enqueue()
        self._attempt: Attempt | None = None

    @property
    def samples(self) -> Sequence[int]:
        """Those that are not finished yet."""
        return self._unfinished

    async def run(self) -> "AsyncGenerator[Event | Chain, None]":
        """What there is for the client, and a chain for each sample that is to go on by itself. Run it once.

        Raises the client's error when the request may not be tried again, TimeoutError when its deadline has passed.
        """
        try:
            while self._unfinished:
                try:
                    async with aclosing(self._attempt_once()) as arrived:
                        async for event in arrived:
                            if (told := self._take(event)) is not None:
                                yield told
                except AttemptLostError as lost:
                    self._progress.enter_queue()
                    await self._judge(lost)
                    for sample in self._to_part():
                        yield Chain(self._progress, [sample], self._last)
        finally:
            self.let_go("the request has ended")

    def drop(self, sample: int) -> None:
        """Nobody wants any more of the sample, which is not the only unfinished one."""
        self._unfinished.remove(sample)
        if self._attempt is not None:
            self._attempt.drop(sample)

    def let_go(self, reason: str) -> None:
        """Gives the workers and the place in the queue back, at any stage; idempotent."""
        if self._waiting is not None:
            self._progress.pairs.withdraw(self._waiting)
            self._waiting = None
        if self._attempt is not None:
            self._progress.pairs.close(self._attempt, reason)
            self._attempt = None
            self._progress.num_running -= 1

    def _to_part(self) -> list[int]:
        """The samples that go on apart from here: all but one, if any has begun; before that one transfer can still
        carry the prompt for all."""
        if not any(self._progress.outputs[sample] for sample in self._unfinished):
            return []
        parting, self._unfinished = self._unfinished[1:], self._unfinished[:1]
        return parting

    def _take(self, event: Arrived) -> "Event | Chain | None":
        if isinstance(event, SampleLost):
            self._log_loss(event.lost)
            self._unfinished.remove(event.sample)
            return Chain(self._progress, [event.sample], self._last.followed_by(event.lost))
        if isinstance(event, PromptLogprobsArrived):
            fresh = self._progress.fresh_prompt_logprobs(event)
            return PromptLogprobs(fresh) if fresh else None
        self._progress.outputs[event.sample].append(event.token_id)
        if event.finish_reason is not None:
            self._unfinished.remove(event.sample)
        is_followed = self._attempt is not None and self._attempt.has_more
        return TokenEvent(
            event.sample, event.position, event.token_id, event.finish_reason, event.logprobs, is_followed
        )

    async def _attempt_once(self) -> AsyncGenerator[Arrived, None]:
        progress = self._progress
        waiting, self._waiting = self._waiting, None
        attempt = await self._granted(waiting or self._enqueue())
        samples = tuple(self._unfinished)
        self._attempt = attempt
        progress.num_running += 1
        progress.attempts += 1
        progress.metrics.count_attempt(self._last.reason)
        progress.numerics = progress.numerics or attempt.decode.identity.numerics
        self._failures.begin_attempt()
        carried = Carried(
            lambda: progress.start(samples),
            progress.seconds_left,
            self._failures,
            progress.stages,
            progress.request.traceparent,
        )
        try:
            async with aclosing(attempt.tokens(carried)) as tokens:
                async for token in tokens:
                    self._note_cached_tokens(attempt)
                    yield token
        finally:
            self._note_cached_tokens(attempt)
            self.let_go("the attempt has ended")

    async def _granted(self, waiting: Waiting) -> Attempt:
        """Waits in the queue until the deadline, but without hope for `failover_timeout` only.

        There is none where no pair could take it. An interrupted request has none either, unless other samples of it
        run, which make room in the end.
        """
        progress, timeout_s = self._progress, self._progress.config.failover_timeout
        self._waiting = waiting
        hopeless_since = progress.clock()
        while (attempt := await waiting.granted_within(min(timeout_s / _LOOKS, progress.seconds_left()))) is None:
            if progress.seconds_left() <= 0:
                raise TimeoutError
            is_of_use = not self._last.is_failure or progress.num_running > 0
            if is_of_use and progress.pairs.could_place(waiting.demand):
                hopeless_since = progress.clock()
            elif progress.clock() - hopeless_since >= timeout_s:
                interrupted_by = self._last.reason if progress.attempts else ""
                raise progress.pairs.no_pair(waiting.demand, interrupted_by)
        self._waiting = None
        return attempt

    async def _judge(self, lost: AttemptLostError) -> None:
        """Decides whether the request may be tried again; raises the client's error when not."""
        self._log_loss(lost)
        self._last = self._last.followed_by(lost)
        if lost.is_failure and not lost.is_counted:
            await self._failures.count(lost)

    def _log_loss(self, lost: AttemptLostError) -> None:
        log.warning(
            "attempt lost",
            request_id=self._progress.request.request_id,
            attempt=self._progress.attempts,
            samples=list(self._unfinished),
            reason=lost.reason,
            detail=lost.message,
            outputs=sum(map(len, self._progress.outputs.values())),
        )

    def _enqueue(self) -> Waiting:
        progress, start = self._progress, self._progress.start(self._unfinished)
        progress.enter_queue()
        waiting = Waiting(
            demand=Demand(
                start.num_tokens,
                len(start.outputs),
                was_preempted=self._last.was_preempted,
                avoid=frozenset(progress.failures.avoid),
                numerics=progress.numerics,
            ),
            is_retry=progress.attempts > 0,
            priority=progress.request.priority,
            arrival=progress.arrival,
        )
        progress.pairs.enqueue(waiting, _REFUSAL_PAUSE_S if self._last.reason == Reason.NO_ROOM else 0.0)
        return waiting

    def _note_cached_tokens(self, attempt: Attempt) -> None:
        if self._progress.cached_tokens is None:
            self._progress.cached_tokens = attempt.num_cached_tokens
