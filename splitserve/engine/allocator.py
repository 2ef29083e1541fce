"""Who holds which block of a pool: free, reserved by a transfer, in use, or cached.

Owned by the engine thread alone; pure bookkeeping, no memory and no torch. "Does not fit now" is a normal return
(None); a misuse raises ValueError and changes nothing.

A block in use whose bytes are complete may enter the prefix cache under its key (`cache`). From then on whoever needs
the same tokens pins it instead of computing them (`pin`). When its last user lets go it stays, evictable, as cached.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from splitserve.engine.prefix_cache import PrefixCache


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
        self._cache = PrefixCache()
        self._num_reserved = 0

    @property
    def counts(self) -> BlockCounts:
        total, free, cached, reserved = len(self._states), len(self._free), self._cache.num_unused, self._num_reserved
        return BlockCounts(
            total=total, free=free, cached=cached, in_use=total - free - cached - reserved, reserved=reserved
        )

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and evictable cached ones."""
        return len(self._free) + self._cache.num_unused

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Takes free and evicted blocks for a transfer, or None when there are not enough."""
        return self._take(num_blocks, BlockState.RESERVED)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes free and evicted blocks for a sequence, one reference each, or None when there are not enough.

        The least recently used are evicted first. Their bytes stay what they were until the new owner writes.
        """
        return self._take(num_blocks, BlockState.IN_USE)

    def adopt(self, blocks: Sequence[int]) -> None:
        """A transfer is complete: its reserved blocks become a sequence's, one reference each."""
        self._require(blocks, BlockState.RESERVED)
        self._num_reserved -= len(blocks)
        for block in blocks:
            self._states[block] = BlockState.IN_USE
            self._references[block] = 1

    def cancel_reservation(self, blocks: Sequence[int]) -> None:
        """A transfer has ended without its bytes and nobody writes them any more: its blocks are free again."""
        self._require(blocks, BlockState.RESERVED)
        self._num_reserved -= len(blocks)
        for block in blocks:
            self._set_free(block)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each block."""
        self._require(blocks, BlockState.IN_USE)
        for block in blocks:
            self._references[block] += 1

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest run of leading keys, with one more reference on each."""
        blocks = self._cache.leading_blocks(keys)
        for block in blocks:
            if self._references[block] == 0:
                self._cache.revive(block)
                self._states[block] = BlockState.IN_USE
            self._references[block] += 1
        return blocks

    def cache(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Enters blocks in use, complete and never written again, into the prefix cache under their keys.

        A second copy of a cached key stays outside, private to its sequence, and is free once that lets go.
        """
        self._require(blocks, BlockState.IN_USE)
        if len(blocks) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
        for block, key in zip(blocks, keys, strict=True):
            if self._cache.key_of(block) not in (None, key):
                raise ValueError(f"block {block} is cached under another key")
        for block, key in zip(blocks, keys, strict=True):
            self._cache.enter(block, key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Takes keys out of the prefix cache; their blocks are nobody's any more once their users have let go."""
        for key in keys:
            block = self._cache.drop(key)
            if block is not None and self._references[block] == 0:
                self._set_free(block)

    def count_released(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """For each of these holders, how many blocks its release makes available once all after it have released.

        So the sum over any last ones of `tables` is what they give back together, shared blocks included.
        """
        references = dict[int, int]()
        counts = []
        for blocks in reversed(tables):
            count = 0
            for block in blocks:
                left = references.get(block, self._references[block]) - 1
                references[block] = left
                count += left == 0
            counts.append(count)
        return counts[::-1]

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each block of a sequence, in its order; with none left it is cached or free.

        Of those that stay cached the later ones are evicted first: without what comes before they are of no use.
        """
        self._require(blocks, BlockState.IN_USE)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._let_go(block)

    def check(self) -> None:
        """Verifies every rule of the bookkeeping; ValueError names the first that is broken."""
        free = Counter(self._free)
        for block, (state, references) in enumerate(zip(self._states, self._references, strict=True)):
            if free[block] != (state is BlockState.FREE):
                raise ValueError(f"block {block} is {state.value} but {free[block]} times in the free list")
            if (references > 0) != (state is BlockState.IN_USE) or references < 0:
                raise ValueError(f"block {block} is {state.value} with {references} references")
            if (state is BlockState.CACHED) != self._cache.is_unused(block):
                raise ValueError(f"block {block} is {state.value}, which its place in the order of eviction denies")
            if state in (BlockState.FREE, BlockState.RESERVED) and block in self._cache:
                raise ValueError(f"block {block} is {state.value} with a key in the cache")
        if len(self._free) != sum(state is BlockState.FREE for state in self._states):
            raise ValueError("the free list names blocks that do not exist")
        self._cache.check(len(self._states))
        num_reserved = sum(state is BlockState.RESERVED for state in self._states)
        if num_reserved != self._num_reserved:
            raise ValueError(f"{num_reserved} blocks are reserved, counted as {self._num_reserved}")

    def check_idle(self) -> None:
        """`check`, and besides that nobody holds a block: free and cached ones are all there are."""
        self.check()
        counts = self.counts
        if counts.free + counts.cached != counts.total:
            raise ValueError(f"blocks are still held when idle: {counts}")

    def _take(self, num_blocks: int, state: BlockState) -> list[int] | None:
        if num_blocks < 0:
            raise ValueError(f"cannot take {num_blocks} blocks")
        if num_blocks > self.available:
            return None
        while len(self._free) < num_blocks:
            self._set_free(self._cache.evict())
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        is_reserved = state is BlockState.RESERVED
        self._num_reserved += num_blocks if is_reserved else 0
        for block in blocks:
            self._states[block] = state
            self._references[block] = 0 if is_reserved else 1
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

    def _let_go(self, block: int) -> None:
        if block in self._cache:
            self._states[block] = BlockState.CACHED
            self._cache.retire(block)
        else:
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._states[block] = BlockState.FREE
        self._free.append(block)
