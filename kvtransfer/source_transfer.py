"""One transfer as its source keeps it. Plain state, owned and advanced by `source.Source`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.carrier import LinkId, SendHandle
from kvtransfer.events import FailureReason
from kvtransfer.messages import MAX_BLOCKS_PER_MESSAGE, MAX_PAYLOAD_BYTES, Finish
from kvtransfer.settings import KVSettings
from kvtransfer.ticket import Ticket


@dataclass
class SourceTransfer:
    """Open until it fails or the sink acknowledges; then it only waits for the transport to let go."""

    ticket: Ticket
    opened_at: float
    progress_at: float
    link: LinkId | None = None
    started_at: float = 0.0
    num_bytes: int = 0
    # (logical index, block id), in the order of sending.
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    accepted: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    # By sequence: what the sink has not acknowledged, so what the transport may still read.
    in_flight: dict[int, SendHandle] = field(default_factory=dict)
    # What the sink has acknowledged before the transport let go of it.
    held: list[SendHandle] = field(default_factory=list)
    finish: Finish | None = None
    is_finish_sent: bool = False
    failure: tuple[FailureReason, str] | None = None
    acked_after: float | None = None

    @property
    def is_ended(self) -> bool:
        """Its outcome is known; only the transport may still hold its blocks."""
        return self.failure is not None or self.acked_after is not None

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id

    @property
    def waits_for_peer(self) -> bool:
        return bool(self.in_flight) or self.is_finish_sent

    @property
    def is_readable_by_transport(self) -> bool:
        return any(not handle.done for handle in (*self.in_flight.values(), *self.held))

    def acknowledge(self, sequence: int) -> None:
        handle = self.in_flight.pop(sequence, None)
        if handle is not None and not handle.done:
            self.held.append(handle)

    def enqueue(self, blocks: Sequence[tuple[int, int]]) -> str | None:
        """Takes blocks for sending; returns what is wrong with them, and then takes none."""
        if self.finish is not None:
            return "blocks after finish"
        indices = [index for index, _ in blocks]
        first, last = self.ticket.num_cached_blocks, self.ticket.num_blocks
        for index in indices:
            if not first <= index < last:
                return f"block {index} is outside of {first}..{last - 1}"
        if len(set(indices)) != len(indices) or self.accepted.intersection(indices):
            return "a block was given twice"
        self.accepted.update(indices)
        self.queue.extend(blocks)
        return None

    def request_finish(self, keys: list[bytes], payload: bytes) -> str | None:
        """No more blocks will come; returns what is wrong, if anything is."""
        if self.finish is not None:
            return "finished twice"
        if len(self.accepted) != self.ticket.num_blocks_to_send:
            return f"finish after {len(self.accepted)} of {self.ticket.num_blocks_to_send} blocks"
        if len(keys) != self.ticket.num_blocks:
            return f"{len(keys)} keys for {self.ticket.num_blocks} blocks"
        if len(payload) > MAX_PAYLOAD_BYTES:
            return f"payload of {len(payload)} bytes, the limit is {MAX_PAYLOAD_BYTES}"
        # Digests are filled in when the last block has been sent.
        self.finish = Finish(
            transfer_id=self.transfer_id,
            num_cached_blocks=self.ticket.num_cached_blocks,
            num_blocks=self.ticket.num_blocks,
            keys=list(keys),
            digests=[],
            payload=payload,
        )
        return None

    def next_batch(self, block_nbytes: int, max_message_bytes: int) -> list[tuple[int, int]]:
        """The blocks of the next message, still in the queue."""
        count = max(1, min(max_message_bytes // block_nbytes, MAX_BLOCKS_PER_MESSAGE, len(self.queue)))
        return [self.queue[i] for i in range(count)]

    def overdue(self, now: float, limits: KVSettings, link_progress_at: float) -> tuple[FailureReason, str] | None:
        """Which deadline has passed, if one has: for a link, for the sink's answer, or for our own engine's blocks."""
        if self.link is None:
            if now - self.opened_at >= limits.link_wait_s:
                sink = self.ticket.sink_worker_id
                return FailureReason.UNREACHABLE, f"no link to {sink} within {limits.link_wait_s} s"
        elif self.waits_for_peer or self.queue:
            # While it only waits for credit that other transfers hold, their progress is its own.
            since = self.progress_at if self.waits_for_peer else max(self.progress_at, link_progress_at)
            if now - since >= limits.transfer_timeout_s:
                return FailureReason.TIMEOUT, f"the sink made no progress for {limits.transfer_timeout_s} s"
        elif now - self.progress_at >= limits.idle_timeout_s:
            return FailureReason.TIMEOUT, f"no block was given to send for {limits.idle_timeout_s} s"
        return None
