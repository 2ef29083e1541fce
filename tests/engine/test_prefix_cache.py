"""Which blocks a later sequence finds, which are given up for it, and what sharing does to the count of them."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.block_keys import KeyChain

B = 4
EXTRAS = {"model": "tiny"}


def keys_of(tokens: list[int]) -> list[bytes]:
    keys = KeyChain(B, EXTRAS)
    keys.extend(tokens)
    return keys.complete


def run(allocator: BlockAllocator, keys: list[bytes], *, num_tail_blocks: int = 0) -> list[int]:
    """A sequence that takes what is there, computes the rest, and is still in use."""
    pinned = allocator.pin(keys)
    fresh = allocator.allocate(len(keys) + num_tail_blocks - len(pinned))
    assert fresh is not None
    blocks = pinned + fresh
    allocator.cache(blocks[: len(keys)], keys)
    return blocks


def num_hits(allocator: BlockAllocator, keys: list[bytes]) -> int:
    """How much of a chain is there, and leaves everything as it was but for the order of eviction."""
    blocks = allocator.pin(keys)
    allocator.release(blocks)
    return len(blocks)


def test_chain_loses_its_beginning_before_its_end() -> None:
    """What is left of an evicted chain is a prefix of it: anything else could never be found again."""
    keys = keys_of(list(range(6 * B)))
    for num_taken in range(1, 7):
        allocator = BlockAllocator(6)
        allocator.release(run(allocator, keys))
        taken = allocator.allocate(num_taken)
        assert taken is not None
        allocator.check()
        assert num_hits(allocator, keys) == 6 - num_taken


def test_recently_used_chain_is_evicted_before_an_older_one() -> None:
    allocator = BlockAllocator(9)
    chains = [keys_of(list(range(start, start + 3 * B))) for start in (0, 100, 200)]
    for keys in chains:
        allocator.release(run(allocator, keys))
    assert num_hits(allocator, chains[0]) == 3  # used again
    allocator.release(allocator.allocate(4) or [])
    assert [num_hits(allocator, keys) for keys in chains] == [3, 0, 2]


def test_free_blocks_are_left_while_cached_ones_are_evicted() -> None:
    allocator = BlockAllocator(5)
    keys = keys_of(list(range(3 * B)))
    allocator.release(run(allocator, keys))
    blocks = allocator.allocate(2)
    assert num_hits(allocator, keys) == 3
    allocator.release(blocks or [])


def test_forgotten_key_is_found_or_its_block_is_lost() -> None:
    """One that is in use goes on until its user lets go, one that is not is free at once."""
    allocator = BlockAllocator(6)
    keys = keys_of(list(range(5 * B)))
    allocator.release(run(allocator, keys))
    user = allocator.pin(keys[:2])
    allocator.forget([*keys[:4], b"unknown"])
    allocator.check()
    assert num_hits(allocator, keys) == 0
    assert (allocator.counts.in_use, allocator.counts.cached, allocator.counts.free) == (2, 1, 3)
    allocator.release(user)
    allocator.check()
    assert (allocator.counts.cached, allocator.counts.free) == (1, 5)


def test_pinned_hit_is_evicted() -> None:
    allocator = BlockAllocator(4)
    keys = keys_of(list(range(3 * B)))
    allocator.release(run(allocator, keys))
    pinned = allocator.pin(keys[:2])
    assert allocator.allocate(3) is None
    others = allocator.reserve(2)
    assert others is not None
    assert not set(others) & set(pinned)
    assert allocator.pin(keys) == pinned
    allocator.check()


def test_second_copy_outlives_its_sequence() -> None:
    """The first copy keeps the key, whichever of the two ends first, and the key goes with it."""
    keys = keys_of(list(range(2 * B)))
    for ends_first in (0, 1):
        allocator = BlockAllocator(4)
        copies = [allocator.allocate(2) or [], allocator.allocate(2) or []]
        for blocks in copies:
            allocator.cache(blocks, keys)
        allocator.release(copies[ends_first])
        assert allocator.counts.free == (2 if ends_first else 0)
        assert allocator.pin(keys) == copies[0]
        allocator.release(copies[0])
        allocator.release(copies[1 - ends_first])
        assert (allocator.counts.cached, allocator.counts.free) == (2, 2)
        allocator.check_idle()


def test_block_goes_on_under_the_key_of_its_former_tokens() -> None:
    """Evicted and used for others, then those others are entered."""
    allocator = BlockAllocator(2)
    first, second = keys_of(list(range(2 * B))), keys_of(list(range(50, 50 + 2 * B)))
    for keys, gone in ((first, second), (second, first), (first, second)):
        allocator.release(run(allocator, keys))
        assert num_hits(allocator, gone) == 0
        assert num_hits(allocator, keys) == 2
        allocator.check_idle()


@settings(deadline=None)
@given(st.data())
def test_shared_blocks_are_counted_wrongly(data: st.DataObject) -> None:
    """What each of several holders is said to give back, after all later ones, is what comes back."""
    allocator = BlockAllocator(16)
    blocks = allocator.allocate(8) or []
    tables: list[list[int]] = [blocks]
    for _ in range(data.draw(st.integers(0, 4))):
        shared = data.draw(st.lists(st.sampled_from(blocks), unique=True))
        allocator.share(shared)
        tables.append(shared + (allocator.allocate(data.draw(st.integers(0, 2))) or []))
    held_elsewhere = data.draw(st.lists(st.sampled_from(blocks), unique=True))
    allocator.share(held_elsewhere)
    allocator.cache(blocks[:3], [bytes([index]) for index in range(3)])
    counts = allocator.count_released(tables)
    for table, count in reversed(list(zip(tables, counts, strict=True))):
        before = allocator.available
        allocator.release(table)
        assert allocator.available - before == count


# Keys


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_chain_grown_in_pieces_has_other_keys(tokens: list[int], cuts: list[int]) -> None:
    whole, grown = KeyChain(B, EXTRAS), KeyChain(B, EXTRAS)
    for cut in sorted(cuts):
        grown.extend(tokens[:cut])
        assert len(grown.complete) == min(cut, len(tokens)) // B
    assert grown.all_keys(tokens) == whole.all_keys(tokens)
    assert len(whole.all_keys(tokens)) == -(-len(tokens) // B)


def test_growing_chain_hashes_its_tokens_again() -> None:
    """Only what is new is looked at: the tokens before it may have gone."""
    tokens = random.Random(1).choices(range(1000), k=6 * B)
    grown = KeyChain(B, EXTRAS)
    grown.extend(tokens[: 4 * B])
    grown.extend([-1] * (4 * B) + tokens[4 * B :])
    assert grown.complete == keys_of(tokens)


def test_samples_grow_into_one_anothers_chain() -> None:
    tokens = list(range(2 * B))
    keys = KeyChain(B, EXTRAS)
    keys.extend(tokens)
    forks = [keys.fork(), keys.fork()]
    forks[0].extend(tokens + [1] * B)
    forks[1].extend(tokens + [2] * B)
    assert keys.complete == keys_of(tokens)
    assert [fork.complete for fork in forks] == [keys_of(tokens + [1] * B), keys_of(tokens + [2] * B)]
