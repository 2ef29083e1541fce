"""One attempt's path through a decode worker: reserved → blocks arrived → running → ended.

Runs on the engine thread and owns reservations, sequences and the allocator. While a transfer is open its blocks belong
to the KV thread: this side neither reads nor frees them, and takes them back only with the transfer's terminal event.
A reservation outlives a transfer that fails: it is kept for a while, and the router may ask for another ticket.
What the prefix cache holds already is pinned instead and not sent. Blocks enter the cache when their transfer has been
verified, or when decoding has filled them.
"""

import msgspec
import structlog

from decode_worker.hand_off import first_tokens, split
from decode_worker.reservations import Reservations
from decode_worker.running import Running
from decode_worker.scheduler import StepPlan, admit, plan_step
from decode_worker.state import Phase, Reservation, Sequence
from kvtransfer import events
from splitserve.engine.batch import Segment
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.admission import Refusal
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.load import load_report
from splitserve.worker.role import EngineBase
from splitserve.worker.sampling import Draw, draw_tokens, start_problem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Among the reasons for which transfers fail, for the metrics: every block came, and Finish was not what was asked for.
_MISMATCH = "mismatch"
_OUT_OF_BLOCKS = "out of blocks"


class DecodeEngine(EngineBase):
    """What the decode worker adds to the engine loop."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        # A sequence that alone fills the pool ends by length instead of waiting for blocks that cannot come.
        self._max_len = min(context.max_model_len, context.runner.pool.num_blocks * self._layout.block_size)
        self._reservations = Reservations(context, self._allocator)
        self._running = Running(self._allocator, self._layout.block_size)

    # Commands and events

    def handle(self, item: commands.Command | events.KVEvent) -> None:
        match item:
            case commands.Reserve():
                self._reserve(item)
            case commands.Renew():
                self._renew(item)
            case commands.Release():
                self._on_release(item)
            case commands.EndSession(session=session):
                for orphan in self._reservations.attempts_of(session) | self._running.attempts_of(session):
                    self._release(orphan, "the router is gone")
            case commands.Drain(timeout_s=timeout_s):
                self._begin_drain(timeout_s)
            case commands.SetPeers():
                pass  # A sink dials nobody: sources come to its endpoint.
            case events.TransferComplete():
                self._join(item)
            case events.TransferFailed():
                self._transfer_failed(item)
            case _:
                log.warning("unexpected message", type=type(item).__name__)

    def _reserve(self, command: commands.Reserve) -> None:
        attempt = command.attempt
        if attempt in self._reservations or attempt in self._ended or self._running.of_attempt(attempt):
            self._ignore(command)
            return
        if refusal := self._refusal(command.start):
            self._refuse(command, refusal)
            return
        keys = self._key_chain(command.start.token_ids)
        reservation = self._reservations.take_room(command, keys, self._pin_cached(keys))
        self._count_lookup(len(reservation.token_ids), reservation.num_cached_blocks * self._layout.block_size)
        self._open(reservation, command.timeout_s)

    def _open(self, reservation: Reservation, timeout_s: float) -> None:
        ticket = self._reservations.open(reservation, timeout_s)
        # Before the answer, so that a router never sees the answer without the room that it took.
        self.report_load()
        self._publish(reports.Reserved(session=reservation.session, attempt=reservation.attempt, ticket=ticket))

    def _refusal(self, start: messages.Start) -> Refusal | None:
        problem = self._draining_refusal() or start_problem(start, self._runner.vocab_size)
        return problem or admit(
            len(start.token_ids),
            len(start.samples),
            self._room(),
            num_seqs=len(self._running) + self._reservations.num_seqs,
            max_num_seqs=self._context.config.max_num_seqs,
        )

    # From reservation to sequences

    def _join(self, event: events.TransferComplete) -> None:
        """Every block is here and verified: the samples take part from the next step on."""
        reservation = self._reservations.of_transfer(event.transfer_id)
        if reservation is None:
            log.warning("a transfer completed that nobody waits for", transfer=event.transfer_id)
            return
        if reservation.phase is not Phase.CLOSING:
            self._publish(
                reports.Transferred(reservation.session, reservation.attempt, event.transfer_id, event.num_bytes)
            )
        try:
            tokens = first_tokens(reservation, event, self._runner.vocab_size)
        except (msgspec.MsgspecError, ValueError) as error:
            self._wrong_finish(reservation, f"the prefill worker's Finish is not what was asked for: {error}")
            return
        self._reservations.remove(reservation)
        self._allocator.adopt(reservation.reserved_blocks)
        self._cache(reservation.full_blocks, reservation.keys.complete)
        if reservation.phase is Phase.CLOSING:
            self._allocator.release(reservation.blocks)
            return
        sequences = split(reservation, self._runner.pool, self._allocator)
        self._running.add(sequences)
        if reservation.phase is Phase.RENEWING:
            self._publish(reports.AlreadyRunning(reservation.session, reservation.attempt))
        self._take_tokens(list(zip(sequences, tokens, strict=True)))

    def _wrong_finish(self, reservation: Reservation, detail: str) -> None:
        """The first time another prefill worker may do better; the second time it may be this side that is wrong."""
        self._publish(reports.TransferReport("sink", _MISMATCH))
        is_first, reservation.had_wrong_finish = not reservation.had_wrong_finish, True
        self._lose_transfer(reservation, Reason.INVALID, detail, is_renewable=is_first)

    def _transfer_failed(self, event: events.TransferFailed) -> None:
        reservation = self._reservations.of_transfer(event.transfer_id)
        if reservation is not None:
            detail = f"{event.reason.value.lower()}: {event.detail}"
            is_renewable = event.reason not in events.OUR_SIDE
            self._lose_transfer(reservation, Reason.TRANSFER_FAILED, detail, is_renewable=is_renewable)

    def _lose_transfer(self, reservation: Reservation, reason: Reason, detail: str, *, is_renewable: bool) -> None:
        """The blocks are the engine's again: they go back, wait for another transfer, or go into it at once."""
        is_wanted = reservation.phase is not Phase.CLOSING and is_renewable
        if is_wanted and reservation.renewal is not None:
            self._reopen(reservation, reservation.renewal)
        elif is_wanted and reservation.keep_s > 0:
            self._reservations.park(reservation)
            attempt, transfer_id = reservation.attempt, reservation.transfer_id
            log.warning("transfer lost", attempt=attempt, detail=detail, traceparent=reservation.traceparent)
            self._publish(reports.TransferLost(reservation.session, attempt, transfer_id, reason, detail))
        else:
            self._reservations.free(reservation)
            self._report_end(reservation, reason, detail)

    # Another ticket

    def _renew(self, command: commands.Renew) -> None:
        if self._running.of_attempt(command.attempt):
            self._publish(reports.AlreadyRunning(command.session, command.attempt))
            return
        reservation = self._reservations.get(command.attempt)
        if reservation is None:
            self._refuse(command, Refusal(Reason.NO_ROOM, "the reservation is gone"))
        elif command.transfer_id != reservation.transfer_id or reservation.phase is Phase.RENEWING:
            self._ignore(command)
        elif reservation.phase is Phase.PARKED:
            self._reopen(reservation, command)
        else:
            self._reservations.renew(reservation, command)

    def _reopen(self, reservation: Reservation, command: commands.Renew) -> None:
        """Its blocks are the engine's: takes in what the router has got since, and gives out another ticket for them.

        What has come of the transfer before counts as not received. Where that cannot be, nothing is held any more, and
        the router looks further.
        """
        problem = self._reservations.grow(reservation, command.samples, self._runner.vocab_size)
        if problem is not None:
            self._reservations.free(reservation)
            self._ended.add(reservation.attempt)
            self._refuse(command, Refusal(Reason.NO_ROOM, problem))
            return
        self._open(reservation, command.timeout_s)

    # Endings

    def _release(self, attempt: str, reason: str) -> None:
        """Lets everything of an attempt go; blocks under way come back with their transfer's end."""
        self._ended.add(attempt)
        self._reservations.close(attempt, reason)
        for sequence in self._running.of_attempt(attempt):
            self._running.drop(sequence)

    def _on_release(self, command: commands.Release) -> None:
        if not command.samples:
            self._release(command.attempt, f"released by the router: {command.reason}")
            return
        for sequence in self._running.of_attempt(command.attempt):
            if sequence.sample in command.samples:
                self._running.drop(sequence)
                self._note_end(command.attempt)

    def _note_end(self, attempt: str) -> None:
        """One of its sequences has ended: if it was the last one, so has the attempt."""
        if not self._running.of_attempt(attempt):
            self._ended.add(attempt)

    def _preempt(self, sequence: Sequence) -> None:
        """Its siblings go on, if it has any."""
        if len(self._running.of_attempt(sequence.attempt)) == 1:
            self._end(sequence, Reason.PREEMPTED, _OUT_OF_BLOCKS)
            return
        self._running.drop(sequence)
        session, attempt, sample = sequence.session, sequence.attempt, sequence.sample
        trace = sequence.traceparent
        log.warning("sample preempted", attempt=attempt, sample=sample, detail=_OUT_OF_BLOCKS, traceparent=trace)
        self._publish(reports.AttemptEnded(session, attempt, Reason.PREEMPTED, _OUT_OF_BLOCKS, (sample,)))

    def _end(self, holder: Reservation | Sequence, reason: Reason, message: str) -> None:
        """Tells the router that the attempt is lost, with all its samples, then lets it go."""
        self._report_end(holder, reason, message)
        self._release(holder.attempt, message)

    def _report_end(self, holder: Reservation | Sequence, reason: Reason, message: str) -> None:
        """Once per attempt: one that is closing has been reported, or nobody wants to hear of it."""
        if isinstance(holder, Reservation) and holder.phase is Phase.CLOSING:
            return
        trace = holder.traceparent
        self._publish_end(holder.session, holder.attempt, reason, message, trace)

    def expire(self, now: float) -> None:
        """A reservation has a deadline; what runs is watched by the step clock and by the router."""
        for reservation in self._reservations.expired(now):
            what = "no other ticket was asked for" if reservation.phase is Phase.PARKED else "its blocks did not arrive"
            self._end(reservation, Reason.TIMEOUT, f"{what} in time")
        self._continue_drain(now)

    def is_empty(self) -> bool:
        return len(self._running) + len(self._reservations) == 0

    def end_all(self, reason: Reason, message: str) -> None:
        for sequence in list(self._running):
            if sequence in self._running:  # it may have ended with a sibling
                self._end(sequence, reason, message)
        for reservation in self._reservations:
            self._end(reservation, reason, message)

    # Steps

    def has_work(self) -> bool:
        return len(self._running) > 0

    def step(self) -> bool:
        batch = self._carry_out(self._plan())
        if not batch:
            return False
        logits = self._runner.run(
            [Segment([s.token_ids[-1]], len(s.token_ids) - 1, s.blocks, wants_logits=True) for s in batch]
        )
        draws = [Draw(s.params, s.sample, s.history) for s in batch]
        tokens = draw_tokens(logits, draws, self._eos_token_ids, self._max_len)
        for sequence, token in zip(batch, tokens, strict=True):
            if token is not None:
                self._cache_filled(sequence)
                continue
            self._forget_cached(sequence.keys)
            if sequence in self._running:  # its attempt may have ended with a sibling
                self._end(sequence, Reason.INTERNAL, "the model's logits are not finite")
        self._take_tokens(
            [(s, token) for s, token in zip(batch, tokens, strict=True) if token is not None and s in self._running]
        )
        return True

    def _cache_filled(self, sequence: Sequence) -> None:
        """Offers the block that the token just computed has completed, if it has: the next turn of a chat finds it."""
        num_full, rest = divmod(len(sequence.token_ids), self._layout.block_size)
        if rest == 0:
            sequence.keys.extend(sequence.token_ids)
            self._cache(sequence.blocks[num_full - 1 : num_full], sequence.keys.complete[num_full - 1 :])

    def _plan(self) -> StepPlan:
        return plan_step(
            self._running.views(),
            self._reservations.incomplete(),
            returning=self._reservations.num_returning,
            available=self._allocator.available,
            block_size=self._layout.block_size,
        )

    def _carry_out(self, plan: StepPlan) -> list[Sequence]:
        """Ends who has to go; returns the sequences to compute."""
        for attempt in plan.revoke:
            self._end(self._reservations[attempt], Reason.PREEMPTED, "its blocks went to a running sequence")
        for key in plan.preempt:
            self._preempt(self._running[key])
        return self._running.batch(plan)

    def _take_tokens(self, drawn: list[tuple[Sequence, messages.Token]]) -> None:
        """Goes on with each sequence, or ends it; every router gets its own tokens in one message."""
        for session, tokens in self._running.take_tokens(drawn).items():
            self._publish(reports.StepTokens(session=session, tokens=tokens))
        for sequence, token in drawn:
            if token.finish_reason:
                self._note_end(sequence.attempt)

    def load(self) -> reports.Load:
        return load_report(
            self._allocator.counts,
            self._agent.stats(),
            num_running=len(self._running),
            num_waiting=self._reservations.num_seqs,
            waiting_tokens=0,
            tokens_ahead=0,
        )

    def check(self) -> None:
        if self.is_empty():
            self._allocator.check_idle()
        else:
            self._allocator.check()
