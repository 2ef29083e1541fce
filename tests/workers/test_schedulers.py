"""The two workers' step planners, as tables, and decode's against whatever a pool can look like."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import scheduler as decode
from decode_worker.scheduler import LocalView, ReservationView, SequenceView, StepPlan
from splitserve.worker.chunks import Chunk, PromptView, plan_chunks, tokens_ahead

B = 4


def view(key: str, over: int, num_freed: int = 1) -> SequenceView:
    """A sequence with `over` tokens more than its blocks have slots."""
    num_blocks = max(num_freed, 1)
    return SequenceView(key, num_blocks * B + over, num_blocks, num_freed)


def reservations(**sizes: int) -> list[ReservationView]:
    return [ReservationView(attempt, num_blocks) for attempt, num_blocks in sizes.items()]


# One block each, and the next token needs a second one.
FULL = [view(key, 1) for key in ("old", "mid", "new")]
# The next token's slot is the last one of the block.
FITS = [view(key, 0) for key in ("old", "mid", "new")]


def plan(
    running: list[SequenceView],
    incomplete: list[ReservationView] | None = None,
    local: list[LocalView] | None = None,
    *,
    available: int = 0,
    returning: int = 0,
) -> StepPlan:
    return decode.plan_step(
        running, incomplete or [], local or [], returning=returning, available=available, block_size=B
    )


def test_sequence_with_room_is_held_back_or_given_a_block() -> None:
    assert plan(FITS) == StepPlan(run=["old", "mid", "new"])
    assert plan(FITS, reservations(r1=1), available=3) == StepPlan(run=["old", "mid", "new"])
    assert plan([]) == StepPlan()


def test_sequence_runs_without_a_slot_for_its_token() -> None:
    assert plan(FULL, available=3) == StepPlan(run=["old", "mid", "new"], grow=["old", "mid", "new"])
    mixed = [FITS[0], FULL[1], FITS[2]]
    assert plan(mixed, available=1) == StepPlan(run=["old", "mid", "new"], grow=["mid"])


def test_running_sequence_is_preempted_while_a_reservation_is_kept() -> None:
    """The youngest reservations go first, and no more of them than are needed; who needs a block waits for it."""
    both = reservations(r1=3, r2=3)
    assert plan(FULL, both) == StepPlan(revoke=["r2"])
    assert plan(FULL, both, available=1) == StepPlan(run=["old"], grow=["old"], revoke=["r2"])
    assert plan([FULL[0], FITS[1], FULL[2]], reservations(r1=2)) == StepPlan(run=["mid"], revoke=["r1"])
    assert plan([*FULL, view("newer", 1)], both) == StepPlan(revoke=["r2", "r1"])


def test_reservations_are_revoked_one_step_at_a_time() -> None:
    """C43: all that are needed at once; only what they cannot bring is taken from the youngest that run."""
    small = reservations(r1=1, r2=1, r3=1)
    assert plan(FULL, small) == StepPlan(revoke=["r3", "r2", "r1"])
    assert plan(FULL[:2], small) == StepPlan(revoke=["r3", "r2"])
    # One block comes back later, the youngest gives another now: the oldest goes on at once.
    assert plan(FULL, small[:1]) == StepPlan(run=["old"], grow=["old"], preempt=["new"], revoke=["r1"])


def test_reservation_is_revoked_while_a_prompt_is_computed() -> None:
    """A prompt that is computed here gives its blocks back at once: the youngest first, and no more than are needed."""
    prompts = [LocalView("l1", 1), LocalView("l2", 2)]
    assert plan(FITS, local=prompts) == StepPlan(run=["old", "mid", "new"])
    everyone = ["old", "mid", "new"]
    assert plan(FULL, reservations(r1=3), prompts) == StepPlan(run=everyone, grow=everyone, revoke=["l2", "l1"])
    assert plan(FULL[:2], reservations(r1=3), prompts) == StepPlan(run=everyone[:2], grow=everyone[:2], revoke=["l2"])
    # What they cannot bring is taken from reservations, and only then from those that run.
    assert plan(FULL, reservations(r1=3), prompts[:1]) == StepPlan(run=["old"], grow=["old"], revoke=["l1", "r1"])
    assert plan(FULL, local=prompts[:1]) == StepPlan(
        run=everyone[:2], grow=everyone[:2], preempt=["new"], revoke=["l1"]
    )


def test_second_reservation_is_revoked_before_the_first_one_is_back() -> None:
    assert plan(FULL, reservations(r1=3), returning=3) == StepPlan()
    assert plan([FITS[0], *FULL[1:]], returning=2) == StepPlan(run=["old"])
    # Blocks that came back meanwhile are used at once.
    assert plan(FULL, reservations(r1=3), returning=1, available=2) == StepPlan(run=["old", "mid"], grow=["old", "mid"])
    # What is on its way is not enough.
    assert plan(FULL, reservations(r1=2), returning=2) == StepPlan(revoke=["r1"])
    assert plan(FULL, returning=1) == StepPlan(run=["old"], grow=["old"], preempt=["new"])


def test_an_older_sequence_gives_way_to_a_younger_one() -> None:
    assert plan([FULL[0], FITS[1], FITS[2]]) == StepPlan(run=["old", "mid"], grow=["old"], preempt=["new"])
    # The youngest gives way to itself when it is the one that needs a block.
    assert plan([FITS[0], FITS[1], FULL[2]]) == StepPlan(run=["old", "mid"], preempt=["new"])


def test_more_sequences_are_preempted_than_needed() -> None:
    large = view("new", 0, num_freed=3)
    assert plan([FULL[0], FULL[1], large]) == StepPlan(run=["old", "mid"], grow=["old", "mid"], preempt=["new"])
    # One block came free, and two of the three needed one: the middle one gives way as well.
    assert plan(FULL) == StepPlan(run=["old"], grow=["old"], preempt=["new", "mid"])
    assert plan(FULL, available=1) == StepPlan(run=["old", "mid"], grow=["old", "mid"], preempt=["new"])


def test_blocks_that_others_hold_are_counted_as_freed() -> None:
    """The youngest shares all of its blocks with others: its end brings nothing, and the next one goes too."""
    shared = view("new", 0, num_freed=0)
    assert plan([FULL[0], FITS[1], shared]) == StepPlan(run=["old"], grow=["old"], preempt=["new", "mid"])


def test_sample_takes_its_siblings_along() -> None:
    """The last of those that began together goes first, and alone; the oldest of all never does."""
    trio = [view(f"old/{index}", 1) for index in range(3)]
    assert plan(trio, available=2) == StepPlan(run=["old/0", "old/1"], grow=["old/0", "old/1"], preempt=["old/2"])
    assert plan(trio) == StepPlan(run=["old/0"], grow=["old/0"], preempt=["old/2", "old/1"])
    assert plan([*trio, FITS[1]], available=2) == StepPlan(
        run=["old/0", "old/1", "old/2"], grow=["old/0", "old/1", "old/2"], preempt=["mid"]
    )


def test_oldest_sequence_is_preempted() -> None:
    alone = [view("old", 1, num_freed=3), view("new", -3)]
    assert plan(alone) == StepPlan(run=["old"], grow=["old"], preempt=["new"])
    assert plan(alone[:1], returning=1) == StepPlan()
    assert plan(alone[:1], reservations(r1=1)) == StepPlan(revoke=["r1"])
    with pytest.raises(AssertionError, match="oldest"):
        plan(alone[:1])


@dataclass(frozen=True)
class PoolState:
    running: list[SequenceView]
    incomplete: list[ReservationView]
    local: list[LocalView]
    returning: int
    available: int
    block_size: int


@st.composite
def pools(draw: st.DrawFn) -> PoolState:
    """Any state that decode can reach: a table lacks at most one slot, and one sequence alone always fits."""
    block_size = draw(st.integers(1, 4))
    sizes = st.tuples(st.integers(1, 5), st.integers(1 - block_size, 1), st.integers(1, 5))
    running = [
        # The last block of each is always its own, others may be shared.
        SequenceView(str(index), blocks * block_size + over, blocks, min(freed, blocks))
        for index, (blocks, over, freed) in enumerate(draw(st.lists(sizes, max_size=12)))
    ]
    incomplete = [ReservationView(f"r{i}", draw(st.integers(1, 4))) for i in range(draw(st.integers(0, 3)))]
    local = [LocalView(f"l{i}", draw(st.integers(0, 4))) for i in range(draw(st.integers(0, 3)))]
    returning, available = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    if len(running) == 1 and not (incomplete or returning):
        available += 1
    return PoolState(running, incomplete, local, returning, available, block_size)


@given(pools())
def test_some_pool_makes_decode_lose_or_overdraw(pool: PoolState) -> None:
    """The oldest stays, nobody is in two places, growth fits, and no more is taken than somebody needs."""
    step = decode.plan_step(
        pool.running,
        pool.incomplete,
        pool.local,
        returning=pool.returning,
        available=pool.available,
        block_size=pool.block_size,
    )
    order = [sequence.key for sequence in pool.running]
    staying = [sequence for sequence in pool.running if sequence.key not in step.preempt]
    keys = [sequence.key for sequence in staying]
    needy = [s.key for s in staying if s.num_tokens > s.num_blocks * pool.block_size]
    # Those that end are the youngest, first the prompts, then the reservations.
    assert step.preempt == order[::-1][: len(step.preempt)]
    revocable = [holder.attempt for holder in [*reversed(pool.local), *reversed(pool.incomplete)]]
    assert step.revoke == revocable[: len(step.revoke)]
    assert not step.preempt or len(step.revoke) == len(revocable)
    assert not order or order[0] not in step.preempt
    # Growth: out of what is there, the oldest first; who gets no block sits out and nobody else does.
    given_up = [prompt for prompt in pool.local if prompt.attempt in step.revoke]
    available = pool.available + sum(prompt.num_freed for prompt in given_up)
    freed = sum(sequence.num_freed for sequence in pool.running if sequence.key in step.preempt)
    assert step.grow == needy[: available + freed]
    assert step.run == [key for key in keys if key not in needy or key in step.grow]
    # Who sits out has its block on the way, or the step before has to be carried out first.
    coming = pool.returning + sum(r.num_blocks for r in pool.incomplete if r.attempt in step.revoke)
    assert len(needy) - len(step.grow) <= coming or len(staying) == 1
    # The last one that had to go was needed.
    growing = decode.num_growing(pool.running, pool.block_size)
    if step.preempt and len(staying) > 0:
        spared = pool.running[len(staying)]
        kept = decode.num_growing([*staying, spared], pool.block_size)
        assert kept > available + freed - spared.num_freed + coming
    elif step.revoke and not step.preempt:
        sizes = {r.attempt: r.num_blocks for r in pool.incomplete} | {p.attempt: p.num_freed for p in pool.local}
        assert growing > available + coming - sizes[step.revoke[-1]]


# Prefill: steps of 64 tokens, at most 24 of them scored, more than 32 left is long, blocks of 16.


def prefill_plan(prompts: list[PromptView]) -> list[Chunk]:
    return plan_chunks(prompts, token_budget=64, scored_budget=24, threshold=32, block_size=16)


@pytest.mark.parametrize(
    ("prompts", "chunks"),
    [
        ([], []),
        ([PromptView("a", 5, 0)], [Chunk("a", 0, 5)]),
        ([PromptView("a", 64, 0)], [Chunk("a", 0, 64)]),
        ([PromptView("a", 65, 0)], [Chunk("a", 0, 64)]),
        ([PromptView("a", 200, 190)], [Chunk("a", 190, 10)]),
        ([PromptView("a", 20, 5), PromptView("b", 30, 0), PromptView("c", 40, 20)],
         [Chunk("a", 5, 15), Chunk("b", 0, 30), Chunk("c", 20, 19)]),
    ],
)  # fmt: skip
def test_step_passes_its_budget_or_changes_the_order(prompts: list[PromptView], chunks: list[Chunk]) -> None:
    assert prefill_plan(prompts) == chunks


GIANT = PromptView("giant", 1000, 160)


def test_giant_prompt_takes_the_whole_step() -> None:
    """C47: its share while others wait, before or after it; all of the step that nobody else can use."""
    others = [PromptView(f"s{i}", 16, 0) for i in range(4)]
    both = [Chunk("s0", 0, 16), Chunk("s1", 0, 16)]
    assert prefill_plan([GIANT, *others]) == [Chunk("giant", 160, 32), *both]
    assert prefill_plan([*others, GIANT]) == [*both, Chunk("giant", 160, 32)]
    assert prefill_plan([GIANT, others[0]]) == [Chunk("giant", 160, 48), both[0]]
    assert prefill_plan([GIANT]) == [Chunk("giant", 160, 64)]


def test_share_of_a_giant_prompt_is_given_away() -> None:
    """However many short ones wait, and whichever other long ones would be done sooner."""
    crowd = [PromptView(f"s{i}", 32, 0) for i in range(20)]
    assert prefill_plan([*crowd, GIANT]) == [Chunk("s0", 0, 32), Chunk("giant", 160, 32)]
    assert prefill_plan([GIANT, PromptView("less", 40, 0)]) == [Chunk("giant", 160, 32), Chunk("less", 0, 32)]


def test_second_giant_prompt_slows_the_first_one_down() -> None:
    """Equals, within a factor of two, go in order of arrival; one that is much shorter goes beside the first."""
    assert prefill_plan([GIANT, PromptView("second", 600, 0)]) == [Chunk("giant", 160, 64)]
    assert prefill_plan([GIANT, PromptView("second", 100, 0)]) == [Chunk("giant", 160, 32), Chunk("second", 0, 32)]
    # The last tokens of the first leave room for the second.
    assert prefill_plan([PromptView("a", 1000, 980), GIANT]) == [Chunk("a", 980, 20), Chunk("giant", 160, 44)]


def test_prompt_that_does_not_fit_stops_those_behind_it() -> None:
    """What is left goes to whom it is enough for, and only the rest to the one that was passed; it is first next
    time."""
    queue = [PromptView("a", 30, 0), PromptView("b", 30, 0), PromptView("c", 30, 0), PromptView("d", 3, 0)]
    assert prefill_plan(queue) == [Chunk("a", 0, 30), Chunk("b", 0, 30), Chunk("c", 0, 1), Chunk("d", 0, 3)]
    assert prefill_plan([PromptView("c", 30, 1), PromptView("e", 32, 0), PromptView("f", 30, 0)])[0] == Chunk(
        "c", 1, 29
    )


def test_chunk_ends_within_a_block_although_another_can_use_the_tokens() -> None:
    """A block leaves when it is whole."""
    queue = [PromptView("a", 10, 0), PromptView("b", 30, 0), GIANT]
    assert prefill_plan(queue) == [Chunk("a", 0, 10), Chunk("b", 0, 16), Chunk("giant", 160, 38)]
    # Less than what is missing from its block: nothing of it.
    assert prefill_plan([PromptView("a", 25, 0), PromptView("b", 30, 2), GIANT]) == [
        Chunk("a", 0, 25), Chunk("giant", 160, 39)
    ]  # fmt: skip
    # Nobody else: to the last token.
    assert prefill_plan([PromptView("a", 30, 0), PromptView("b", 30, 0), PromptView("c", 30, 0)])[2].length == 4


@pytest.mark.parametrize(
    ("num_decoding", "most", "budget"),
    [
        (0, 256, 256),
        (100, 256, 156),
        (224, 256, 32),
        (250, 256, 32),
        (900, 256, 32),
        (3, 32, 29),
        (30, 32, 16),
        (9, 1, 1),
    ],
)
def test_sequences_that_decode_leave_prompts_a_token_or_take_their_room(
    num_decoding: int, most: int, budget: int
) -> None:
    assert decode.prompt_budget(num_decoding, max_num_batched_tokens=most, block_size=16) == budget


def test_giant_prompt_has_all_of_a_step_that_is_full_of_sequences() -> None:
    """C47: a short one that waits ends in this step, and the giant gets on by a block."""
    budget = decode.prompt_budget(256, max_num_batched_tokens=256, block_size=16)
    waiting = [GIANT, PromptView("short", 12, 0)]
    step = plan_chunks(waiting, token_budget=budget, scored_budget=256, threshold=min(128, budget // 2), block_size=16)
    assert step == [Chunk("giant", 160, 20), Chunk("short", 0, 12)]


def scored(attempt: str, num_tokens: int, num_computed: int = 0) -> PromptView:
    return PromptView(attempt, num_tokens, num_computed, is_scored=True)


def test_step_holds_more_logits_than_fit() -> None:
    assert prefill_plan([scored("x", 900)]) == [Chunk("x", 0, 24)]
    assert prefill_plan([scored("x", 24), PromptView("a", 30, 0)]) == [Chunk("x", 0, 24), Chunk("a", 0, 30)]
    # What the scored ones may not use, others do.
    assert prefill_plan([scored("x", 900), GIANT]) == [Chunk("x", 0, 24), Chunk("giant", 160, 40)]
    assert prefill_plan([GIANT, scored("x", 900)]) == [Chunk("giant", 160, 40), Chunk("x", 0, 24)]
    # Among one another they go as all do: short ones pass a long one, which is sure of half.
    assert prefill_plan([scored("x", 900), scored("y", 12), scored("z", 12)]) == [Chunk("x", 0, 12), Chunk("y", 0, 12)]
    assert prefill_plan([scored("x", 900), scored("y", 5), scored("z", 7)]) == [
        Chunk("x", 0, 12), Chunk("y", 0, 5), Chunk("z", 0, 7)
    ]  # fmt: skip
    assert prefill_plan([scored("x", 20), scored("y", 20), PromptView("a", 5, 0)]) == [
        Chunk("x", 0, 20), Chunk("y", 0, 4), Chunk("a", 0, 5)
    ]  # fmt: skip


def test_giant_prompt_is_counted_as_what_short_ones_wait_for() -> None:
    assert tokens_ahead([], 32) == 0
    assert tokens_ahead([GIANT, PromptView("a", 40, 10), PromptView("b", 33, 0)], 32) == 32 + 30 + 32


@st.composite
def prompts(draw: st.DrawFn) -> list[PromptView]:
    """Any mixture of short and long, begun and not."""
    size = st.one_of(st.integers(1, 20), st.integers(1, 400))
    sizes = draw(st.lists(st.tuples(size, st.integers(0, 50), st.booleans()), max_size=9))
    return [PromptView(str(i), left + done, done, is_scored) for i, (left, done, is_scored) in enumerate(sizes)]


@given(prompts(), st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_some_step_is_not_full_or_too_full(
    waiting: list[PromptView], budget: int, scored_budget: int, threshold: int, block_size: int
) -> None:
    """One contiguous chunk per prompt, in order of arrival; every token of the budget that may be computed."""
    threshold = min(threshold, max(budget // 2, 1))
    step = plan_chunks(
        waiting, token_budget=budget, scored_budget=scored_budget, threshold=threshold, block_size=block_size
    )
    views = {prompt.attempt: prompt for prompt in waiting}
    num_scored = min(scored_budget, sum(prompt.num_left for prompt in waiting if prompt.is_scored))
    others = sum(prompt.num_left for prompt in waiting if not prompt.is_scored)
    assert sum(chunk.length for chunk in step) == min(budget, others + num_scored)
    assert sum(chunk.length for chunk in step if views[chunk.attempt].is_scored) <= num_scored
    assert [chunk.attempt for chunk in step] == [p.attempt for p in waiting if p.attempt in {c.attempt for c in step}]
    for chunk in step:
        assert chunk.start == views[chunk.attempt].num_computed
        assert 1 <= chunk.length <= views[chunk.attempt].num_left
    lengths = {chunk.attempt: chunk.length for chunk in step}
    if any(prompt.is_scored for prompt in waiting):
        return
    if long := [prompt for prompt in waiting if prompt.num_left > threshold]:
        assert lengths[long[0].attempt] >= threshold
    short = [prompt for prompt in waiting if prompt.num_left <= threshold]
    if short and budget > 1:
        assert lengths[short[0].attempt] == short[0].num_left
