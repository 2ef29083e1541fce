"""The block allocator against a model of it, and each misuse."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.engine.allocator import BlockAllocator, BlockCounts

NUM_BLOCKS = 7
KEYS = [bytes([letter]) * 32 for letter in b"abcde"]


class AllocatorMachine(RuleBasedStateMachine):
    """The model: `references` is None while reserved and a count while in use, `keys` are those of cached blocks, and
    `unused` are the evictable ones, the next to go first. All other blocks are free."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.references: dict[int, int | None] = {}
        self.keys: dict[int, bytes] = {}
        self.unused: list[int] = []

    def _some(self, data: st.DataObject, *, reserved: bool) -> list[int]:
        blocks = sorted(block for block, count in self.references.items() if (count is None) == reserved)
        return data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []

    @rule(count=st.integers(0, NUM_BLOCKS + 1), for_transfer=st.booleans())
    def take(self, count: int, for_transfer: bool) -> None:
        free = set(range(NUM_BLOCKS)) - set(self.references) - set(self.unused)
        blocks = self.allocator.reserve(count) if for_transfer else self.allocator.allocate(count)
        if count > len(free) + len(self.unused):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == len(blocks) == count
        num_evicted = max(count - len(free), 0)
        evicted, self.unused = self.unused[:num_evicted], self.unused[num_evicted:]
        assert set(blocks) <= free | set(evicted)
        for block in evicted:
            del self.keys[block]
        self.references |= dict.fromkeys(blocks, None if for_transfer else 1)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        blocks = self._some(data, reserved=True)
        self.allocator.adopt(blocks)
        self.references |= dict.fromkeys(blocks, 1)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        blocks = self._some(data, reserved=True)
        self.allocator.cancel_reservation(blocks)
        for block in blocks:
            del self.references[block]

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = self._some(data, reserved=False)
        self.allocator.share(blocks)
        for block in blocks:
            self.references[block] = (self.references[block] or 0) + 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self._some(data, reserved=False)
        assert self.allocator.count_released([blocks]) == [sum(self.references[block] == 1 for block in blocks)]
        self.allocator.release(blocks)
        for block in reversed(blocks):
            count = (self.references[block] or 0) - 1
            if count:
                self.references[block] = count
            else:
                del self.references[block]
                self.unused += [block] if block in self.keys else []

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = self._some(data, reserved=False)
        keys = [data.draw(st.sampled_from([self.keys[block]] if block in self.keys else KEYS)) for block in blocks]
        self.allocator.cache(blocks, keys)
        for block, key in zip(blocks, keys, strict=True):
            if key not in self.keys.values():
                self.keys[block] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def pin(self, keys: list[bytes]) -> None:
        holders = {key: block for block, key in self.keys.items()}
        known = list(itertools.takewhile(lambda key: key in holders, keys))
        blocks = self.allocator.pin(keys)
        assert blocks == [holders[key] for key in known]
        for block in blocks:
            self.references[block] = (self.references.get(block) or 0) + 1
        self.unused = [block for block in self.unused if block not in blocks]

    @precondition(lambda self: self.references)
    @rule(
        blocks=st.lists(st.integers(-1, NUM_BLOCKS), min_size=1, max_size=4),
        name=st.sampled_from(["adopt", "cancel_reservation", "share", "release", "cache"]),
    )
    def misuse(self, blocks: list[int], name: str) -> None:
        wants_reserved = name in ("adopt", "cancel_reservation")
        is_legal = len(set(blocks)) == len(blocks) and all(
            block in self.references and (self.references[block] is None) == wants_reserved for block in blocks
        )
        if is_legal:
            return
        before = self.allocator.counts
        arguments = [blocks, [bytes([index]) for index in range(len(blocks))]] if name == "cache" else [blocks]
        with pytest.raises(ValueError, match="block"):
            getattr(self.allocator, name)(*arguments)
        assert self.allocator.counts == before

    @invariant()
    def counts_agree(self) -> None:
        self.allocator.check()
        reserved = sum(count is None for count in self.references.values())
        counts = self.allocator.counts
        assert (counts.total, counts.reserved, counts.cached) == (NUM_BLOCKS, reserved, len(self.unused))
        assert counts.in_use == len(self.references) - reserved
        assert counts.free == NUM_BLOCKS - len(self.references) - len(self.unused)
        assert self.allocator.available == NUM_BLOCKS - len(self.references)
        if self.references:
            with pytest.raises(ValueError, match="still held"):
                self.allocator.check_idle()
        else:
            self.allocator.check_idle()


