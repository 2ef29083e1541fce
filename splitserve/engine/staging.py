"""A pool in device memory as the KV thread reads and writes it: block by block, through host memory.

Two threads meet here. The engine thread `lend`s blocks before it gives them to the KV thread, which marks the point
that the device has to reach first: behind the forward that computed them, or behind the last one that read them. The KV
thread alone copies, on a stream of its own, and waits for each copy: so a block that it has read holds what that
forward wrote, and one that it has written is there before anybody hears of it. (It waits as long as that forward runs.)
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from splitserve.engine.pool import KVPool


class CopyLane(Protocol):
    """Copies beside the engine's own work on the device."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` in host memory, fit for copies from and to the device."""
        ...

    def mark(self) -> object:
        """On the engine thread: the point behind everything that it has asked of the device so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> None:
        """Copies once the device has reached the mark `after`; on return the bytes are there."""
        ...

    def reach(self, mark: object) -> None:
        """Returns once the device has reached the mark."""
        ...


class CudaLane:
    """A CUDA stream of its own, and events on the engine's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> object:
        # Blocking: who waits for it lets the core go, and the interpreter.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> None:
        assert isinstance(after, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def reach(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()


class StagedStore:
    """The blocks of `pool` for a KV agent; kvtransfer's `BlockStore`."""

    def __init__(self, pool: KVPool, lane: CopyLane) -> None:
        self.block_nbytes = pool.block_nbytes
        self._num_blocks = pool.num_blocks
        self._blocks = pool.tensor.view(pool.num_blocks, -1).view(torch.uint8)  # [blocks, block_nbytes]
        self._lane = lane
        self._incoming = lane.host_buffer(pool.block_nbytes)
        self._marks: dict[int, object] = {}

    def lend(self, block_ids: Iterable[int]) -> None:
        """On the engine thread, before the KV thread is told of these blocks."""
        mark = self._lane.mark()
        for block_id in block_ids:
            self._marks[block_id] = mark

    def view(self, block_id: int) -> memoryview:
        """A copy of the block in host memory, which lives as long as anybody holds the view.

        ValueError for a block that does not exist or was never lent.
        """
        mark = self._mark_of(block_id)
        staged = self._lane.host_buffer(self.block_nbytes)
        self._lane.copy(staged, self._blocks[block_id], mark)
        return staged.numpy().data

    def tensor_view(self, block_id: int) -> torch.Tensor:
        """The block itself, uint8 `[block_nbytes]` on the device. ValueError as for `view`.

        Unlike a view in host memory it is the pool's: to be read only while the block is lent.
        """
        self._lane.reach(self._mark_of(block_id))
        return self._blocks[block_id]

    def write(self, block_id: int, data: bytes | bytearray | memoryview | torch.Tensor) -> None:
        """Copies one whole block into the pool; a tensor is uint8, wherever it is.

        ValueError and no change as for `view`, and for a wrong size.
        """
        mark = self._mark_of(block_id)
        source = data if isinstance(data, torch.Tensor) else memoryview(data).cast("B")
        if source.nbytes != self.block_nbytes:
            raise ValueError(f"a block has {self.block_nbytes} bytes, not {source.nbytes}")
        if isinstance(source, memoryview):
            self._incoming.numpy().data[:] = source
            source = self._incoming
        self._lane.copy(self._blocks[block_id], source, mark)

    def _mark_of(self, block_id: int) -> object:
        if not 0 <= block_id < self._num_blocks:
            raise ValueError(f"block {block_id} is not in a pool of {self._num_blocks} blocks")
        if block_id not in self._marks:
            raise ValueError(f"block {block_id} was never lent to the KV thread")
        return self._marks[block_id]
