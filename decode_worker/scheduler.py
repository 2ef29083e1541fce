"""Who decodes in the next step, and who gives way when blocks run out: pure decisions over plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A running sequence: the step computes its last token, whose KV needs a slot in its block table."""

    key: str
    num_tokens: int
    num_blocks: int
    num_unshared: int
    "Blocks that its end gives back, once all younger sequences have ended."


@dataclass(slots=True)
class StepPlan:
    """`run` decodes, after `grow` got one block each; `preempt` loses its blocks and its attempt; `revoke` is a
    reservation to take back, whose blocks come free later."""

    run: list[str] = field(default_factory=list)
    grow: list[str] = field(default_factory=list)
    preempt: list[str] = field(default_factory=list)
    revoke: str | None = None


def plan_step(
    running: Sequence[SequenceView], incomplete: Sequence[str], *, revoking: bool, available: int, block_size: int
) -> StepPlan:
    """Plans one step over `running` (oldest first) with `available` blocks.

    `incomplete` names the reservations, oldest first, whose blocks are still arriving; `revoking` says that one of them
    is already being taken back. Out of blocks, the youngest incomplete reservation goes first, then the youngest
    sequence, never the oldest.
    """
    plan = StepPlan()
    waiting = list(running)
    while waiting:
        sequence = waiting.pop(0)
        if sequence.num_blocks * block_size >= sequence.num_tokens:
            plan.run.append(sequence.key)
        elif available > 0:
            available -= 1
            plan.grow.append(sequence.key)
            plan.run.append(sequence.key)
        elif revoking or plan.revoke or incomplete:
            # Blocks are on their way: this sequence sits out one step.
            plan.revoke = plan.revoke or (None if revoking else incomplete[-1])
        elif waiting:
            victim = waiting.pop()
            plan.preempt.append(victim.key)
            available += victim.num_unshared
            waiting.insert(0, sequence)
        else:
            assert sequence.key != running[0].key, "the oldest sequence alone always fits: its length is bounded"
            plan.preempt.append(sequence.key)
    return plan
