"""One attempt's path through a decode worker: reserved → blocks arrived, or computed here → running → ended.

Runs on the engine thread and owns reservations, sequences and the allocator. While a transfer is open its blocks belong
to the KV thread: this side neither reads nor frees them, and takes them back only with the transfer's terminal event.
A reservation outlives a transfer that fails: it is kept for a while, and the router may ask for another ticket.
What the prefix cache holds already is pinned instead and not sent. Blocks enter the cache when their transfer has been
verified, or when they have been filled here.

A prompt that is computed here has no transfer. Its chunks share steps with the sequences that decode, which wait for no
chunk but that of their step.
"""

from dataclasses import replace

import msgspec
import structlog
import torch

from decode_worker.hand_off import first_tokens, split
from decode_worker.holding import HoldingEngine
from decode_worker.scheduler import StepPlan, admit, num_growing, plan_step, prompt_budget
from decode_worker.state import LocalPrompt, Phase, Reservation, Sequence
from kvtransfer import events
from splitserve.engine.batch import Segment
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.admission import Refusal, decode_blocks
from splitserve.worker.chunks import Chunk
from splitserve.worker.load import StepSize
from splitserve.worker.sampling import NOT_FINITE, Draw, draw_tokens, start_problem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Among the reasons for which transfers fail, for the metrics: every block came, and Finish was not what was asked for.
_MISMATCH = "mismatch"
_OUT_OF_BLOCKS = "out of blocks"


