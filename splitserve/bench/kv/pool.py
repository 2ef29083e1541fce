"""The pools of both processes: the product's own, and their bytes as one buffer for what is no product.

The layout is flat, for blocks of any size: no transport looks into a block.
"""

import numpy as np
import torch

from kvtransfer.frames import digest
from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.service.errors import InvalidRequest
from splitserve.worker.kv import model_fingerprint

_SLOT_NBYTES = 4  # K and V of one bfloat16 number, the least that a layout is made of
_STAMP_NBYTES = 8


class BenchPool:
    """A pool whose blocks 0, 1, … lie one after the other in `data`."""

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        """Raises InvalidRequest for a size that no pool has."""
        if block_nbytes < _STAMP_NBYTES or block_nbytes % _SLOT_NBYTES:
            raise InvalidRequest(
                f"--block-bytes {block_nbytes}: a multiple of {_SLOT_NBYTES} from {_STAMP_NBYTES} on is needed",
                field="block_bytes",
            )
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=block_nbytes // _SLOT_NBYTES, block_size=1, dtype="bfloat16"
        )
        self.store = KVPool(layout, num_blocks)
        self.block_nbytes = block_nbytes
        self.fingerprint = model_fingerprint("bench kv", "", layout)
        self.array = self.store.tensor.view(num_blocks, -1).view(torch.uint8).numpy()
        self.data = self.array.reshape(-1).data

    def part(self, num_blocks: int) -> memoryview:
        """The bytes of the first blocks."""
        return self.data[: num_blocks * self.block_nbytes]

    def fill(self) -> None:
        """With random bytes."""
        self.array[:] = np.random.default_rng().integers(256, size=self.array.shape, dtype=np.uint8)

    def stamp(self, number: int, num_blocks: int) -> None:
        """Makes each of the first blocks another one than it was at any number before."""
        self.array[:num_blocks, :_STAMP_NBYTES] = np.frombuffer(number.to_bytes(_STAMP_NBYTES, "little"), np.uint8)

    def digest(self, num_blocks: int) -> bytes:
        return digest(self.part(num_blocks))
