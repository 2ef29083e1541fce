"""The pool as a transfer sees it: whole blocks by id. The engine's KVPool satisfies it; tests bring a bytearray."""

from typing import Protocol


class BlockStore(Protocol):
    @property
    def block_nbytes(self) -> int: ...

    def view(self, block_id: int) -> memoryview:
        """The bytes of one block, without a copy. Raises ValueError for an unknown id."""
        ...

    def write(self, block_id: int, data: memoryview) -> None:
        """Copies `data` (block_nbytes bytes) into the block. Raises ValueError for an unknown id or a wrong size."""
        ...
