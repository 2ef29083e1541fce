"""The pools of both processes: the product's own, and their bytes as rows for what is no product.

The layout is flat, for blocks of any size: no transport looks into a block.
"""

import numpy as np
import torch

from kvtransfer.frames import digest
from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.service.errors import InvalidRequest
from splitserve.worker.engine_setup import block_store
from splitserve.worker.kv import model_fingerprint

CPU = torch.device("cpu")
_SLOT_NBYTES = 4  # K and V of one bfloat16 number, the least that a layout is made of
_STAMP_NBYTES = 8


class BenchPool:
    """`rows` is uint8 `[num_blocks, block_nbytes]` on `device`: the blocks 0, 1, … one after the other."""

    def __init__(self, num_blocks: int, block_nbytes: int, device: torch.device = CPU) -> None:
        """Raises InvalidRequest for a size that no pool has."""
        if block_nbytes < _STAMP_NBYTES or block_nbytes % _SLOT_NBYTES:
            raise InvalidRequest(
                f"--block-bytes {block_nbytes}: a multiple of {_SLOT_NBYTES} from {_STAMP_NBYTES} on is needed",
                field="block_bytes",
            )
        layout = KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=block_nbytes // _SLOT_NBYTES, block_size=1, dtype="bfloat16"
        )
        pool = KVPool(layout, num_blocks, str(device))
        self.store = block_store(pool)
        self.rows = pool.tensor.view(num_blocks, -1).view(torch.uint8)
        self.device = device
        self.num_blocks, self.block_nbytes = num_blocks, block_nbytes
        self.fingerprint = model_fingerprint("bench kv", "", layout)

    def fill(self) -> None:
        """With random bytes."""
        values = np.random.default_rng().integers(256, size=tuple(self.rows.shape), dtype=np.uint8)
        self.rows.copy_(torch.from_numpy(values))

    def stamp(self, number: int, num_blocks: int) -> None:
        """Makes each of the first blocks another one than it was at any number before."""
        value = torch.frombuffer(bytearray(number.to_bytes(_STAMP_NBYTES, "little")), dtype=torch.uint8)
        self.rows[:num_blocks, :_STAMP_NBYTES] = value.to(self.device)

    def digest(self, num_blocks: int) -> bytes:
        return digest(self.rows[:num_blocks].cpu().numpy().reshape(-1).data)


class HostPool(BenchPool):
    """One in host memory, whose bytes are one buffer."""

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        super().__init__(num_blocks, block_nbytes)
        self.data = self.rows.numpy().reshape(-1).data

    def part(self, num_blocks: int) -> memoryview:
        """The bytes of the first blocks."""
        return self.data[: num_blocks * self.block_nbytes]
