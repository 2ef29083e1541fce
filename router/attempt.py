"""One attempt: a pair of workers carrying a request from reservation to its last token, or until something fails.

A request is a sequence of attempts (`flow`). An attempt owns its place on two workers from the moment it is granted
until `close`, which gives back whatever is left on either, at any stage.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import structlog

from kvtransfer.ticket import Ticket
from router.config import RouterConfig
from router.metrics import RouterMetrics, Stage
from router.patience import Patience
from router.token_order import TokenOrder
from router.worker import (
    Accepted,
    AttemptEvent,
    Ended,
    FirstTokensArrived,
    PromptLogprobsArrived,
    Refused,
    Reserved,
    Start,
    TokenArrived,
    TransferLost,
    Worker,
    WorkerLost,
)
from splitserve.service.reasons import Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Refusals and orderly leave-taking: nobody's failure.
_NOT_A_FAILURE = frozenset({Reason.NO_ROOM, Reason.PREEMPTED, Reason.DRAINING})
# The request itself is at fault: another worker would say the same. INVALID is that only of what we have asked for;
# an attempt that ends with it was spoilt by the other worker.
_FATAL = frozenset({Reason.TOO_LARGE, Reason.INTERNAL})
_FATAL_REFUSALS = _FATAL | {Reason.INVALID}


@dataclass(eq=False)
class AttemptLostError(Exception):
    """The attempt ended without finishing its samples. `was_running_on` names a worker that died computing it."""

    reason: str
    message: str
    is_failure: bool
    is_fatal: bool = False
    worker: str = ""
    was_running_on: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Attempt:
    """Granted by the dispatcher with room already promised on both workers; also the mailbox for what they say."""

    def __init__(
        self, attempt_id: str, prefill: Worker, decode: Worker, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self.attempt_id = attempt_id
        self.prefill = prefill
        self.decode = decode
        self.num_cached_tokens: int | None = None  # known once a prefill worker has accepted
        self._config = config
        self._metrics = metrics
        self._mailbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        self._is_handed_over = False
        self._has_first_token = False
        self._num_unscored = 0
        self._decode_spoke = False
        self._is_finished = False
        self._is_closed = False

    def deliver(self, event: AttemptEvent) -> None:
        self._mailbox.put_nowait(event)

    async def tokens(
        self,
        start: Start,
        traceparent: str,
        seconds_left: Callable[[], float],
        another_prefill: Callable[["Attempt", set[str]], bool],
    ) -> AsyncGenerator[TokenArrived | PromptLogprobsArrived, None]:
        """Runs the attempt; each position once and in order, until every sample has finished.

        The prompt's logprobs, where `start` asks for them, come before any token.

        Raises AttemptLostError when the attempt is over early, TimeoutError when `seconds_left` (the request's own
        deadline) ran out. `another_prefill` moves the attempt to a prefill worker outside the given set, if one has
        room.
        """
        ticket = await self._reserve(start, traceparent, seconds_left)
        await self._hand_over(start, ticket, traceparent, seconds_left, another_prefill)
        orders = {index: TokenOrder(len(output)) for index, output in start.outputs.items()}
        unfinished = set(orders)
        self._num_unscored = 0 if start.sampling.prompt_logprobs is None else len(start.prompt_ids)
        held: list[TokenArrived] = []
        clock = asyncio.get_running_loop().time
        stage_began = clock()
        while unfinished:
            had_first, had_decode = self._has_first_token, self._decode_spoke
            awaited = self.decode if self._is_prefilled else self.prefill
            limit = self._config.token_timeout if self._is_prefilled else self._config.prefill_timeout
            event = await self._next(awaited, limit, seconds_left)
            if isinstance(event, PromptLogprobsArrived):
                self._num_unscored -= len(event.tokens)
                yield event
            held.extend(self._arrived(event))
            now = clock()
            if self._has_first_token and not had_first:
                self._metrics.observe_stage(Stage.PREFILL, now - stage_began)
                stage_began = now
            if self._decode_spoke and not had_decode:
                self._metrics.observe_stage(Stage.HANDOFF, now - stage_began)
                stage_began = now
            if self._num_unscored > 0:  # decode, which repeats the first token, may overtake them
                continue
            arrived, held = held, []
            for token in arrived:
                for ordered in orders[token.sample].take(token) if token.sample in orders else ():
                    if ordered.finish_reason is not None:
                        unfinished.discard(ordered.sample)
                        self._is_finished = not unfinished
                        if self._is_finished and self._decode_spoke:
                            self._metrics.observe_stage(Stage.DECODE, clock() - stage_began)
                    yield ordered

    @property
    def _is_prefilled(self) -> bool:
        """The prefill worker has said all that this side needs from it."""
        return self._has_first_token and self._num_unscored <= 0

    @property
    def _answer_timeout(self) -> float:
        """Longer than a worker can be dead or stuck without membership knowing."""
        return self._config.stall_timeout + self._config.heartbeat_timeout

    async def _reserve(self, start: Start, traceparent: str, seconds_left: Callable[[], float]) -> Ticket:
        # The reservation outlives everything that this side waits for before the blocks must be there.
        keep_s = self._config.reserve_timeout
        self.decode.channel.reserve(self.attempt_id, start, seconds_left(), keep_s, traceparent)
        event = await self._next(self.decode, self._answer_timeout, seconds_left)
        if not isinstance(event, Reserved):
            raise self._lost(Reason.INVALID, f"expected a reservation, got {type(event).__name__}", self.decode)
        return event.ticket

    async def _hand_over(
        self,
        start: Start,
        ticket: Ticket,
        traceparent: str,
        seconds_left: Callable[[], float],
        another_prefill: Callable[["Attempt", set[str]], bool],
    ) -> None:
        """Finds a prefill worker that takes the prompt; the reservation is kept meanwhile, but not for long."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.reserve_timeout
        refused: set[str] = set()
        while True:
            self._is_handed_over = True
            self.prefill.channel.prefill(self.attempt_id, start, ticket, self._config.prefill_timeout, traceparent)
            try:
                await self._accepted(seconds_left)
                return
            except AttemptLostError as lost:
                refused.add(self.prefill.worker_id)
                may_go_on = not lost.is_failure and lost.worker == self.prefill.worker_id and clock() < until
                if may_go_on and another_prefill(self, refused):
                    continue
                raise

    async def _accepted(self, seconds_left: Callable[[], float]) -> None:
        """Waits for the prefill worker's word. With all of it cached, decode's first token may overtake it."""
        early = []
        while not isinstance(event := await self._next(self.prefill, self._answer_timeout, seconds_left), Accepted):
            early.append(event)
        self.num_cached_tokens = event.num_cached_tokens
        for overtaking in early:
            self.deliver(overtaking)

    async def _next(self, awaited: Worker, limit_s: float, seconds_left: Callable[[], float]) -> AttemptEvent:
        """The next event that is not the attempt's end; `awaited` is at fault if there is none within `limit_s` and
        then within the step that it is in.

        TimeoutError is the request's deadline, not the attempt's.
        """
        patience = Patience(awaited)
        wait_s = limit_s
        while True:
            if self._mailbox.empty():
                left = seconds_left()
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                    async with asyncio.timeout(min(wait_s, left)):
                        event = await self._mailbox.get()
                except TimeoutError:
                    if left <= wait_s:
                        raise
                    if not patience.is_over():
                        wait_s = self._config.suspect_timeout  # a live worker reports within it
                        continue
                    message = f"{awaited.worker_id} said nothing for more than {limit_s:g} s, and is in no long step"
                    raise self._lost(Reason.TIMEOUT, message, awaited) from None
            else:
                event = self._mailbox.get_nowait()
            try:
                self._raise_if_over(event)
            except AttemptLostError as lost:
                if lost.reason == Reason.TRANSFER_FAILED:
                    await self._look_for_a_death()
                raise
            if not self._is_moot(event):
                return event

    async def _look_for_a_death(self) -> None:
        """Blocks that stop coming are often the first sign that a worker has died: then it is the one to blame.

        Waits a moment for the loss to become known, and raises it.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.suspect_timeout):
                while True:
                    event = await self._mailbox.get()
                    if isinstance(event, WorkerLost):
                        self._raise_if_over(event)

    def _is_moot(self, event: AttemptEvent) -> bool:
        """What a prefill worker says or suffers after its part is done; decode reports if the blocks did not arrive."""
        return isinstance(event, (Ended, WorkerLost, Refused))

    def _raise_if_over(self, event: AttemptEvent) -> None:
        match event:
            case Refused(worker=worker, reason=reason, message=message) if self._concerns_us(worker):
                raise self._lost(reason, message, self._worker(worker), _FATAL_REFUSALS)
            case (
                Ended(worker=worker, reason=reason, message=message)
                | TransferLost(worker=worker, reason=reason, message=message)
            ) if self._concerns_us(worker):
                raise self._lost(reason, message, self._worker(worker))
            case WorkerLost(worker=worker, message=message) if self._concerns_us(worker):
                is_decode = worker == self.decode.worker_id
                was_running = self._decode_spoke if is_decode else self._is_handed_over
                raise AttemptLostError(
                    "worker_lost",
                    f"{worker}: {message}",
                    is_failure=True,
                    worker=worker,
                    was_running_on=worker if was_running else "",
                )
            case _:
                return

    def _concerns_us(self, worker: str) -> bool:
        """Decode always; prefill until it has handed over. A prefill worker that was replaced never."""
        if worker == self.decode.worker_id:
            return True
        return worker == self.prefill.worker_id and not self._is_prefilled

    def _worker(self, worker_id: str) -> Worker:
        return self.decode if worker_id == self.decode.worker_id else self.prefill

    def _lost(
        self, reason: Reason, message: str, worker: Worker, fatal: frozenset[Reason] = _FATAL
    ) -> AttemptLostError:
        return AttemptLostError(
            reason.value,
            message,
            is_failure=reason not in _NOT_A_FAILURE,
            is_fatal=reason in fatal,
            worker=worker.worker_id,
        )

    def _arrived(self, event: AttemptEvent) -> tuple[TokenArrived, ...]:
        match event:
            case FirstTokensArrived(tokens=tokens):
                self._has_first_token = True
                return tokens
            case TokenArrived():
                self._has_first_token = self._decode_spoke = True
                return (event,)
            case _:
                return ()

    def move_prefill(self, worker: Worker) -> None:
        """Called by the dispatcher with room promised on `worker`; the one before refused."""
        self.prefill.forget(self.attempt_id)
        self.prefill = worker

    def close(self, reason: str) -> None:
        """Gives back what is left on both workers. Idempotent; never waits.

        A finished attempt leaves nothing: decode frees its blocks with the last token, even if that came from prefill.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for worker, is_over in (
            (self.decode, self._is_finished),
            (self.prefill, self._is_finished or self._decode_spoke),
        ):
            if not is_over and not worker.is_lost:
                worker.channel.release(self.attempt_id, reason)
            worker.forget(self.attempt_id)
