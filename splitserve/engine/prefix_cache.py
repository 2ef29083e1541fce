"""Which block holds which key, and in what order unused blocks are given up.

The index inside the block allocator, which owns it and tells it when a block loses its last user or gets a new one.
Names only: what a block's bytes are worth is for those who enter it.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """A key names at most one block and a block has at most one key."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Evictable, the least recently used first.
        self._unused: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def key_of(self, block: int) -> bytes | None:
        return self._keys.get(block)

    def leading_blocks(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of keys from the first one on that are all here."""
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def enter(self, block: int, key: bytes) -> None:
        """Unless some block holds the key already: a second copy stays out. `block` is in use and has no key."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def retire(self, block: int) -> None:
        """Nobody uses the block any more: it may be evicted, after all that were retired before it."""
        self._unused[block] = None

    def revive(self, block: int) -> None:
        """The block is used again."""
        del self._unused[block]

    def evict(self) -> int:
        """Forgets the least recently used of the unused blocks and returns it. KeyError when there is none."""
        block, _ = self._unused.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def drop(self, key: bytes) -> int | None:
        """Forgets a key; returns the block that had it, if one had."""
        block = self._blocks.pop(key, None)
        if block is not None:
            del self._keys[block]
            self._unused.pop(block, None)
        return block

    def is_unused(self, block: int) -> bool:
        return block in self._unused

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def check(self, num_blocks: int) -> None:
        """Verifies that keys and the blocks of a pool name one another; ValueError names the first that do not."""
        for key, block in self._blocks.items():
            if self._keys.get(block) != key:
                raise ValueError(f"a key names block {block}, which does not have it")
        for block, key in self._keys.items():
            if self._blocks.get(key) != block:
                raise ValueError(f"block {block} has a key that does not name it")
            if not 0 <= block < num_blocks:
                raise ValueError(f"block {block} has a key and is not one of {num_blocks} blocks")
        for block in self._unused:
            if block not in self._keys:
                raise ValueError(f"block {block} may be evicted from a cache that does not hold it")