class DecodeEngine(HoldingEngine):
    """What the decode worker adds to the engine loop."""

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
                self._end_session(session)
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
        is_here = attempt in self._reservations or attempt in self._local or self._running.of_attempt(attempt)
        if is_here or attempt in self._ended:
            self._ignore(command)
            return
        if refusal := self._refusal(command.start):
            self._refuse(command, refusal)
            return
        if command.is_local:
            self._compute(command)
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

    def _compute(self, command: commands.Reserve) -> None:
        """Here, in chunks, from the next step on."""
        start = command.start
        keys = self._key_chain(start.token_ids)
        num_blocks = decode_blocks(len(start.token_ids), len(start.samples), self._layout.block_size)
        blocks, num_cached = self._take_blocks(start, keys, num_blocks)
        prompt = LocalPrompt(
            attempt=command.attempt,
            session=command.session,
            start=start,
            keys=keys,
            blocks=blocks,
            num_cached=num_cached,
            deadline=self._context.clock() + command.timeout_s,
            traceparent=command.traceparent,
        )
        self._local.add(prompt)
        self._accept(prompt)

    def _refusal(self, start: messages.Start) -> Refusal | None:
        problem = self._draining_refusal() or start_problem(start, self._runner.vocab_size)
        return problem or admit(
            len(start.token_ids),
            len(start.samples),
            self._room(),
            num_seqs=len(self._running) + self._reservations.num_seqs + self._local.num_seqs,
            max_num_seqs=self._context.config.max_num_seqs,
        )

    def _on_release(self, command: commands.Release) -> None:
        if not command.samples:
            self._release(command.attempt, f"released by the router: {command.reason}")
            return
        for sequence in self._running.of_attempt(command.attempt):
            if sequence.sample in command.samples:
                self._running.drop(sequence)
                self._note_end(command.attempt)

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
            self._wrong_finish(
                reservation, event.transport, f"the prefill worker's Finish is not what was asked for: {error}"
            )
            return
        self._reservations.remove(reservation)
        self._allocator.adopt(reservation.reserved_blocks)
        self._cache(reservation.full_blocks, reservation.keys.complete)
        if reservation.phase is Phase.CLOSING:
            self._allocator.release(reservation.blocks)
            return
        if reservation.phase is Phase.RENEWING:
            self._publish(reports.AlreadyRunning(reservation.session, reservation.attempt))
        self._take_tokens(self._begin(reservation, tokens))

    def _wrong_finish(self, reservation: Reservation, transport: str, detail: str) -> None:
        """The first time another prefill worker may do better; the second time it may be this side that is wrong."""
        self._publish(reports.TransferReport("sink", transport, _MISMATCH))
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

    # Steps

    def has_work(self) -> bool:
        return len(self._running) + len(self._local) > 0

    def step(self) -> StepSize | None:
        batch = self._carry_out(self._plan())
        max_num_tokens = self._context.config.max_num_batched_tokens
        budget = prompt_budget(len(batch), max_num_batched_tokens=max_num_tokens, block_size=self._layout.block_size)
        chunks = self._plan_chunks(self._local, budget)
        if not batch and not chunks:
            return None
        rows = [Segment([s.token_ids[-1]], len(s.token_ids) - 1, s.blocks, wants_logits=True) for s in batch]
        segments = [self._local[chunk.attempt].segment(chunk) for chunk in chunks]
        logits = self._runner.run(rows + segments)
        self._decoded(batch, logits[: len(batch)])
        # One part of the other rows per chunk, which is empty for most.
        parts = torch.split(logits[len(batch) :], [segment.num_logits for segment in segments])
        for chunk, part in zip(chunks, parts, strict=True):
            self._computed(self._local[chunk.attempt], chunk, part)
        return StepSize(len(batch), sum(chunk.length for chunk in chunks), self._floor_s(rows + segments))

    def _decoded(self, batch: list[Sequence], logits: torch.Tensor) -> None:
        draws = [Draw(s.params, s.sample, s.history) for s in batch]
        tokens = draw_tokens(logits, draws, self._eos_token_ids, self._max_len)
        for sequence, token in zip(batch, tokens, strict=True):
            if token is not None:
                self._cache_filled(sequence)
                continue
            self._forget_cached(sequence.keys)
            if sequence in self._running:  # its attempt may have ended with a sibling
                self._end(sequence, Reason.INTERNAL, NOT_FINITE)
        self._take_tokens(
            [(s, token) for s, token in zip(batch, tokens, strict=True) if token is not None and s in self._running]
        )

    def _computed(self, prompt: LocalPrompt, chunk: Chunk, logits: torch.Tensor) -> None:
        """With the last chunk the samples begin. The router has been told their first tokens."""
        tokens = self._take_chunk(prompt, chunk, logits)
        if tokens is None:
            self._forget_cached(prompt.keys)
            self._end(prompt, Reason.INTERNAL, NOT_FINITE)
        elif tokens:
            self._local.remove(prompt)
            self._append(self._begin(prompt, tokens))

    def _begin(
        self, begun: Reservation | LocalPrompt, tokens: list[messages.Token]
    ) -> list[tuple[Sequence, messages.Token]]:
        """All blocks are here: one sequence per sample runs from now on, each with the first token that it takes."""
        sequences = split(begun, self._runner.pool, self._allocator)
        self._running.add(sequences)
        return list(zip(sequences, tokens, strict=True))

    def _cache_filled(self, sequence: Sequence) -> None:
        """Offers the block that the token just computed has completed, if it has: the next turn of a chat finds it."""
        num_full, rest = divmod(len(sequence.token_ids), self._layout.block_size)
        if rest == 0:
            sequence.keys.extend(sequence.token_ids)
            self._cache(sequence.blocks[num_full - 1 : num_full], sequence.keys.complete[num_full - 1 :])

    def _plan(self) -> StepPlan:
        running, local, available = self._running.views(), self._local.views(), self._allocator.available
        if num_growing(running, self._layout.block_size) > available:  # some may have to go
            # What the end of each would free takes a look at every block.
            holders = [*self._running, *self._local]
            freed = self._allocator.count_released([holder.blocks for holder in holders])
            running = [replace(view, num_freed=num) for view, num in zip(running, freed, strict=False)]
            local = [replace(view, num_freed=num) for view, num in zip(local, freed[len(running) :], strict=True)]
        return plan_step(
            running,
            self._reservations.incomplete(),
            local,
            returning=self._reservations.num_returning,
            available=available,
            block_size=self._layout.block_size,
        )

    def _carry_out(self, plan: StepPlan) -> list[Sequence]:
        """Ends who has to go; returns the sequences to compute."""
        for attempt in plan.revoke:
            holder = self._local[attempt] if attempt in self._local else self._reservations[attempt]
            self._end(holder, Reason.PREEMPTED, "its blocks went to a running sequence")
        for key in plan.preempt:
            self._preempt(self._running[key])
        return self._running.batch(plan)

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

    def _take_tokens(self, drawn: list[tuple[Sequence, messages.Token]]) -> None:
        """Every router gets its own tokens in one message."""
        for session, tokens in self._append(drawn).items():
            self._publish(reports.StepTokens(session=session, tokens=tokens))

    def _append(self, drawn: list[tuple[Sequence, messages.Token]]) -> dict[int, list[messages.Token]]:
        """Goes on with each sequence, or ends it; by session, the tokens as its router knows them."""
        by_session = self._running.take_tokens(drawn)
        for sequence, token in drawn:
            if token.finish_reason:
                self._note_end(sequence.attempt)
        return by_session
