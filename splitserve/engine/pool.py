"""The KV pool: one process's block-major K/V memory.

Owned by the engine process, which alone writes to it: the runner through `store`, the KV thread through `write`, or
through `staging` where the pool is in device memory. Which block belongs to whom is the allocator's knowledge, not the
pool's.
"""

import mmap
from collections.abc import Iterable, Sequence

import torch

from splitserve.engine.layout import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class KVPool:
    """`tensor` is `[num_blocks, layers, 2, kv_heads, block_size * head_dim]`; fresh memory is zero.

    `keys` and `values` are views of it: `[num_blocks, layers, kv_heads, head_dim, block_size]`, and the last two the
    other way round.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_nbytes = layout.block_nbytes
        shape = (num_blocks, *layout.block_shape)
        dtype = DTYPES[layout.dtype]
        if torch.device(device).type == "cpu":
            # Anonymous pages are zero and cost nothing until touched: a large pool neither slows the start nor takes
            # memory that no request has used yet.
            memory = mmap.mmap(-1, num_blocks * layout.block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._bytes: memoryview | None = memoryview(memory)
            self.tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            self._bytes = None
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = self.tensor[:, :, 0].view(*shape[:2], shape[3], layout.head_dim, layout.block_size)
        self.values = self.tensor[:, :, 1].view(*shape[:2], shape[3], layout.block_size, layout.head_dim)

    def view(self, block_id: int) -> memoryview:
        """The block's bytes, writable, without a copy. ValueError for an unknown block or a pool not in host memory."""
        self._require_block(block_id)
        if self._bytes is None:
            raise ValueError(f"a pool on {self.tensor.device} has no view in host memory")
        return self._bytes[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def tensor_view(self, block_id: int) -> torch.Tensor:
        """The block's bytes as uint8 `[block_nbytes]`, without a copy. ValueError for an unknown block."""
        self._require_block(block_id)
        return self.tensor[block_id].view(-1).view(torch.uint8)

    def write(self, block_id: int, data: bytes | bytearray | memoryview | torch.Tensor) -> None:
        """Copies one whole block into the pool; a tensor is uint8 in host memory.

        ValueError and no change as for `view`, and for a wrong size.
        """
        target = self.view(block_id)
        source = data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data).cast("B")
        if source.nbytes != self.block_nbytes:
            raise ValueError(f"a block has {self.block_nbytes} bytes, not {source.nbytes}")
        target[:] = source

    def lend(self, block_ids: Iterable[int]) -> None:
        """Nothing to wait for: what the engine thread has written to host memory is there for the KV thread."""

    def copy_block(self, source: int, target: int) -> None:
        """On the engine thread: `target` becomes a copy of `source`."""
        self._require_block(source)
        self._require_block(target)
        self.tensor[target].copy_(self.tensor[source])

    def clear(self, block_ids: Sequence[int]) -> None:
        """Sets whole blocks to zero."""
        for block_id in block_ids:
            self._require_block(block_id)
            self.tensor[block_id].zero_()

    def store(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes one layer's K and V of new tokens, on any device.

        `blocks` and `offsets` are int64 `[tokens]`, `key` and `value` are `[tokens, kv_heads, head_dim]`.
        """
        self.keys[:, layer][blocks, :, :, offsets] = key.to(self.tensor.dtype)
        self.values[:, layer][blocks, :, offsets] = value.to(self.tensor.dtype)

    def _require_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in a pool of {self.num_blocks} blocks")
