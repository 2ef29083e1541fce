"""Which attempts a decode worker takes, who decodes in the next step, and who gives way when blocks run out: pure
decisions over plain data.

What runs is looked at sample by sample: one that gives way ends alone, and its siblings go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.service.reasons import Reason
from splitserve.worker.admission import Refusal, Room, decode_blocks, lacks_blocks, never_fits

# Of prompts that are computed here, in every step: the oldest long one is sure of one, a short one has the other.
_LEAST_BLOCKS_OF_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A running sequence: the step computes its last token, whose KV needs a slot in its block table. `num_freed`
    blocks become available if it ends after all younger ones."""

    key: str
    num_tokens: int
    num_blocks: int
    num_freed: int = 0


@dataclass(frozen=True, slots=True)
class ReservationView:
    """An attempt whose blocks are still arriving. They come back some time after it has been revoked."""

    attempt: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LocalView:
    """An attempt whose prompt is being computed here. `num_freed` blocks become available if it ends after all younger
    ones of its kind."""

    attempt: str
    num_freed: int = 0


@dataclass(slots=True)
class StepPlan:
    """`run` names the sequences that decode, after those in `grow` got one block each; those in `preempt`, and
    the attempts in `revoke`, end, in this order."""

    run: list[str] = field(default_factory=list)
    grow: list[str] = field(default_factory=list)
    preempt: list[str] = field(default_factory=list)
    revoke: list[str] = field(default_factory=list)


def admit(num_tokens: int, num_samples: int, room: Room, *, num_seqs: int, max_num_seqs: int) -> Refusal | None:
    """Why an attempt does not begin here, if so: it needs blocks for its tokens so far and for the first token that
    each of its samples decodes, and a place in the batch for each of them.

    `num_seqs` run or are reserved. What comes after the first decoded token is taken as it is needed (`plan_step`).
    """
    num_blocks = decode_blocks(num_tokens, num_samples, room.block_size)
    if refusal := never_fits(num_tokens, num_blocks, room):
        return refusal
    if num_samples > max_num_seqs:
        return Refusal(Reason.TOO_LARGE, f"{num_samples} samples, and at most {max_num_seqs} run at once")
    if num_seqs + num_samples > max_num_seqs:
        return Refusal(Reason.NO_ROOM, f"{num_seqs} sequences run or are reserved already")
    return lacks_blocks(num_blocks, room)


def num_growing(running: Sequence[SequenceView], block_size: int) -> int:
    """Blocks that the next step needs: one for each sequence whose table is full."""
    return sum(_needs_block(sequence, block_size) for sequence in running)


def plan_step(
    running: Sequence[SequenceView],
    incomplete: Sequence[ReservationView],
    local: Sequence[LocalView] = (),
    *,
    returning: int,
    available: int,
    block_size: int,
) -> StepPlan:
    """Plans one step over `running` with `available` blocks; `returning` ones belong to reservations revoked before.

    All are in order of arrival. Out of blocks, the youngest prompts that are computed here go first, because theirs are
    back at once, then the youngest incomplete reservations, and only what they cannot bring is taken from the youngest
    sequences, of samples that began together from the last.
    Sequences whose block is still on its way back sit the step out, the youngest first. The oldest never gives way: it
    alone always fits, because its length is bounded.
    """
    plan = StepPlan()
    missing = num_growing(running, block_size) - available - returning
    for prompt in reversed(local):
        if missing <= 0:
            break
        plan.revoke.append(prompt.attempt)
        available += prompt.num_freed
        missing -= prompt.num_freed
    for reservation in reversed(incomplete):
        if missing <= 0:
            break
        plan.revoke.append(reservation.attempt)
        missing -= reservation.num_blocks
    staying = list(running)
    while missing > 0 and len(staying) > 1:
        victim = staying.pop()
        plan.preempt.append(victim.key)
        available += victim.num_freed
        missing -= victim.num_freed + num_growing([victim], block_size)
    is_oldest_stuck = missing > 0 and not (plan.revoke or plan.preempt or returning)
    assert not is_oldest_stuck, "the oldest sequence alone always fits: its length is bounded"
    for sequence in staying:
        if not _needs_block(sequence, block_size):
            plan.run.append(sequence.key)
        elif available > 0:
            available -= 1
            plan.grow.append(sequence.key)
            plan.run.append(sequence.key)
    return plan


def prompt_budget(num_decoding: int, *, max_num_batched_tokens: int, block_size: int) -> int:
    """How many tokens of prompts the next step computes at most: what the decoding sequences leave of it, and however
    little that is, two blocks or half of the step, whichever is less.

    So a step may be that much too large. Else a prompt of thousands of tokens would take as many steps, and the short
    ones behind it would wait for all of them.
    """
    least = min(_LEAST_BLOCKS_OF_PROMPTS * block_size, max(max_num_batched_tokens // 2, 1))
    return max(max_num_batched_tokens - num_decoding, least)


def _needs_block(sequence: SequenceView, block_size: int) -> bool:
    return sequence.num_tokens > sequence.num_blocks * block_size
