"""The sequences that decode, and the blocks that they hold.

Called by the flow, on the engine thread. What a step does with them is the scheduler's decision.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from decode_worker.scheduler import SequenceView, StepPlan
from decode_worker.state import Sequence
from splitserve.engine.allocator import BlockAllocator
from splitserve.worker import messages


class Running:
    """Owns the running sequences, the oldest first, and gives and takes their blocks."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._by_key: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_key.values())

    def __getitem__(self, key: str) -> Sequence:
        return self._by_key[key]

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._by_key

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._by_key.update({sequence.key: sequence for sequence in sequences})

    def drop(self, sequence: Sequence) -> None:
        """It runs no more, and lets its blocks go."""
        del self._by_key[sequence.key]
        self._allocator.release(sequence.blocks)

    def take_tokens(self, drawn: Iterable[tuple[Sequence, messages.Token]]) -> dict[int, list[messages.Token]]:
        """Appends each token to its sequence, and the finished leave; by session, what its router is to hear."""
        by_session: dict[int, list[messages.Token]] = defaultdict(list)
        for sequence, token in drawn:
            sequence.token_ids.append(token.token_id)
            by_session[sequence.session].append(msgspec.structs.replace(token, attempt=sequence.attempt))
            if token.finish_reason:
                self.drop(sequence)
        return by_session

    def of_attempt(self, attempt: str) -> list[Sequence]:
        return [sequence for sequence in self if sequence.attempt == attempt]

    def attempts_of(self, session: int) -> set[str]:
        return {sequence.attempt for sequence in self if sequence.session == session}

    def views(self) -> list[SequenceView]:
        """As the scheduler sees them; what the end of each would free is not looked up."""
        return [SequenceView(s.key, len(s.token_ids), len(s.blocks)) for s in self]

    def batch(self, plan: StepPlan) -> list[Sequence]:
        """The sequences to compute, each with the block that the plan gives it; those that end have ended before."""
        for key in plan.grow:
            block = self._allocator.allocate(1)
            assert block is not None, "the plan grows only into available blocks"
            self._by_key[key].blocks += block
        return [self._by_key[key] for key in plan.run]
