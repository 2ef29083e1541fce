"""One attempt: a decode worker, and one prefill worker after another unless it computes the prompt itself, carrying a
request from its reservation to its last token, or until something fails.

A request is a sequence of attempts (`flow`). An attempt owns its place on its workers from the moment it is granted
until `close`, which gives back whatever is left there, at any stage. If only the prefill worker's part fails, its leg,
the reservation is kept, and its ticket renewed for another leg.
"""

import asyncio
from collections.abc import AsyncGenerator, Set
from dataclasses import replace

import structlog

from kvtransfer.ticket import Ticket
from router.attempt_state import BEFORE_FIRST_TOKEN, STAGES, WITH_LEG, WITHOUT_LEG, State, debt
from router.carried import Carried
from router.causes import AttemptLostError, SampleLost, Setback, explanation, is_effect, is_no_failure, loss
from router.config import RouterConfig
from router.events import (
    Accepted,
    AlreadyRunning,
    AttemptEvent,
    Ended,
    FirstTokensArrived,
    PromptLogprobsArrived,
    Refused,
    Reserved,
    TokenArrived,
    TransferLost,
    Transferred,
    WorkerLost,
)
from router.inbox import Inbox
from router.leg import Leg
from router.leg_search import LegSearch, LegSource
from router.metrics import RouterMetrics
from router.pacing import Pacer
from router.patience import next_word
from router.token_order import TokenOrders
from router.worker import Start, Worker
from splitserve.service.reasons import Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# How often a prefill worker is looked for while none has room.
_SEEK_INTERVAL_S = 0.05
_KEEP_MARGIN_S = 1.0


Arrived = TokenArrived | PromptLogprobsArrived | SampleLost


