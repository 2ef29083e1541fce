"""One attempt's path through a decode worker: reserved → blocks arrived → running → ended.

Runs on the engine thread and owns reservations, sequences and the allocator. While a transfer is open its blocks belong
to the KV thread: this side neither reads nor frees them, and takes them back only with the transfer's terminal event.
What the prefix cache holds already is pinned instead and not sent. Blocks enter the cache when their transfer has been
verified, or when decoding has filled them.
"""

import time
import uuid
from collections import defaultdict
from dataclasses import replace

import msgspec
import structlog

from decode_worker.scheduler import AttemptView, ReservationView, SequenceView, StepPlan, num_growing, plan_step
from decode_worker.state import Phase, Reservation, Sequence
from kvtransfer import events
from kvtransfer.ticket import Ticket
from splitserve.engine.batch import Segment
from splitserve.service.reasons import Reason
from splitserve.worker import messages
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.load import load_report
from splitserve.worker.payload import decode_finish
from splitserve.worker.role import EngineBase
from splitserve.worker.sampling import Draw, draw_tokens, sampling_params, start_problem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class DecodeEngine(EngineBase):
    """What the decode worker adds to the engine loop."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        # A sequence that alone fills the pool ends by length instead of waiting for blocks that cannot come.
        self._max_len = min(context.max_model_len, context.runner.pool.num_blocks * self._layout.block_size)
        # Both in order of arrival: the oldest first.
        self._reservations: dict[str, Reservation] = {}
        self._running: dict[str, Sequence] = {}

    # Commands and events

    def handle(self, item: messages.Command | events.KVEvent) -> None:
        match item:
            case messages.Reserve():
                self._reserve(item)
            case messages.Release(attempt=attempt):
                self._release(attempt, "released by the router")
            case messages.EndSession(session=session):
                reserved = {r.attempt for r in self._reservations.values() if r.session == session}
                running = {s.attempt for s in self._running.values() if s.session == session}
                for orphan in reserved | running:
                    self._release(orphan, "the router is gone")
            case messages.SetPeers():
                pass  # A sink dials nobody: sources come to its endpoint.
            case events.TransferComplete():
                self._join(item)
            case events.TransferFailed(transfer_id=transfer_id, reason=reason, detail=detail):
                self._transfer_failed(transfer_id, f"{reason.value.lower()}: {detail}")
            case _:
                log.warning("unexpected message", type=type(item).__name__)

    def _reserve(self, command: messages.Reserve) -> None:
        """Room means the tokens so far and, per sample, the block in which its first decoded token comes to lie."""
        if command.attempt in self._reservations or self._sequences_of(command.attempt):
            return
        samples = command.start.samples
        if problem := start_problem(command.start, self._runner.vocab_size):
            self._refuse(command, Reason.INVALID, problem)
            return
        token_ids = command.start.prompt_ids + samples[0].output_ids
        num_full = len(token_ids) // self._layout.block_size
        if refusal := self._too_large(len(token_ids), num_full + len(samples)):
            self._refuse(command, Reason.TOO_LARGE, refusal)
            return
        max_num_seqs = self._context.config.max_num_seqs
        if len(samples) > max_num_seqs:
            self._refuse(command, Reason.TOO_LARGE, f"{len(samples)} samples, and at most {max_num_seqs} run at once")
            return
        num_held = len(self._running) + self._num_reserved
        if num_held + len(samples) > max_num_seqs:
            self._refuse(command, Reason.NO_ROOM, f"{num_held} sequences run or are reserved already")
            return
        if num_full + len(samples) > self._allocator.available:
            self._refuse(command, Reason.NO_ROOM, self._no_room(num_full + len(samples)))
            return
        keys, reads_cache = self._key_chain(token_ids), self._reads_cache(command.start)
        cached = self._pin_cached(keys, reads_cache=reads_cache)
        reserved = self._allocator.reserve(num_full + len(samples) - len(cached))
        assert reserved is not None, "room is judged without hits"
        if reads_cache:
            self._count_lookup(len(token_ids), len(cached) * self._layout.block_size)
        blocks = cached + reserved
        reservation = Reservation(
            attempt=command.attempt,
            session=command.session,
            transfer_id=uuid.uuid4().hex,
            params=sampling_params(command.start.limits),
            samples=samples,
            num_prompt=len(command.start.prompt_ids),
            token_ids=token_ids,
            keys=keys,
            num_cached_blocks=len(cached),
            full_blocks=blocks[:num_full],
            own_blocks=blocks[num_full:],
            deadline=time.monotonic() + command.timeout_s,
            traceparent=command.traceparent,
        )
        self._reservations[reservation.attempt] = reservation
        self._open_transfer(reservation, command.timeout_s)

    def _open_transfer(self, reservation: Reservation, timeout_s: float) -> None:
        num_blocks = self._layout.blocks_for(len(reservation.token_ids))
        self._agent.expect(
            reservation.transfer_id,
            reservation.blocks[:num_blocks],
            num_cached_blocks=reservation.num_cached_blocks,
            timeout_s=timeout_s,
        )
        ticket = Ticket(
            transfer_id=reservation.transfer_id,
            sink_worker_id=self._context.worker_id,
            num_cached_blocks=reservation.num_cached_blocks,
            num_blocks=num_blocks,
        )
        # Before the answer, so that a router never sees the answer without the room that it took.
        self.report_load()
        self._publish(messages.Reserved(session=reservation.session, attempt=reservation.attempt, ticket=ticket))

    # From reservation to sequences

    def _join(self, event: events.TransferComplete) -> None:
        """Every block is here and verified: the samples take part from the next step on."""
        reservation = self._taken_back(event.transfer_id)
        if reservation is None:
            log.warning("a transfer completed that nobody waits for", transfer=event.transfer_id)
            return
        self._allocator.adopt(reservation.reserved_blocks)
        try:
            tokens = self._first_tokens(reservation, event)
        except (msgspec.MsgspecError, ValueError) as error:
            self._allocator.release(reservation.blocks)
            message = f"the prefill worker's Finish is not what was asked for: {error}"
            self._report_end(reservation, Reason.INVALID, message)
            return
        self._cache(reservation.full_blocks, reservation.keys.complete)
        if reservation.phase is Phase.CLOSING:
            self._allocator.release(reservation.blocks)
            return
        sequences = self._split(reservation)
        self._running.update({sequence.key: sequence for sequence in sequences})
        self._take_tokens(list(zip(sequences, tokens, strict=True)))

    def _first_tokens(self, reservation: Reservation, event: events.TransferComplete) -> list[messages.Token]:
        """Raises ValueError when the blocks are those of other tokens, or the tokens are not the next ones."""
        if event.keys != reservation.keys.all_keys(reservation.token_ids):
            raise ValueError("its blocks belong to other tokens")
        tokens = decode_finish(event.payload)
        expected = [(sample.index, len(sample.output_ids)) for sample in reservation.samples]
        if [(token.sample, token.position) for token in tokens] != expected:
            raise ValueError("it holds tokens of other samples or positions")
        if any(not 0 <= token.token_id < self._runner.vocab_size for token in tokens):
            raise ValueError("it holds a token outside of the vocabulary")
        return tokens

    def _split(self, reservation: Reservation) -> list[Sequence]:
        """One sequence per sample: whole blocks are shared, the partial last one is copied for each."""
        first, *others = reservation.own_blocks
        has_partial_block = len(reservation.token_ids) % self._layout.block_size > 0
        for own in others:
            self._allocator.share(reservation.full_blocks)
            if has_partial_block:
                self._runner.pool.copy_block(first, own)
        return reservation.sequences()

    def _transfer_failed(self, transfer_id: str, detail: str) -> None:
        reservation = self._taken_back(transfer_id)
        if reservation is not None:
            self._allocator.cancel_reservation(reservation.reserved_blocks)
            self._allocator.release(reservation.pinned_blocks)
            self._report_end(reservation, Reason.TRANSFER_FAILED, detail)

    def _taken_back(self, transfer_id: str) -> Reservation | None:
        """The reservation whose transfer has ended, no longer one."""
        found = next((r for r in self._reservations.values() if r.transfer_id == transfer_id), None)
        return None if found is None else self._reservations.pop(found.attempt)

    # Endings

    def _release(self, attempt: str, reason: str) -> None:
        """Lets everything of an attempt go; blocks under way come back with their transfer's end."""
        reservation = self._reservations.get(attempt)
        if reservation is not None and reservation.phase is Phase.RECEIVING:
            reservation.phase = Phase.CLOSING
            self._agent.cancel(reservation.transfer_id, reason)
        for sequence in self._sequences_of(attempt):
            self._drop(sequence)

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

    def _drop(self, sequence: Sequence) -> None:
        del self._running[sequence.key]
        self._allocator.release(sequence.blocks)

    def _sequences_of(self, attempt: str) -> list[Sequence]:
        return [sequence for sequence in self._running.values() if sequence.attempt == attempt]

    @property
    def _num_reserved(self) -> int:
        return sum(len(reservation.samples) for reservation in self._reservations.values())

    def expire(self, now: float) -> None:
        """A reservation has a deadline; what runs is watched by the step clock and by the router."""
        for reservation in list(self._reservations.values()):
            if reservation.phase is Phase.RECEIVING and now > reservation.deadline:
                self._end(reservation, Reason.TIMEOUT, "the reservation's blocks did not arrive in time")

    # Steps

    def has_work(self) -> bool:
        return bool(self._running)

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
            if sequence.key in self._running:  # its attempt may have ended with a sibling
                self._end(sequence, Reason.INTERNAL, "the model's logits are not finite")
        self._take_tokens(
            [(s, token) for s, token in zip(batch, tokens, strict=True) if token is not None and s.key in self._running]
        )
        return True

    def _cache_filled(self, sequence: Sequence) -> None:
        """Offers the block that the token just computed has completed, if it has: the next turn of a chat finds it."""
        num_full, rest = divmod(len(sequence.token_ids), self._layout.block_size)
        if rest == 0:
            sequence.keys.extend(sequence.token_ids)
            self._cache(sequence.blocks[num_full - 1 : num_full], sequence.keys.complete[num_full - 1 :])

    def _plan(self) -> StepPlan:
        by_attempt: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in self._running.values():
            by_attempt[sequence.attempt].append(sequence)
        running = [
            AttemptView(attempt, tuple(SequenceView(s.key, len(s.token_ids), len(s.blocks)) for s in sequences))
            for attempt, sequences in by_attempt.items()
        ]
        available, block_size = self._allocator.available, self._layout.block_size
        if num_growing(running, block_size) > available:
            # Counted only when somebody may have to go: it looks at every block.
            tables = [[block for s in group for block in s.blocks] for group in by_attempt.values()]
            freed = self._allocator.count_released(tables)
            running = [replace(view, num_freed=count) for view, count in zip(running, freed, strict=True)]
        reservations = self._reservations.values()
        return plan_step(
            running,
            [ReservationView(r.attempt, len(r.reserved_blocks)) for r in reservations if r.phase is Phase.RECEIVING],
            returning=sum(len(r.reserved_blocks) for r in reservations if r.phase is Phase.CLOSING),
            available=available,
            block_size=block_size,
        )

    def _carry_out(self, plan: StepPlan) -> list[Sequence]:
        """Takes and gives blocks as planned; returns the sequences to compute."""
        for attempt in plan.revoke:
            self._end(self._reservations[attempt], Reason.PREEMPTED, "its blocks went to a running sequence")
        for attempt in plan.preempt:
            self._end(self._sequences_of(attempt)[0], Reason.PREEMPTED, "out of blocks")
        batch = [self._running[key] for key in plan.run]
        for sequence in batch:
            if sequence.key in plan.grow:
                block = self._allocator.allocate(1)
                assert block is not None, "the plan grows only into available blocks"
                sequence.blocks += block
        return batch

    def _take_tokens(self, drawn: list[tuple[Sequence, messages.Token]]) -> None:
        """Appends each token to its sequence; every router gets its own in one message, and the finished leave."""
        by_session: dict[int, list[messages.Token]] = defaultdict(list)
        for sequence, token in drawn:
            sequence.token_ids.append(token.token_id)
            by_session[sequence.session].append(msgspec.structs.replace(token, attempt=sequence.attempt))
            if token.finish_reason:
                self._drop(sequence)
        for session, tokens in by_session.items():
            self._publish(messages.StepTokens(session=session, tokens=tokens))

    def load(self) -> messages.Load:
        return load_report(
            self._allocator.counts,
            self._agent.stats(),
            num_running=len(self._running),
            num_waiting=self._num_reserved,
            waiting_tokens=0,
            tokens_ahead=0,
        )

    def check(self) -> None:
        if self._running or self._reservations:
            self._allocator.check()
        else:
            self._allocator.check_idle()
