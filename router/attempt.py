"""One attempt: a decode worker and one prefill worker after another carrying a request from reservation to its last
token, or until something fails.

A request is a sequence of attempts (`flow`). An attempt owns its place on its workers from the moment it is granted
until `close`, which gives back whatever is left there, at any stage.
"""

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable, Set
from dataclasses import replace
from typing import Protocol

from kvtransfer.ticket import Ticket
from router.causes import Setback, is_effect, is_no_failure, loss
from router.config import RouterConfig
from router.inbox import Inbox
from router.leg import Leg
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

# How long the word of one worker waits for that of the other, when it may only be the other's echo.
_ECHO_S = 0.1


class State(enum.Enum):
    """What the attempt waits for."""

    RESERVING = enum.auto()
    HANDING_OVER = enum.auto()
    PREFILLING = enum.auto()
    ARRIVING = enum.auto()
    "The first token is known, the blocks are on their way."
    DECODING = enum.auto()


_BEFORE_FIRST_TOKEN = frozenset({State.HANDING_OVER, State.PREFILLING})


class LegSource(Protocol):
    """Where prefill workers come from; `dispatcher` is the one."""

    def another_prefill(self, attempt: "Attempt", num_tokens: int, unwanted: Set[str]) -> Leg | None: ...


class Attempt:
    """Granted by the dispatcher with room already promised on both workers; also the mailbox for what they say."""

    def __init__(
        self,
        attempt_id: str,
        leg: Leg,
        decode: Worker,
        legs: LegSource,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self.attempt_id = attempt_id
        self.leg = leg
        self.decode = decode
        self.num_cached_tokens: int | None = None  # known once a prefill worker has accepted
        self._legs = legs
        self._config = config
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self._inbox = Inbox()
        self._state = State.RESERVING
        self._state_began = self._clock()
        self._hand_over_until = 0.0
        self._unwanted: set[str] = set()
        self._prefill_lost: WorkerLost | None = None
        self._is_finished = False
        self._is_closed = False

    def deliver(self, event: AttemptEvent) -> None:
        self._inbox.deliver(event)

    async def tokens(
        self, start: Start, traceparent: str, seconds_left: Callable[[], float]
    ) -> AsyncGenerator[TokenArrived | PromptLogprobsArrived, None]:
        """Runs the attempt; each position once and in order, until every sample has finished.

        The prompt's logprobs, where `start` asks for them, come before any token.

        Raises AttemptLostError when the attempt is over early, TimeoutError when `seconds_left` (the request's own
        deadline) ran out.
        """
        # The reservation outlives everything that this side waits for before the blocks must be there.
        keep_s = self._config.reserve_timeout
        self.decode.channel.reserve(self.attempt_id, start, seconds_left(), keep_s, traceparent)
        orders = {index: TokenOrder(len(output)) for index, output in start.outputs.items()}
        held: list[TokenArrived] = []
        while orders:
            event = await self._next(seconds_left)
            match event:
                case Reserved(ticket=ticket) if self._state is State.RESERVING:
                    self._hand_over_until = self._clock() + self._config.reserve_timeout
                    self._hand_over(start, ticket, traceparent)
                case Refused() | Ended() | TransferLost() | WorkerLost():
                    await self._on_setback(event, start, traceparent)
                case PromptLogprobsArrived():
                    self.leg.note_scored(event)
                    yield event
                case _:
                    held.extend(self._progress(event))
            if not self.leg.is_scored:  # decode, which repeats the first token, may overtake the prompt's logprobs
                continue
            arrived, held = held, []
            for token in arrived:
                for ordered in orders[token.sample].take(token) if token.sample in orders else ():
                    if ordered.finish_reason is not None:
                        del orders[ordered.sample]
                        self._is_finished = not orders
                        if self._is_finished and self._state is State.DECODING:
                            self._metrics.observe_stage(Stage.DECODE, self._clock() - self._state_began)
                    yield ordered

    # What an event changes

    def _hand_over(self, start: Start, ticket: Ticket, traceparent: str) -> None:
        self._enter(State.HANDING_OVER)
        self._ticket = ticket
        self.leg.hand_over(start, ticket, self._config.prefill_timeout, traceparent)

    def _progress(self, event: AttemptEvent) -> tuple[TokenArrived, ...]:
        """The tokens in it. Decode's may come before the prefill worker's own words, if the prompt was cached."""
        match event:
            case Accepted(num_cached_tokens=num_cached_tokens):
                self.num_cached_tokens = num_cached_tokens
                self.leg.is_accepted = True
                if self._state is State.HANDING_OVER:
                    self._state = State.PREFILLING
                return ()
            case FirstTokensArrived(tokens=tokens):
                self._end_stage(Stage.PREFILL, _BEFORE_FIRST_TOKEN, State.ARRIVING)
                return tokens
            case TokenArrived():
                self._end_stage(Stage.PREFILL, _BEFORE_FIRST_TOKEN, State.ARRIVING)
                self._end_stage(Stage.HANDOFF, {State.ARRIVING}, State.DECODING)
                return (event,)
            case _:
                return ()

    def _end_stage(self, stage: Stage, states: Set[State], following: State) -> None:
        if self._state in states:
            self._metrics.observe_stage(stage, self._clock() - self._state_began)
            self._enter(following)

    def _enter(self, state: State) -> None:
        self._state = state
        self._state_began = self._clock()

    # What goes wrong

    async def _on_setback(self, setback: Setback, start: Start, traceparent: str) -> None:
        """Goes on with another prefill worker if the attempt may; else raises AttemptLostError."""
        is_of_leg = setback.worker == self.leg.worker.worker_id
        if setback.worker == self.decode.worker_id:
            await self._give_up(setback)
        elif not is_of_leg:
            return  # one that was asked before
        elif self._state is State.RESERVING:
            if not self._has_moved(start):
                # Nothing had been given to it yet, so nobody has failed.
                raise replace(loss(setback, frozenset()), is_failure=False)
        elif self._state is State.HANDING_OVER and isinstance(setback, Refused):
            may_move = is_no_failure(setback) and self._clock() < self._hand_over_until
            if not (may_move and self._has_moved(start)):
                await self._give_up(setback)
            self._hand_over(start, self._ticket, traceparent)
        elif self._needs_prefill:
            await self._give_up(setback)
        elif self._state is State.ARRIVING and isinstance(setback, WorkerLost):
            self._prefill_lost = setback  # decode knows whether all of the blocks have come

    def _has_moved(self, start: Start) -> bool:
        """Gives up the leg for one on a prefill worker that has not been asked, if some has room."""
        self._unwanted.add(self.leg.worker.worker_id)
        leg = self._legs.another_prefill(self, start.num_tokens, self._unwanted)
        if leg is None:
            return False
        self.leg.close("another prefill worker was asked", is_over=True)
        self.leg = leg
        return True

    async def _give_up(self, setback: Setback) -> None:
        """Raises AttemptLostError, unless decode turns out to have all it needs."""
        cause = setback
        if is_effect(setback):
            other = self._prefill_lost or await self._other_word(setback)
            if isinstance(other, TokenArrived):
                return
            cause = other or setback
        raise loss(cause, self._ran_on)

    async def _other_word(self, setback: Setback) -> Setback | TokenArrived | None:
        """What explains `setback`, which may only be the echo of it: a word of the other worker, or of either's death.

        Comes at about the same time, on a stream of its own. Nothing is taken out of the inbox.
        """
        until = self._clock() + _ECHO_S
        heard: list[AttemptEvent] = []
        try:
            while (left := until - self._clock()) > 0 and (event := await self._inbox.next(left)) is not None:
                heard.append(event)
                match event:
                    case WorkerLost():
                        return event
                    case Refused() | Ended() | TransferLost() if event.worker != setback.worker:
                        return None if is_effect(event) else event
                    case TokenArrived() if setback.worker != self.decode.worker_id:
                        return event
            return None
        finally:
            self._inbox.put_back(heard)

    @property
    def _needs_prefill(self) -> bool:
        """The prefill worker has not yet said all that this side needs from it."""
        return self._state in _BEFORE_FIRST_TOKEN or not self.leg.is_scored

    @property
    def _ran_on(self) -> frozenset[str]:
        """Who may have computed for this request when it was lost."""
        prefill = {self.leg.worker.worker_id} if self.leg.is_accepted and self._state is not State.DECODING else set()
        decode = {self.decode.worker_id} if self._state in (State.ARRIVING, State.DECODING) else set()
        return frozenset(prefill | decode)

    # Waiting

    def _awaited(self) -> tuple[Worker, float]:
        """Who has to speak next, and how long that may take."""
        # Longer than a worker can be dead or stuck without membership knowing.
        answer_timeout = self._config.stall_timeout + self._config.heartbeat_timeout
        if self._state is State.RESERVING:
            return self.decode, answer_timeout
        if self._state is State.HANDING_OVER:
            return self.leg.worker, answer_timeout
        if self._needs_prefill:
            return self.leg.worker, self._config.prefill_timeout
        return self.decode, self._config.token_timeout

    async def _next(self, seconds_left: Callable[[], float]) -> AttemptEvent:
        """The next event; the end of the attempt on the worker that is awaited if there is none within its limit and
        then within the step that it is in.

        TimeoutError is the request's deadline, not the attempt's.
        """
        awaited, limit_s = self._awaited()
        patience = Patience(awaited)
        wait_s = limit_s
        while True:
            left = seconds_left()
            event = await self._inbox.next(min(wait_s, left))
            if event is not None:
                return event
            if left <= wait_s:
                raise TimeoutError
            # Not for ever: those may be the blocks of others.
            is_arriving = (
                self._state is State.ARRIVING and self._clock() - self._state_began < self._config.prefill_timeout
            )
            if is_arriving and patience.blocks_have_come():
                wait_s = limit_s
            elif patience.is_over():
                message = f"{awaited.worker_id} said nothing for more than {limit_s:g} s, and is in no long step"
                return Ended(awaited.worker_id, Reason.TIMEOUT, message)
            else:
                wait_s = self._config.suspect_timeout  # a live worker reports within it

    def close(self, reason: str) -> None:
        """Gives back what is left on both workers. Idempotent; never waits.

        A finished attempt leaves nothing: decode frees its blocks with the last token, even if that came from prefill.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_finished and not self.decode.is_lost:
            self.decode.channel.release(self.attempt_id, reason)
        self.decode.forget(self.attempt_id)
        self.leg.close(reason, is_over=self._is_finished or self._state is State.DECODING)