class Attempt:
    """Granted by the dispatcher with room already promised on both workers; also the mailbox for what decode says."""

    _carried: Carried
    _start: Start  # what the ticket is for
    _ticket: Ticket
    _is_ticket_spent: bool

    def __init__(
        self,
        attempt_id: str,
        leg: Leg,
        decode: Worker,
        inbox: Inbox,
        legs: LegSource,
        config: RouterConfig,
        metrics: RouterMetrics,
        pacer: Pacer,
    ) -> None:
        self.attempt_id = attempt_id
        self.decode = decode
        self._inbox = inbox
        self.num_cached_tokens: int | None = None  # known once a prefill worker has accepted
        self.has_more = False  # tokens beside the one that was given last, which follow at once
        self._leg = leg
        self._is_local = leg.worker is decode
        self._search = LegSearch(legs, decode, inbox, patience_s=config.reserve_timeout)
        self._config = config
        self._metrics = metrics
        self._pacer = pacer
        self._state = State.RESERVING
        self._unfinished: TokenOrders | None = None  # until decode has been asked
        self._held: list[TokenArrived] = []
        self._unwanted_samples: set[int] = set()
        self._is_closed = False

    def drop(self, sample: int) -> None:
        """Nobody wants any more of this sample; others are unfinished."""
        if self._unfinished is not None:
            self._unfinished.drop(sample)
        self._unwanted_samples.add(sample)
        self._release_unwanted_samples()

    def deliver(self, event: AttemptEvent) -> None:
        self._inbox.put(self, event)

    async def tokens(self, carried: Carried) -> AsyncGenerator[Arrived, None]:
        """Runs the attempt; each position once and in order, until every sample has finished.

        The prompt's logprobs, where they are asked for, come before any token.

        Raises AttemptLostError when the attempt is over early, TimeoutError when the request's own deadline has passed,
        and what `carried.failures.count` raises.
        """
        self._carried = carried
        self._start = carried.start()
        self._reserve()
        unfinished = self._unfinished = TokenOrders(self._start.outputs)
        while unfinished:
            match await self._next():
                case None:
                    self._seek()
                case Reserved(ticket=ticket):
                    self._on_ticket(ticket)
                case Ended(samples=samples) as part if samples and not samples.issuperset(unfinished.samples):
                    for sample in sorted(samples & unfinished.samples):
                        unfinished.drop(sample)
                        yield SampleLost(sample, self._loss(part))
                case Refused() | Ended() | TransferLost() | WorkerLost() as setback:
                    await self._on_setback(setback)
                case PromptLogprobsArrived() as arrived:
                    self._leg.note_scored(arrived)
                    yield arrived
                case event:
                    self._held.extend(self._progress(event))
            # Decode, which repeats the first token, may overtake the prompt's logprobs; what is here is shown together.
            if self._held and self._leg.is_scored and not self._inbox.is_next(TokenArrived):
                held, self._held = self._held, []
                tokens = list(unfinished.take(held))
                for number, token in enumerate(tokens, start=1):
                    self.has_more = number < len(tokens)
                    yield token

    # What goes well

    def _reserve(self) -> None:
        # The reservation outlives everything that this side waits for before the blocks must be there; without a
        # transfer it is kept for as long as a prefill worker is sought, and for a moment to say so.
        keep_s = self._config.reserve_timeout + _KEEP_MARGIN_S
        self.decode.channel.reserve(
            self.attempt_id,
            self._start,
            self._carried.seconds_left(),
            keep_s,
            self._carried.traceparent,
            is_local=self._is_local,
        )

    def _on_ticket(self, ticket: Ticket) -> None:
        is_first = self._state is State.RESERVING and not self._is_local
        if not is_first and (self._state is not State.RENEWING or ticket.transfer_id == self._ticket.transfer_id):
            return  # said twice
        self._carried.failures.heard_of(self.decode.worker_id)
        self._ticket = ticket
        self._is_ticket_spent = False
        self._search.begin()
        if self._leg.is_closed:
            self._seek()
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        self._enter(State.HANDING_OVER)
        self._leg.hand_over(self._start, self._ticket, self._config.prefill_timeout, self._carried.traceparent)

    def _progress(self, event: AttemptEvent) -> tuple[TokenArrived, ...]:
        """The tokens in it. Decode's may come before the prefill worker's own words, if the prompt was cached."""
        match event:
            case Accepted(num_cached_tokens=num_cached_tokens):
                if self.num_cached_tokens is None:
                    self.num_cached_tokens = num_cached_tokens
                self._on_accepted()
            case Transferred(transfer_id=transfer_id, num_bytes=num_bytes):
                self._carried.stages.transferred(transfer_id, num_bytes)
            case FirstTokensArrived(tokens=tokens):
                self._advance(BEFORE_FIRST_TOKEN, State.DECODING if self._is_local else State.ARRIVING)
                return tokens
            case AlreadyRunning():
                self._on_running()
            case TokenArrived():
                self._advance(BEFORE_FIRST_TOKEN, State.ARRIVING)
                self._on_running()
                return (event,)
        return ()

    def _on_accepted(self) -> None:
        if self._is_local and not self._leg.is_accepted:
            self._metrics.count_local_prefill()
        self._leg.is_accepted = True
        self._carried.failures.heard_of(self._leg.worker.worker_id)
        self._advance({State.RESERVING if self._is_local else State.HANDING_OVER}, State.PREFILLING)

    def _on_running(self) -> None:
        """All blocks have come, even if the leg that sent them was taken for lost."""
        if self._state in WITHOUT_LEG:
            self._carried.failures.heard_of(self.decode.worker_id)
            self._leg.close("the blocks of the leg before it have come")
            if self._carried.start().sampling.prompt_logprobs is not None:  # nobody brings the rest of them
                raise self._search.why
        self._advance(WITHOUT_LEG | {State.ARRIVING}, State.DECODING)
        self._release_unwanted_samples()

    def _release_unwanted_samples(self) -> None:
        """Decode knows of samples only once it has the blocks."""
        if self._unwanted_samples and self._state is State.DECODING and not self.decode.is_lost:
            samples, self._unwanted_samples = sorted(self._unwanted_samples), set()
            self.decode.channel.release(self.attempt_id, "not wanted any more", samples)

    def _advance(self, states: Set[State], following: State) -> None:
        """If it is still in one of them: what comes late or again changes nothing."""
        if self._state in states:
            self._enter(following)

    def _enter(self, state: State) -> None:
        self._state = state
        self._carried.stages.enter(STAGES[state])

    # What goes wrong

    async def _on_setback(self, setback: Setback) -> None:
        """Goes on if the attempt may; else raises AttemptLostError."""
        if isinstance(setback, TransferLost):
            has_ticket = self._state in WITH_LEG | {State.SEEKING} and not self._is_local
            is_current = has_ticket and setback.transfer_id == self._ticket.transfer_id
            if is_current and self._state is State.SEEKING:
                self._is_ticket_spent = True
            elif is_current:
                await self._lose_leg(setback)
        elif setback.worker == self.decode.worker_id:
            await self._end(setback)
        elif self._state in (State.RESERVING, State.RENEWING):
            # Nothing had been given to it yet, so nobody has failed.
            self._close_leg(setback, replace(loss(setback), is_failure=False))
        elif self._state is State.HANDING_OVER and isinstance(setback, Refused) and is_no_failure(setback):
            self._close_leg(setback, loss(setback))
            self._seek()
        elif self._state in WITH_LEG:
            await self._lose_leg(setback)
        elif not self._leg.is_scored:
            raise self._loss(setback)

    async def _end(self, setback: Setback) -> None:
        """Decode does not go on."""
        cause = await explanation(self._inbox, setback, self.decode.worker_id) if is_effect(setback) else setback
        assert not isinstance(cause, TokenArrived), "decode says no token after its end"
        lost = self._loss(cause)
        if self._state in WITHOUT_LEG and lost.reason == Reason.TIMEOUT:  # the reservation's: the leg has been counted
            lost = replace(lost, is_counted=True)
        raise lost

    async def _lose_leg(self, setback: Setback) -> None:
        """Keeps the reservation for another leg, if it is of use to one."""
        cause: Setback | TokenArrived = setback
        if is_effect(setback) or self._state is State.ARRIVING:
            cause = await explanation(self._inbox, setback, self.decode.worker_id)
        if isinstance(cause, TokenArrived):
            if self._leg.is_scored:
                return  # nothing is lost
            cause = setback
        lost = self._loss(cause)
        if isinstance(cause, TransferLost):
            lost = replace(lost, worker=self._leg.worker.worker_id)
        start = self._carried.start()
        # Samples that differ by now are attempted apart from each other.
        is_renewable = len(start.outputs) == 1 or start.outputs == self._start.outputs
        if lost.is_fatal or lost.worker == self.decode.worker_id or not is_renewable:
            raise lost
        if lost.is_failure:
            await self._carried.failures.count(lost)
        self._close_leg(setback, replace(lost, is_counted=True))
        self._is_ticket_spent = True
        self._search.begin()
        self._seek()

    def _close_leg(self, setback: Setback, why: AttemptLostError) -> None:
        self._leg.close(why.message, is_over=isinstance(setback, Refused))
        self._search.leave(self._leg, why)
        self._held.clear()

    def _seek(self) -> None:
        """Takes the next leg as soon as some worker has room for it; raises what the one before was lost to where there
        is none."""
        start = self._carried.start()
        leg = self._search.next_leg(start.num_tokens)
        if leg is None:
            self._enter(State.SEEKING)
            return
        self._leg = leg
        if self._is_ticket_spent:
            self._renew(start)
        else:
            self._hand_over()

    def _renew(self, start: Start) -> None:
        why, worker = self._search.why, self._leg.worker.worker_id
        log.info("ticket renewed", attempt=self.attempt_id, reason=why.reason, detail=why.message, prefill=worker)
        self._metrics.count_renewal(why.reason)
        self._start = start
        self._enter(State.RENEWING)
        seconds_left = self._carried.seconds_left()
        self.decode.channel.renew(self.attempt_id, self._ticket.transfer_id, start.outputs, seconds_left)

    def _loss(self, setback: Setback) -> AttemptLostError:
        """With who may be computing for this request, as far as is known here."""
        prefill, decode = frozenset({self._leg.worker.worker_id}), frozenset({self.decode.worker_id})
        prefills = prefill if self._leg.is_accepted and self._state in WITH_LEG else frozenset[str]()
        decodes = decode if self._state in (State.ARRIVING, State.DECODING) else frozenset[str]()
        return loss(setback, prefills | decodes, prefill | decode)

    # Waiting

    async def _next(self) -> AttemptEvent | None:
        """The next event; None when it is time to look for a prefill worker again."""
        if self._state is State.DECODING and self._pacer.pause_s and not self._inbox.is_next(TokenArrived):
            await asyncio.sleep(self._pacer.pause_s)
        if (event := self._inbox.take()) is not None:
            return event
        if self._state is not State.SEEKING:
            return await next_word(
                self._inbox,
                debt(self._state, self._leg, self.decode, self._config),
                self._carried.seconds_left,
                self._config.suspect_timeout,
            )
        left = self._carried.seconds_left()
        if left <= 0:
            raise TimeoutError
        return await self._inbox.next(min(left, _SEEK_INTERVAL_S))

    def close(self, reason: str) -> None:
        """Gives back what is left on the workers. Idempotent; never waits.

        A finished attempt leaves nothing: decode frees its blocks with the last token, even if that came from prefill.
        """
        if self._is_closed:
            return
        self._is_closed = True
        release = self.decode.channel.release
        if self._unfinished and not self.decode.is_lost:
            release(self.attempt_id, reason)
        elif self._unfinished is not None and self._state is not State.DECODING and not self.decode.is_lost:
            # The blocks are on their way to decode's cache, or will never come: it may have said so, not heard yet.
            will_come = self._inbox.first(lambda event: isinstance(event, TransferLost)) is None
            release_in_s = self._config.token_timeout if will_come else 0.0
            loop = asyncio.get_running_loop()
            loop.call_later(release_in_s, release, self.attempt_id, "the request has ended")
        self.decode.forget(self.attempt_id)
        self._leg.close(reason, is_over=not self._unfinished or self._state is State.DECODING)
