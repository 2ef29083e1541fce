"""What travels beside a header: one block per frame, in host memory or as a tensor where its pool is.

Which of the two a link carries is its transport's choice (`Connected.has_tensors`); both ends of a link agree.
"""

import functools
from collections.abc import Sequence

import torch
import xxhash

Frame = memoryview | torch.Tensor
"A tensor is uint8 `[block_nbytes]`, contiguous."

_WORD_NBYTES = 8


def digest(frame: Frame) -> bytes:
    """16 bytes that guard one block: xxh3-128 of host memory; of a tensor a sum, computed where the tensor is, so that
    nothing else leaves a GPU.

    The 64-bit words are added up modulo 2^64, each times an odd number that is its place's own: one changed word always
    shows, and so do two that changed places unless their difference is a multiple of a large power of two.
    """
    if isinstance(frame, memoryview):
        return xxhash.xxh3_128_digest(frame)
    rest = -frame.numel() % _WORD_NBYTES
    words = (torch.nn.functional.pad(frame, (0, rest)) if rest else frame).view(torch.int64)
    total = int((words * _weights(words.numel(), words.device)).sum())
    return total.to_bytes(8, "little", signed=True) + frame.nbytes.to_bytes(8, "little")


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device=device) * 2 + 1


def num_bytes(frames: Sequence[Frame]) -> int:
    return sum(frame.nbytes for frame in frames)


def in_host_memory(frames: Sequence[Frame]) -> list[memoryview]:
    """For a link that carries no tensors. ValueError where one is to go over it all the same."""
    found = [frame for frame in frames if isinstance(frame, memoryview)]
    if len(found) < len(frames):
        raise ValueError("a tensor for a link that carries host memory")
    return found


def copy_of(frame: Frame) -> Frame:
    return memoryview(bytes(frame)) if isinstance(frame, memoryview) else frame.clone()
