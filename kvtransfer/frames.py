"""What travels beside a header: one block per frame, in host memory or as a tensor where its pool is.

Which of the two a link carries is its transport's choice (`Connected.has_tensors`); both ends of a link agree. Torch is
loaded only by those transports that bring tensors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import xxhash

if TYPE_CHECKING:
    import torch

Frame: TypeAlias = "memoryview | torch.Tensor"
"A tensor is uint8 `[block_nbytes]`, contiguous."


def digests(frames: Sequence[Frame]) -> list[bytes]:
    """16 bytes per frame that guard one block: xxh3-128 of host memory, `block_sum` of tensors.

    All of `frames` are of one kind.
    """
    if all(isinstance(frame, memoryview) for frame in frames):
        return [xxhash.xxh3_128_digest(cast(memoryview, frame)) for frame in frames]
    from kvtransfer.pairs.block_sum import block_sums

    return block_sums(cast("Sequence[torch.Tensor]", frames))


def digest(frame: Frame) -> bytes:
    return digests([frame])[0]


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
