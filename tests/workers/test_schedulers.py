"""The two workers' step planners, as tables, and decode's against whatever a pool can look like."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import scheduler as decode
from decode_worker.scheduler import SequenceView, StepPlan
from prefill_worker import scheduler as prefill
from prefill_worker.scheduler import Chunk, PromptView

B = 4


def view(key: str, num_tokens: int, num_blocks: int, num_unshared: int | None = None) -> SequenceView:
    return SequenceView(key, num_tokens, num_blocks, num_blocks if num_unshared is None else num_unshared)


# One block each, and the next token needs a second one.
FULL = [view(key, B + 1, 1) for key in ("old", "mid", "new")]
# The next token's slot is the last one of the block.
FITS = [view(key, B, 1) for key in ("old", "mid", "new")]


def plan(
    running: list[SequenceView], incomplete: list[str] | None = None, *, available: int = 0, revoking: bool = False
) -> StepPlan:
    return decode.plan_step(running, incomplete or [], revoking=revoking, available=available, block_size=B)


def test_sequence_with_room_is_held_back_or_given_a_block() -> None:
    assert plan(FITS) == StepPlan(run=["old", "mid", "new"])
    assert plan(FITS, ["r1"], available=3) == StepPlan(run=["old", "mid", "new"])
    assert plan([]) == StepPlan()


def test_sequence_runs_without_a_slot_for_its_token() -> None:
    assert plan(FULL, available=3) == StepPlan(run=["old", "mid", "new"], grow=["old", "mid", "new"])
    mixed = [FITS[0], FULL[1], FITS[2]]
    assert plan(mixed, available=1) == StepPlan(run=["old", "mid", "new"], grow=["mid"])


def test_running_sequence_is_preempted_while_a_reservation_is_kept() -> None:
    """The youngest reservation goes first, one at a time; who needs a block waits for it."""
    assert plan(FULL, ["r1", "r2"]) == StepPlan(revoke="r2")
    assert plan(FULL, ["r1", "r2"], available=1) == StepPlan(run=["old"], grow=["old"], revoke="r2")
    assert plan([FULL[0], FITS[1], FULL[2]], ["r1"]) == StepPlan(run=["mid"], revoke="r1")


def test_second_reservation_is_revoked_before_the_first_one_is_back() -> None:
    assert plan(FULL, ["r1"], revoking=True) == StepPlan()
    assert plan([FITS[0], *FULL[1:]], revoking=True) == StepPlan(run=["old"])
    # Blocks that came back meanwhile are used at once.
    assert plan(FULL, ["r1"], revoking=True, available=2) == StepPlan(run=["old", "mid"], grow=["old", "mid"])


def test_an_older_sequence_gives_way_to_a_younger_one() -> None:
    assert plan([FULL[0], FITS[1], FITS[2]]) == StepPlan(run=["old", "mid"], grow=["old"], preempt=["new"])
    # The youngest gives way to itself when it is the one that needs a block.
    assert plan([FITS[0], FITS[1], FULL[2]]) == StepPlan(run=["old", "mid"], preempt=["new"])


def test_more_sequences_are_preempted_than_needed() -> None:
    large = view("new", 3 * B, 3)
    assert plan([FULL[0], FULL[1], large]) == StepPlan(run=["old", "mid"], grow=["old", "mid"], preempt=["new"])
    # One block came free, and two of the three needed one: the middle one gives way as well.
    assert plan(FULL) == StepPlan(run=["old"], grow=["old"], preempt=["new", "mid"])


def test_blocks_that_others_hold_are_counted_as_freed() -> None:
    """The youngest shares two of its three blocks: its end frees one."""
    shared = view("new", 3 * B, 3, num_unshared=1)
    assert plan([FULL[0], FULL[1], shared]) == StepPlan(run=["old"], grow=["old"], preempt=["new", "mid"])


def test_oldest_sequence_is_preempted() -> None:
    alone = [view("old", 3 * B + 1, 3), view("new", 1, 1)]
    assert plan(alone) == StepPlan(run=["old"], grow=["old"], preempt=["new"])
    with pytest.raises(AssertionError, match="oldest"):
        plan(alone[:1])


@dataclass(frozen=True)
class PoolState:
    running: list[SequenceView]
    incomplete: list[str]
    revoking: bool
    available: int
    block_size: int


@st.composite
def pools(draw: st.DrawFn) -> PoolState:
    """Any state that decode can reach: a table lacks at most one slot, and one sequence alone always fits."""
    block_size = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1 - block_size, 1)), max_size=8))
    running = [
        # The last block is always a sequence's own.
        view(f"s{index}", blocks * block_size + over, blocks, draw(st.integers(1, blocks)))
        for index, (blocks, over) in enumerate(sizes)
    ]
    incomplete = [f"r{i}" for i in range(draw(st.integers(0, 3)))]
    revoking = draw(st.booleans())
    available = draw(st.integers(0, 6))
    needs_one = bool(running) and running[0].num_tokens > running[0].num_blocks * block_size
    if needs_one and len(running) == 1 and not (incomplete or revoking or available):
        available = 1
    return PoolState(running, incomplete, revoking, available, block_size)


@given(pools())
def test_some_pool_makes_decode_lose_or_overdraw(pool: PoolState) -> None:
    """The oldest stays, nobody is in two places, growth fits, and reservations go before sequences."""
    step = decode.plan_step(
        pool.running,
        pool.incomplete,
        revoking=pool.revoking,
        available=pool.available,
        block_size=pool.block_size,
    )
    views = {one.key: one for one in pool.running}
    order = [one.key for one in pool.running]
    sitting_out = set(order) - set(step.run) - set(step.preempt)
    assert not set(step.run) & set(step.preempt)
    assert len(step.run) + len(step.preempt) + len(sitting_out) == len(order)
    assert step.run == [key for key in order if key in step.run], "the order of arrival is lost"
    if order:
        assert order[0] not in step.preempt
    # Those preempted are the youngest.
    assert set(step.preempt) == set(order[len(order) - len(step.preempt) :])
    # Growth: exactly where a slot is missing, one block each, out of what is there or was taken back.
    freed = sum(views[key].num_unshared for key in step.preempt)
    assert len(step.grow) <= pool.available + freed
    needy = {key for key in order if views[key].num_tokens > views[key].num_blocks * pool.block_size}
    assert set(step.grow) == set(step.run) & needy
    assert len(step.grow) == len(set(step.grow))
    # Reservations before sequences, one at a time, and only in need.
    blocks_are_coming = bool(pool.revoking or pool.incomplete)
    assert not (blocks_are_coming and step.preempt)
    assert (not sitting_out) or blocks_are_coming
    assert sitting_out <= needy
    expected = pool.incomplete[-1] if sitting_out and not pool.revoking else None
    assert step.revoke == expected
    if pool.available:
        assert len(step.grow) >= min(pool.available, len(needy) - len(set(step.preempt) & needy))


@pytest.mark.parametrize(
    ("prompts", "budget", "chunks"),
    [
        ([], 8, []),
        ([PromptView("a", 5, 0)], 8, [Chunk("a", 0, 5)]),
        ([PromptView("a", 20, 0)], 8, [Chunk("a", 0, 8)]),
        ([PromptView("a", 20, 16)], 8, [Chunk("a", 16, 4)]),
        ([PromptView("a", 5, 2), PromptView("b", 9, 0)], 8, [Chunk("a", 2, 3), Chunk("b", 0, 5)]),
        ([PromptView("a", 8, 0), PromptView("b", 1, 0)], 8, [Chunk("a", 0, 8)]),
        ([PromptView("a", 1, 0), PromptView("b", 1, 0), PromptView("c", 9, 1)], 3, [
            Chunk("a", 0, 1), Chunk("b", 0, 1), Chunk("c", 1, 1)
        ]),
    ],
)  # fmt: skip
def test_step_passes_its_budget_or_changes_the_order(
    prompts: list[PromptView], budget: int, chunks: list[Chunk]
) -> None:
    assert prefill.plan_step(prompts, budget) == chunks


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 16))
def test_some_prompt_is_computed_twice_or_never(lengths: list[int], budget: int) -> None:
    """Step after step until nothing is left: every token exactly once, in order."""
    done = dict.fromkeys(range(len(lengths)), 0)
    for _ in range(sum(lengths)):
        prompts = [PromptView(str(i), lengths[i], done[i]) for i in done if done[i] < lengths[i]]
        if not prompts:
            break
        chunks = prefill.plan_step(prompts, budget)
        assert 1 <= sum(chunk.length for chunk in chunks) <= budget
        for chunk in chunks:
            index = int(chunk.attempt)
            assert chunk.start == done[index]
            assert chunk.length >= 1
            done[index] += chunk.length
    assert list(done.values()) == lengths
