"""Segments laid end to end for one forward: tensors of tokens, positions and pool slots, checked once.

Made by the runner per forward, read by the attention back ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitserve.engine.batch import Segment


@dataclass(frozen=True)
class PackedBatch:
    """`first_rows[i]` is the row of the first token of `segments[i]`; rows are tokens in order, without padding."""

    segments: tuple[Segment, ...]
    first_rows: tuple[int, ...]
    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens], absolute in their sequences
    slot_blocks: torch.Tensor  # int64 [tokens]: the block that each token's K and V go to,
    slot_offsets: torch.Tensor  # int64 [tokens]: and the token slot within it
    logit_rows: tuple[int, ...]  # rows of the tokens whose logits are wanted
    started_blocks: tuple[int, ...]  # blocks whose first slot this batch fills, but not their last

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def pack(segments: Sequence[Segment], block_size: int, device: torch.device) -> PackedBatch:
    """Packs checked segments; `check_segment` has passed for each."""
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    first_rows: list[int] = []
    logit_rows: list[int] = []
    started: list[int] = []
    for segment in segments:
        first_rows.append(len(token_ids))
        token_ids.extend(segment.token_ids)
        positions.extend(range(segment.start, segment.end))
        blocks.extend(segment.block_table[position // block_size] for position in range(segment.start, segment.end))
        logit_rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
        last_block_start = segment.end - segment.end % block_size
        if segment.start <= last_block_start < segment.end:
            started.append(segment.block_table[last_block_start // block_size])
    position_tensor = torch.tensor(positions, dtype=torch.int64, device=device)
    return PackedBatch(
        segments=tuple(segments),
        first_rows=tuple(first_rows),
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=position_tensor,
        slot_blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        slot_offsets=position_tensor % block_size,
        logit_rows=tuple(logit_rows),
        started_blocks=tuple(started),
    )


def check_segment(segment: Segment, *, block_size: int, num_blocks: int, vocab_size: int, max_model_len: int) -> None:
    """ValueError, with the true numbers, for a segment that no forward can compute."""
    if not segment.token_ids:
        raise ValueError("a segment needs at least one token")
    if segment.start < 0 or segment.end > max_model_len:
        raise ValueError(
            f"positions {segment.start} to {segment.end - 1} do not fit into a context of {max_model_len} tokens"
        )
    lowest, highest = min(segment.token_ids), max(segment.token_ids)
    if lowest < 0 or highest >= vocab_size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"token id {outside} is not in a vocabulary of {vocab_size}")
    if len(segment.block_table) * block_size < segment.end:
        raise ValueError(
            f"a block table of {len(segment.block_table)} blocks of {block_size} tokens does not cover {segment.end}"
        )
    if min(segment.block_table) < 0 or max(segment.block_table) >= num_blocks:
        raise ValueError(f"the block table {list(segment.block_table)} leaves a pool of {num_blocks} blocks")


def fill_up(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows`, its last one repeated until there are `count`; none at all and enough stay as they are."""
    missing = count - rows.shape[0]
    if missing <= 0 or rows.shape[0] == 0:
        return rows
    if rows.shape[0] == 1:
        return rows.expand(count, *rows.shape[1:])
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
