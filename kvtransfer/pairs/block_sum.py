"""The checksum of blocks that are tensors: computed where they are, so that only 8 bytes of each leave a GPU.

The 64-bit words of a block are added up modulo 2^64, each times an odd number that is its place's own: one changed word
always shows, and so do two that changed places unless their difference is a multiple of a large power of two.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch

_WORD_NBYTES = 8


def block_sums(blocks: Sequence[torch.Tensor]) -> list[bytes]:
    """16 bytes for each of `blocks`, uint8 `[block_nbytes]` on one device: the sum, and the length.

    Whatever wrote the blocks has to be done.
    """
    device = blocks[0].device
    if device.type == "cpu":
        # Not torch: it would start threads for this, beside those of the forward.
        totals = [int(np.dot(word.numpy(), _host_weights(word.numel()))) for word in map(_words, blocks)]
    else:
        # In a stream of their own, beside the forward, and with one wait for all of a message.
        with torch.cuda.stream(_side_stream(device)):
            words = [_words(block) for block in blocks]
            totals = torch.stack([(word * _weights(word.numel(), device)).sum() for word in words]).tolist()
    return [
        total.to_bytes(_WORD_NBYTES, "little", signed=True) + block.nbytes.to_bytes(_WORD_NBYTES, "little")
        for total, block in zip(totals, blocks, strict=True)
    ]


def _words(block: torch.Tensor) -> torch.Tensor:
    rest = -block.numel() % _WORD_NBYTES
    return (torch.nn.functional.pad(block, (0, rest)) if rest else block).view(torch.int64)


@functools.lru_cache(maxsize=8)
def _host_weights(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(1, 2 * count, 2, dtype=np.int64)


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_host_weights(count)).to(device)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
