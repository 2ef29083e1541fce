"""Who holds which block of a pool: free, reserved by a transfer, in use, or cached.

Owned by the engine thread alone; pure bookkeeping, no memory and no torch. "Does not fit now" is a normal return
(None); a misuse raises ValueError and changes nothing.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class BlockState(Enum):
    FREE = "free"
    RESERVED = "reserved"  # a transfer's, until it is complete or cancelled
    IN_USE = "in_use"  # counted references of sequences
    CACHED = "cached"  # held by the prefix cache alone, evictable


@dataclass(frozen=True)
class BlockCounts:
    total: int
    free: int
    cached: int
    in_use: int
    reserved: int


class BlockAllocator:
    """Block ids are 0 to `num_blocks - 1`; each has exactly one state."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"an allocator needs at least 1 block, not {num_blocks}")
        self._states = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._counts: Counter[BlockState] = Counter({BlockState.FREE: num_blocks})

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=len(self._states),
            free=self._counts[BlockState.FREE],
            cached=self._counts[BlockState.CACHED],
            in_use=self._counts[BlockState.IN_USE],
            reserved=self._counts[BlockState.RESERVED],
        )

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and evictable cached ones."""
        return self._counts[BlockState.FREE] + self._counts[BlockState.CACHED]

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks for a transfer, or None when there are not enough."""
        return self._take(num_blocks, BlockState.RESERVED)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free blocks for a sequence with one reference each, or None when there are not enough."""
        return self._take(num_blocks, BlockState.IN_USE)

    def adopt(self, blocks: Sequence[int]) -> None:
        """A transfer is complete: its reserved blocks become a sequence's, one reference each."""
        self._require(blocks, BlockState.RESERVED)
        for block in blocks:
            self._set_state(block, BlockState.IN_USE)
            self._references[block] = 1

    def cancel_reservation(self, blocks: Sequence[int]) -> None:
        """A transfer has ended without its bytes and nobody writes them any more: its blocks are free again."""
        self._require(blocks, BlockState.RESERVED)
        for block in blocks:
            self._set_free(block)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        self._require(blocks, BlockState.IN_USE)
        for block in blocks:
            self._references[block] += 1

    def count_unshared(self, blocks: Sequence[int]) -> int:
        """How many of these have one reference: what a release of all would free."""
        return sum(self._references[block] == 1 for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each block; at none it is free."""
        self._require(blocks, BlockState.IN_USE)
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._set_free(block)

    def check(self) -> None:
        """Verifies every rule of the bookkeeping; ValueError names the first that is broken."""
        free = Counter(self._free)
        for block, (state, references) in enumerate(zip(self._states, self._references, strict=True)):
            if free[block] != (state is BlockState.FREE):
                raise ValueError(f"block {block} is {state.value} but {free[block]} times in the free list")
            if (references > 0) != (state is BlockState.IN_USE) or references < 0:
                raise ValueError(f"block {block} is {state.value} with {references} references")
        if len(self._free) != sum(state is BlockState.FREE for state in self._states):
            raise ValueError("the free list names blocks that do not exist")
        actual = Counter(self._states)
        for state in BlockState:
            if actual[state] != self._counts[state]:
                raise ValueError(f"{actual[state]} blocks are {state.value}, counted as {self._counts[state]}")

    def check_idle(self) -> None:
        """`check`, and besides that nobody holds a block: free and cached ones are all there are."""
        self.check()
        counts = self.counts
        if counts.free + counts.cached != counts.total:
            raise ValueError(f"blocks are still held when idle: {counts}")

    def _take(self, num_blocks: int, state: BlockState) -> list[int] | None:
        if num_blocks < 0:
            raise ValueError(f"cannot take {num_blocks} blocks")
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._set_state(block, state)
            self._references[block] = 1 if state is BlockState.IN_USE else 0
        return blocks

    def _require(self, blocks: Iterable[int], state: BlockState) -> None:
        seen: set[int] = set()
        for block in blocks:
            if not 0 <= block < len(self._states):
                raise ValueError(f"block {block} is not one of {len(self._states)} blocks")
            if block in seen:
                raise ValueError(f"block {block} is named twice")
            if self._states[block] is not state:
                raise ValueError(f"block {block} is {self._states[block].value}, not {state.value}")
            seen.add(block)

    def _set_free(self, block: int) -> None:
        self._set_state(block, BlockState.FREE)
        self._free.append(block)

    def _set_state(self, block: int, state: BlockState) -> None:
        self._counts[self._states[block]] -= 1
        self._counts[state] += 1
        self._states[block] = state
