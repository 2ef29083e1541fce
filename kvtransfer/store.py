"""The pool as a transfer sees it: whole blocks by id.

The engine's KVPool satisfies it in host memory, its StagedStore in a device's; tests bring a bytearray.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvtransfer.frames import Frame

if TYPE_CHECKING:
    import torch


class BlockStore(Protocol):
    @property
    def block_nbytes(self) -> int: ...

    def lend(self, block_ids: Iterable[int]) -> None:
        """Called by the thread that gives these blocks to the KV thread, before it does; the others are the KV
        thread's."""
        ...

    def view(self, block_id: int) -> memoryview:
        """The bytes of one block, as they stay while it is lent. Raises ValueError for an unknown id."""
        ...

    def tensor_view(self, block_id: int) -> "torch.Tensor":
        """The same as uint8 `[block_nbytes]` on the pool's device, for a link that carries tensors."""
        ...

    def write(self, block_id: int, data: Frame) -> None:
        """Copies `data` (block_nbytes bytes) into the block. Raises ValueError for an unknown id or a wrong size."""
        ...
