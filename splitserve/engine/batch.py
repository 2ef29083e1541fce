"""What one forward computes, as plain data: built by a scheduler, read by the runner."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence: a prompt, a chunk of one, or the one new token of a decode step.

    `start` is the absolute position of `token_ids[0]`; K and V of the positions before it are in the pool already.
    `block_table[i]` is the block of positions `i * block_size` to `(i + 1) * block_size - 1`; it covers at least
    `end` tokens. With `wants_logits` the forward returns the logits after the last token, with `wants_all_logits`
    those after every one.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool
    wants_all_logits: bool = False

    @property
    def num_logits(self) -> int:
        """Rows of logits that the forward returns for it: those after its last tokens."""
        return len(self.token_ids) if self.wants_all_logits else int(self.wants_logits)

    @property
    def end(self) -> int:
        """Position after the last token: the sequence's length once this segment is computed."""
        return self.start + len(self.token_ids)
