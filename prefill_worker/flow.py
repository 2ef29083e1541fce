"""One attempt's path through a prefill worker: admitted → computed in chunks → first token → blocks acknowledged.

Runs on the engine thread and owns the attempts and the allocator. An attempt's blocks are in use from admission until
its transfer has ended one way or the other, because until then the KV thread may still read them. Every path out of
here, refusal apart, therefore leads through the transfer's terminal event.
"""

import structlog
import torch

from kvtransfer import events
from kvtransfer.ticket import Ticket
from prefill_worker.scheduler import admit
from prefill_worker.state import PrefillAttempt
from splitserve.service.errors import SplitserveError
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.admission import Refusal
from splitserve.worker.chunks import tokens_ahead
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.load import StepSize, load_report
from splitserve.worker.payload import encode_finish
from splitserve.worker.prompts import PromptEngine
from splitserve.worker.sampling import NOT_FINITE, start_problem

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class PrefillEngine(PromptEngine):
    """What the prefill worker adds to the engine loop."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._attempts: dict[str, PrefillAttempt] = {}
        self._by_transfer: dict[str, PrefillAttempt] = {}

    # Commands and events

    def handle(self, item: commands.Command | events.KVEvent) -> None:
        match item:
            case commands.Prefill():
                self._admit(item)
            case commands.Release(attempt=attempt, reason=reason):
                self._ended.add(attempt)
                self._release(self._attempts.get(attempt), f"released by the router: {reason}")
            case commands.EndSession(session=session):
                for orphan in [a for a in self._attempts.values() if a.session == session]:
                    self._release(orphan, "the router is gone")
            case commands.Drain(timeout_s=timeout_s):
                self._begin_drain(timeout_s)
            case commands.SetPeers(endpoints=endpoints):
                self._agent.set_peers(endpoints)
            case events.TransferAcked(transfer_id=transfer_id):
                self._forget(transfer_id)
            case events.TransferFailed(transfer_id=transfer_id, reason=reason, detail=detail):
                self._transfer_failed(transfer_id, f"{reason.value.lower()}: {detail}")
            case _:
                log.warning("unexpected message", type=type(item).__name__)

    def _admit(self, command: commands.Prefill) -> None:
        """Takes the prompt only if blocks for all of it are there now, so that what is admitted always finishes."""
        if command.attempt in self._attempts or command.attempt in self._ended:
            self._ignore(command)
            return
        start = command.start
        if refusal := self._refusal(command) or self._open(command.ticket):
            self._refuse(command, refusal)
            return
        keys = self._key_chain(start.token_ids)
        blocks, num_cached = self._take_blocks(start, keys, self._layout.blocks_for(len(start.token_ids)))
        attempt = PrefillAttempt(
            attempt=command.attempt,
            session=command.session,
            start=start,
            keys=keys,
            blocks=blocks,
            num_cached=num_cached,
            ticket=command.ticket,
            deadline=self._context.clock() + command.timeout_s,
            num_sent=command.ticket.num_cached_blocks,
        )
        self._attempts[attempt.attempt] = attempt
        self._by_transfer[attempt.ticket.transfer_id] = attempt
        self._accept(attempt)
        self._push_blocks(attempt, num_cached // self._layout.block_size)

    def _refusal(self, command: commands.Prefill) -> Refusal | None:
        if command.ticket.transfer_id in self._by_transfer:
            return Refusal(Reason.INVALID, "its ticket is in use")
        problem = self._draining_refusal() or start_problem(command.start, self._runner.vocab_size)
        return problem or admit(len(command.start.token_ids), self._room())

    def _open(self, ticket: Ticket) -> Refusal | None:
        """Begins the transfer; a ticket that cannot be used costs its attempt and nobody else's."""
        try:
            self._agent.open(ticket)
        except SplitserveError as error:
            return Refusal(Reason.TRANSFER_FAILED, error.message)
        return None

    def _release(self, attempt: PrefillAttempt | None, reason: str) -> None:
        if attempt is not None and not attempt.released:
            attempt.released = True
            self._agent.cancel(attempt.ticket.transfer_id, reason)

    def _end(self, attempt: PrefillAttempt, reason: Reason, message: str) -> None:
        """Tells the router that the attempt is lost, then lets it go."""
        self._report_end(attempt, reason, message)
        self._release(attempt, message)

    def _report_end(self, attempt: PrefillAttempt, reason: Reason, message: str) -> None:
        if attempt.released:
            return
        trace = attempt.ticket.traceparent
        self._publish_end(attempt.session, attempt.attempt, reason, message, trace)

    def _transfer_failed(self, transfer_id: str, detail: str) -> None:
        attempt = self._by_transfer.get(transfer_id)
        if attempt is not None:
            self._report_end(attempt, Reason.TRANSFER_FAILED, detail)
        self._forget(transfer_id)

    def _forget(self, transfer_id: str) -> None:
        """The transfer is over: nothing reads the blocks any more."""
        attempt = self._by_transfer.pop(transfer_id, None)
        if attempt is not None:
            del self._attempts[attempt.attempt]
            self._ended.add(attempt.attempt)
            self._allocator.release(attempt.blocks)

    def expire(self, now: float) -> None:
        for attempt in self._attempts.values():
            if now > attempt.deadline and not attempt.released:
                self._end(attempt, Reason.TIMEOUT, "the prefill deadline passed")
        self._continue_drain(now)

    def is_empty(self) -> bool:
        return not self._attempts

    def end_all(self, reason: Reason, message: str) -> None:
        for attempt in self._attempts.values():
            self._end(attempt, reason, message)

    # Steps

    def has_work(self) -> bool:
        return any(attempt.is_computing for attempt in self._attempts.values())

    def step(self) -> StepSize:
        chunks = self._plan_chunks(self._computing(), self._context.config.max_num_batched_tokens)
        segments = [self._attempts[chunk.attempt].segment(chunk) for chunk in chunks]
        logits = self._runner.run(segments)
        # One part of the rows per chunk, which is empty for most.
        for chunk, rows in zip(chunks, torch.split(logits, [segment.num_logits for segment in segments]), strict=True):
            attempt = self._attempts[chunk.attempt]
            tokens = self._take_chunk(attempt, chunk, rows)
            if tokens is None:
                self._forget_cached(attempt.keys)
                self._end(attempt, Reason.INTERNAL, NOT_FINITE)
            elif tokens:
                self._hand_off(attempt, tokens)
            else:
                self._push_blocks(attempt, attempt.num_computed // self._layout.block_size)
        return StepSize(0, sum(chunk.length for chunk in chunks), self._floor_s(segments))

    def _computing(self) -> list[PrefillAttempt]:
        """What is left to compute, in order of arrival."""
        return [attempt for attempt in self._attempts.values() if attempt.is_computing]

    def _push_blocks(self, attempt: PrefillAttempt, upto: int) -> None:
        """Sends the blocks before `upto` that have not been sent; the next chunk is computed meanwhile."""
        if upto > attempt.num_sent:
            indices = range(attempt.num_sent, upto)
            self._agent.send(attempt.ticket.transfer_id, [(index, attempt.blocks[index]) for index in indices])
            attempt.num_sent = upto

    def _hand_off(self, attempt: PrefillAttempt, tokens: list[messages.Token]) -> None:
        """The first tokens go to the router at once and to the decode worker behind the last block."""
        self._push_blocks(attempt, len(attempt.blocks))
        keys = attempt.keys.all_keys(attempt.token_ids)
        self._agent.finish(attempt.ticket.transfer_id, keys, encode_finish(tokens))

    def load(self) -> reports.Load:
        computing = self._computing()
        prompts = [attempt.view() for attempt in computing]
        num_started = sum(attempt.has_started for attempt in computing)
        return load_report(
            self._allocator.counts,
            self._agent.stats(),
            num_running=num_started,
            num_waiting=len(prompts) - num_started,
            waiting_tokens=sum(prompt.num_left for prompt in prompts),
            tokens_ahead=tokens_ahead(prompts, self._context.config.long_prefill_threshold),
        )

    def num_empty_slots(self) -> int:
        size = self._layout.block_size
        return sum(len(attempt.blocks) * size - len(attempt.token_ids) for attempt in self._attempts.values())