TestAllocatorLosesTrackOfABlock = AllocatorMachine.TestCase
TestAllocatorLosesTrackOfABlock.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator, blocks: (allocator.release(blocks), allocator.release(blocks)),
        lambda allocator, blocks: allocator.release([blocks[0], blocks[0]]),
        lambda allocator, blocks: allocator.release([*blocks, 99]),
        lambda allocator, blocks: allocator.release([*blocks, -1]),
        lambda allocator, blocks: allocator.adopt(blocks),
        lambda allocator, blocks: allocator.cancel_reservation(blocks),
        lambda allocator, blocks: allocator.share([3]),
        lambda allocator, blocks: allocator.allocate(-1),
        lambda allocator, blocks: allocator.reserve(-1),
        lambda allocator, blocks: allocator.cache(blocks, [b"k"]),
        lambda allocator, blocks: allocator.cache([*blocks, 3], [b"k", b"l", b"m"]),
        lambda allocator, blocks: (allocator.cache(blocks, [b"k", b"l"]), allocator.cache(blocks, [b"k", b"m"])),
        lambda allocator, blocks: (allocator.cache(blocks, [b"k", b"l"]), allocator.cache(blocks[::-1], [b"m", b"k"])),
    ],
)
def test_misuse_passes_or_changes_something(misuse: Callable[[BlockAllocator, list[int]], object]) -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    assert blocks is not None
    with pytest.raises(ValueError, match=r"block|cannot take"):
        misuse(allocator, blocks)
    allocator.check()


def test_double_free_gives_one_block_to_two_sequences() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.release(blocks)
    with pytest.raises(ValueError, match="is free, not in_use"):
        allocator.release(blocks)
    assert allocator.counts == BlockCounts(total=2, free=2, cached=0, in_use=0, reserved=0)
    both = allocator.allocate(2)
    assert both is not None
    assert sorted(both) == [0, 1]


def test_shared_block_is_freed_under_its_other_reader() -> None:
    allocator = BlockAllocator(1)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.share(blocks)
    allocator.release(blocks)
    assert allocator.allocate(1) is None
    allocator.release(blocks)
    assert allocator.allocate(1) == blocks


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda allocator: allocator._free.append(0),
        lambda allocator: allocator._free.append(17),
        lambda allocator: allocator._free.popleft(),
        lambda allocator: allocator._references.__setitem__(0, 0),
        lambda allocator: allocator._references.__setitem__(3, 1),
        lambda allocator: setattr(allocator, "_num_reserved", 0),
        lambda allocator: allocator._cache._keys.update({3: b"free"}),
        lambda allocator: allocator._cache._blocks.update({b"free": 3}),
        lambda allocator: allocator._cache._blocks.pop(b"used"),
        lambda allocator: allocator._cache._keys.pop(1),
        lambda allocator: allocator._cache._unused.popitem(),
        lambda allocator: allocator._cache._unused.update({0: None}),
        lambda allocator: allocator._cache._unused.update({17: None}),
        lambda allocator: (allocator._cache._keys.pop(1), allocator._cache._blocks.pop(b"unused")),
        lambda allocator: (allocator._cache._keys.update({3: b"f"}), allocator._cache._blocks.update({b"f": 3})),
        lambda allocator: (allocator._cache._keys.update({17: b"f"}), allocator._cache._blocks.update({b"f": 17})),
    ],
)
def test_checker_misses_corruption(corrupt: Callable[[BlockAllocator], object]) -> None:
    """Block 0 is in use and cached, 1 cached alone, 2 reserved, 3 free."""
    allocator = BlockAllocator(4)
    allocator.cache(allocator.allocate(2) or [], [b"used", b"unused"])
    allocator.release([1])
    allocator.reserve(1)
    allocator.check()
    corrupt(allocator)
    with pytest.raises(ValueError, match="block"):
        allocator.check()
