"""One attempt's path through a decode worker: reserved → blocks arrived → running → ended.

Runs on the engine thread and owns sequences and the allocator. While a transfer is open its blocks belong to the KV
thread: this side neither reads nor frees them, and takes them back only with the transfer's terminal event.
"""

import enum
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import structlog

from decode_worker.scheduler import SequenceView, plan_step
from kvtransfer import events
from kvtransfer.ticket import Ticket
from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.batch import Segment
from splitserve.engine.block_keys import block_keys
from splitserve.engine.sampler import SamplingParams
from splitserve.service.reasons import Reason
from splitserve.worker import messages
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.payload import decode_finish
from splitserve.worker.sampling import Draw, draw_tokens, sampling_params

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Phase(enum.Enum):
    RECEIVING = enum.auto()
    RUNNING = enum.auto()
    CLOSING = enum.auto()
    "The transfer is being cancelled; its blocks come back with the terminal event."


@dataclass(slots=True)
class Sequence:
    """One sample of one attempt. `token_ids` is prompt + outputs; the last one's KV is not in the pool yet."""

    attempt: str
    session: int
    transfer_id: str
    params: SamplingParams
    sample: int
    num_prompt: int
    token_ids: list[int]
    blocks: list[int]
    deadline: float
    traceparent: str
    phase: Phase = field(default=Phase.RECEIVING)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt


class DecodeEngine:
    """What the decode worker adds to the engine loop."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._runner = context.runner
        self._agent = context.agent
        self._publish = context.publish
        self._eos_token_ids = frozenset(context.description.eos_token_ids)
        self._layout = context.runner.layout
        # A sequence that alone fills the pool ends by length instead of waiting for blocks that cannot come.
        self._max_len = min(context.max_model_len, context.runner.pool.num_blocks * self._layout.block_size)
        self._allocator = BlockAllocator(context.runner.pool.num_blocks)
        # In order of arrival: the oldest first.
        self._sequences: dict[str, Sequence] = {}
        self._by_transfer: dict[str, Sequence] = {}

    # Commands and events

    def handle(self, item: messages.Command | events.KVEvent) -> None:
        match item:
            case messages.Reserve():
                self._reserve(item)
            case messages.Release(attempt=attempt):
                self._release(self._sequences.get(attempt), "released by the router")
            case messages.EndSession(session=session):
                for sequence in [s for s in self._sequences.values() if s.session == session]:
                    self._release(sequence, "the router is gone")
            case messages.SetPeers():
                pass  # A sink dials nobody: sources come to its endpoint.
            case events.TransferComplete():
                self._join(item)
            case events.TransferFailed(transfer_id=transfer_id, reason=reason, detail=detail):
                self._transfer_failed(transfer_id, f"{reason}: {detail}")
            case _:
                log.warning("unexpected message", type=type(item).__name__)

    def _reserve(self, command: messages.Reserve) -> None:
        """Room means the whole sequence so far plus the slot of the first decoded token."""
        if command.attempt in self._sequences:
            return
        if len(command.start.samples) != 1:
            self._refuse(command, Reason.INVALID, "an attempt of several samples is not served")
            return
        sample = command.start.samples[0]
        token_ids = command.start.prompt_ids + sample.output_ids
        num_blocks = self._layout.blocks_for(len(token_ids) + 1)
        if refusal := self._too_large(len(token_ids), num_blocks):
            self._refuse(command, Reason.TOO_LARGE, refusal)
            return
        if len(self._sequences) >= self._context.config.max_num_seqs:
            self._refuse(command, Reason.NO_ROOM, f"{len(self._sequences)} sequences run already")
            return
        blocks = self._allocator.reserve(num_blocks)
        if blocks is None:
            available = self._allocator.available
            self._refuse(command, Reason.NO_ROOM, f"{num_blocks} blocks needed, {available} available")
            return
        sequence = Sequence(
            attempt=command.attempt,
            session=command.session,
            transfer_id=uuid.uuid4().hex,
            params=sampling_params(command.start.limits),
            sample=sample.index,
            num_prompt=len(command.start.prompt_ids),
            token_ids=token_ids,
            blocks=blocks,
            deadline=time.monotonic() + command.timeout_s,
            traceparent=command.traceparent,
        )
        self._sequences[sequence.attempt] = sequence
        self._by_transfer[sequence.transfer_id] = sequence
        num_to_receive = self._layout.blocks_for(len(token_ids))
        self._agent.expect(
            sequence.transfer_id, blocks[:num_to_receive], num_cached_blocks=0, timeout_s=command.timeout_s
        )
        ticket = Ticket(
            transfer_id=sequence.transfer_id,
            sink_worker_id=self._context.worker_id,
            num_cached_blocks=0,
            num_blocks=num_to_receive,
        )
        # Before the answer, so that a router never sees the answer without the room that it took.
        self._publish(self.load())
        self._publish(messages.Reserved(session=command.session, attempt=command.attempt, ticket=ticket))

    def _too_large(self, num_tokens: int, num_blocks: int) -> str | None:
        if num_tokens >= self._context.max_model_len:
            return f"{num_tokens} tokens leave no room for output: the context is {self._context.max_model_len}"
        total = self._allocator.counts.total
        if num_blocks > total:
            return f"{num_tokens} tokens and their first output need {num_blocks} blocks: the pool has {total}"
        return None

    def _refuse(self, command: messages.Reserve, reason: Reason, message: str) -> None:
        self._publish(
            messages.Refused(session=command.session, attempt=command.attempt, reason=reason, message=message)
        )

    def _join(self, event: events.TransferComplete) -> None:
        """Every block is here and verified: the sequence takes part from the next step on."""
        sequence = self._by_transfer.pop(event.transfer_id, None)
        if sequence is None:
            log.warning("a transfer completed that nobody waits for", transfer=event.transfer_id)
            return
        self._allocator.adopt(sequence.blocks)
        if sequence.phase is Phase.CLOSING:
            self._drop(sequence)
            return
        sequence.phase = Phase.RUNNING
        try:
            token = self._first_token(sequence, event)
        except (msgspec.DecodeError, ValueError) as error:
            self._end(sequence, Reason.INVALID, f"the prefill worker's Finish is not what was asked for: {error}")
        else:
            self._take_tokens([(sequence, token)])

    def _first_token(self, sequence: Sequence, event: events.TransferComplete) -> messages.Token:
        """Raises ValueError when the blocks are those of other tokens, or the token is not the next one."""
        keys = block_keys(sequence.token_ids, self._layout.block_size, {"model": self._context.fingerprint.model})
        if event.keys != keys:
            raise ValueError("its blocks belong to other tokens")
        (token,) = decode_finish(event.payload)
        if (token.sample, token.position) != (sequence.sample, sequence.num_outputs):
            raise ValueError(f"it holds token {token.position} of sample {token.sample}")
        return token

    def _transfer_failed(self, transfer_id: str, detail: str) -> None:
        sequence = self._by_transfer.pop(transfer_id, None)
        if sequence is None:
            return
        self._allocator.cancel_reservation(sequence.blocks)
        del self._sequences[sequence.attempt]
        if sequence.phase is not Phase.CLOSING:
            self._report_end(sequence, Reason.TRANSFER_FAILED, detail)

    # Endings

    def _release(self, sequence: Sequence | None, reason: str) -> None:
        if sequence is None:
            return
        if sequence.phase is Phase.RUNNING:
            self._drop(sequence)
        elif sequence.phase is Phase.RECEIVING:
            sequence.phase = Phase.CLOSING
            self._agent.cancel(sequence.transfer_id, reason)

    def _end(self, sequence: Sequence, reason: Reason, message: str) -> None:
        if sequence.phase is not Phase.CLOSING:
            self._report_end(sequence, reason, message)
        self._release(sequence, message)

    def _report_end(self, sequence: Sequence, reason: Reason, message: str) -> None:
        log.warning(
            "attempt ended",
            attempt=sequence.attempt,
            reason=reason.value,
            detail=message,
            traceparent=sequence.traceparent,
        )
        self._publish(
            messages.AttemptEnded(session=sequence.session, attempt=sequence.attempt, reason=reason, message=message)
        )

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.attempt]
        self._allocator.release(sequence.blocks)

    def expire(self, now: float) -> None:
        """A reservation has a deadline; what runs is watched by the step clock and by the router."""
        for sequence in list(self._sequences.values()):
            if sequence.phase is Phase.RECEIVING and now > sequence.deadline:
                self._end(sequence, Reason.TIMEOUT, "the reservation's blocks did not arrive in time")

    # Steps

    def has_work(self) -> bool:
        return any(sequence.phase is Phase.RUNNING for sequence in self._sequences.values())

    def step(self) -> None:
        batch = self._schedule()
        if not batch:
            return
        logits = self._runner.run(
            [Segment([s.token_ids[-1]], len(s.token_ids) - 1, s.blocks, wants_logits=True) for s in batch]
        )
        draws = [Draw(s.params, s.sample, s.num_prompt, s.num_outputs) for s in batch]
        tokens = draw_tokens(logits, draws, self._eos_token_ids, self._max_len)
        drawn = []
        for sequence, token in zip(batch, tokens, strict=True):
            if token is None:
                self._end(sequence, Reason.INTERNAL, "the model's logits are not finite")
            else:
                drawn.append((sequence, token))
        self._take_tokens(drawn)

    def _schedule(self) -> list[Sequence]:
        """Carries out the scheduler's plan and returns the sequences to compute."""
        in_phase = defaultdict(list)
        for sequence in self._sequences.values():
            in_phase[sequence.phase].append(sequence)
        plan = plan_step(
            [SequenceView(s.attempt, len(s.token_ids), len(s.blocks)) for s in in_phase[Phase.RUNNING]],
            [s.attempt for s in in_phase[Phase.RECEIVING]],
            revoking=bool(in_phase[Phase.CLOSING]),
            available=self._allocator.available,
            block_size=self._layout.block_size,
        )
        if plan.revoke:
            self._end(self._sequences[plan.revoke], Reason.PREEMPTED, "its blocks went to a running sequence")
        for key in plan.preempt:
            self._end(self._sequences[key], Reason.PREEMPTED, "out of blocks")
        for key in plan.grow:
            block = self._allocator.allocate(1)
            assert block is not None, "the plan grows only into available blocks"
            self._sequences[key].blocks += block
        return [self._sequences[key] for key in plan.run]

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
        counts = self._allocator.counts
        stats = self._agent.stats()
        num_running = sum(s.phase is Phase.RUNNING for s in self._sequences.values())
        return messages.Load(
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_in_use=counts.in_use,
            blocks_reserved=counts.reserved,
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            waiting_tokens=0,
            kv_bytes_sent=stats.bytes_sent,
            kv_bytes_received=stats.bytes_received,
        )

    def check(self) -> None:
        if self._sequences:
            self._allocator.check()
        else:
            self._allocator.check_idle()
