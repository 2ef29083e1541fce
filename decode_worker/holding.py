"""What a decode worker holds, and how it lets go of it: reservations, prompts that are computed here, and sequences.

The flow builds on it. Everything runs on the engine thread.
"""

from decode_worker.local_prompts import LocalPrompts
from decode_worker.reservations import Reservations
from decode_worker.running import Running
from decode_worker.state import LocalPrompt, Phase, Reservation, Sequence
from splitserve.service.reasons import Reason
from splitserve.worker import reports
from splitserve.worker.chunks import tokens_ahead
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.load import load_report
from splitserve.worker.prompts import PromptEngine


class HoldingEngine(PromptEngine):
    """Every attempt that is here is in exactly one of the three."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        # A sequence that alone fills the pool ends by length instead of waiting for blocks that cannot come.
        self._max_len = min(context.max_model_len, context.runner.pool.num_blocks * self._layout.block_size)
        self._reservations = Reservations(context, self._allocator)
        self._local = LocalPrompts(self._allocator)
        self._running = Running(self._allocator, self._layout.block_size)

    def _release(self, attempt: str, reason: str) -> None:
        """Lets everything of an attempt go; blocks under way come back with their transfer's end."""
        self._ended.add(attempt)
        self._reservations.close(attempt, reason)
        self._local.close(attempt)
        for sequence in self._running.of_attempt(attempt):
            self._running.drop(sequence)

    def _end_session(self, session: int) -> None:
        for holders in (self._reservations, self._local, self._running):
            for orphan in holders.attempts_of(session):
                self._release(orphan, "the router is gone")

    def _note_end(self, attempt: str) -> None:
        """One of its sequences has ended: if it was the last one, so has the attempt."""
        if not self._running.of_attempt(attempt):
            self._ended.add(attempt)

    def _end(self, holder: Reservation | LocalPrompt | Sequence, reason: Reason, message: str) -> None:
        """Tells the router that the attempt is lost, with all its samples, then lets it go."""
        self._report_end(holder, reason, message)
        self._release(holder.attempt, message)

    def _report_end(self, holder: Reservation | LocalPrompt | Sequence, reason: Reason, message: str) -> None:
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
        for prompt in self._local.expired(now):
            self._end(prompt, Reason.TIMEOUT, "its prompt was not computed in time")
        self._continue_drain(now)

    def is_empty(self) -> bool:
        return len(self._running) + len(self._reservations) + len(self._local) == 0

    def end_all(self, reason: Reason, message: str) -> None:
        for sequence in list(self._running):
            if sequence in self._running:  # it may have ended with a sibling
                self._end(sequence, reason, message)
        for waiting in (*self._reservations, *self._local):
            self._end(waiting, reason, message)

    def load(self) -> reports.Load:
        prompts = [prompt.view() for prompt in self._local]
        return load_report(
            self._allocator.counts,
            self._agent.stats(),
            num_running=len(self._running),
            num_waiting=self._reservations.num_seqs + self._local.num_seqs,
            waiting_tokens=sum(prompt.num_left for prompt in prompts),
            tokens_ahead=tokens_ahead(prompts, self._context.config.long_prefill_threshold),
        )

    def num_empty_slots(self) -> int:
        size = self._layout.block_size
        waiting = sum(
            len(holder.own_blocks) * (size - len(holder.token_ids) % size)
            for holder in (*self._reservations, *self._local)
        )
        return waiting + sum(len(s.blocks) * size - s.num_tokens_in_pool for s in self._running)
