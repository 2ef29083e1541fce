"""One transfer as its sink keeps it. Plain state, owned and advanced by `sink.Sink`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.carrier import LinkId
from kvtransfer.events import FailureReason
from kvtransfer.messages import Finish

Problem = tuple[FailureReason, str]


@dataclass
class SinkTransfer:
    """Expected until complete or failed. The blocks from `num_cached_blocks` on belong to the KV thread meanwhile."""

    transfer_id: str
    block_ids: Sequence[int]
    num_cached_blocks: int
    timeout_s: float
    deadline: float
    # The link that brought its first message; no other may speak for it.
    link: LinkId | None = None
    source_worker_id: str = ""
    started_at: float = 0.0
    traceparent: str = ""
    is_opened: bool = False
    # Digest by logical index, of blocks that are verified and written.
    received: dict[int, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    finish: Finish | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def num_blocks_expected(self) -> int:
        return self.num_blocks - self.num_cached_blocks

    @property
    def is_complete(self) -> bool:
        return self.finish is not None and len(self.received) == self.num_blocks_expected

    def is_expected(self, index: int) -> bool:
        return self.num_cached_blocks <= index < self.num_blocks

    def disagreement(self, num_cached_blocks: int, num_blocks: int) -> Problem | None:
        """What the source's counts contradict, with both values."""
        if num_blocks != self.num_blocks:
            return FailureReason.PROTOCOL, f"number of blocks: sink {self.num_blocks}, source {num_blocks}"
        if num_cached_blocks != self.num_cached_blocks:
            return FailureReason.PROTOCOL, f"cached blocks: sink {self.num_cached_blocks}, source {num_cached_blocks}"
        return None

    def check_finish(self, finish: Finish) -> Problem | None:
        """Counts only: the blocks themselves may still be under way."""
        problem = self.disagreement(finish.num_cached_blocks, finish.num_blocks)
        if problem is None and len(finish.keys) != self.num_blocks:
            problem = FailureReason.PROTOCOL, f"{len(finish.keys)} keys for {self.num_blocks} blocks"
        if problem is None and len(finish.digests) != self.num_blocks_expected:
            problem = FailureReason.PROTOCOL, f"{len(finish.digests)} digests for {self.num_blocks_expected} blocks"
        return problem

    def check_digests(self) -> Problem | None:
        """Once complete: the bytes that arrived are those that the source meant, block by block."""
        assert self.finish is not None
        for offset, value in enumerate(self.finish.digests):
            index = self.num_cached_blocks + offset
            if self.received[index] != value:
                return FailureReason.CORRUPT, f"block {index}: Finish names another digest than the block arrived with"
        return None
