"""How fast this machine reads memory and multiplies, as far as a worker can find out in the moment of its start.

Called by the worker once the model is loaded, with the threads that compute its steps; the benchmark measures the
bandwidth the same way, for longer. Owns nothing.
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from splitserve.engine.floor import Rates
from splitserve.engine.linear import PackedLinear
from splitserve.engine.stopwatch import Stopwatch, Task

READ_BYTES = 512 << 20  # well above any cache that one model's forward could stay in
_READ_COLUMNS = 1024
_READ_ROUNDS = 2

# Square matmuls of twice the size until one takes so long: then it is no call's overhead that is measured.
_MATMUL_MS = 1.0
_SMALLEST_MATMUL, _LARGEST_MATMUL = 256, 8192
_MATMUL_ROUNDS = 4  # the first one sets up the library's kernel


class ReadBandwidth:
    """Reads memory once, in two ways: what the machine gives is the faster one's bandwidth."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        """`pieces` are flat and float32; of each, the whole rows of 4 KiB are read."""
        rows = (piece[: piece.numel() // _READ_COLUMNS * _READ_COLUMNS].view(-1, _READ_COLUMNS) for piece in pieces)
        self._pieces = [piece for piece in rows if len(piece)]
        self._ones = torch.ones(_READ_COLUMNS, device=self._pieces[0].device)
        self.num_bytes = sum(piece.nbytes for piece in self._pieces)

    @classmethod
    def of_new_buffer(cls, num_bytes: int, device: torch.device) -> "ReadBandwidth":
        return cls([torch.ones(num_bytes // 4, dtype=torch.float32, device=device)])

    def tasks(self) -> dict[str, Task]:
        return {"read as rows": self._read_rows, "read as halves": self._read_halves}

    def _read_rows(self) -> None:
        for piece in self._pieces:
            torch.mv(piece, self._ones)

    def _read_halves(self) -> None:
        for piece in self._pieces:
            half = piece.numel() // 2
            torch.dot(piece.view(-1)[:half], piece.view(-1)[half:])


def measure_rates(
    layers: Sequence[nn.Module], dtype: torch.dtype, device: torch.device, watch: Stopwatch | None = None
) -> Rates:
    """`layers` are the model's linear layers as its back end has prepared them, `dtype` that of the model.

    On a processor the bandwidth is that of the weights themselves, read where they lie, up to half a GiB of them. That
    is what a decode step reads: however large the caches are, and whoever shares them, they help both alike, so a
    small model's rate is that of a cache, and rightly so. Besides, new memory takes ten times as long to get as to
    read. A GPU, whose caches are small and which is slow with small pieces, reads a new buffer.

    The rate of multiplying is that of large square matmuls, in `dtype` or in float32, whichever is faster here: numbers
    of either can be multiplied so. Each figure is the best of a few, taken while others may be at work. One thread is
    timed by the processor's own account, which leaves them out; of several threads, or of a GPU, a start beside another
    worker's may find less than the machine has.
    """
    watch = watch or Stopwatch(device, is_cpu_time=device.type == "cpu" and torch.get_num_threads() == 1)
    reads = _weights_in_place(layers) if device.type == "cpu" else _new_buffer(device)
    read_ms = min(_least_ms(task, watch, _READ_ROUNDS) for task in reads.tasks().values())
    num_read = reads.num_bytes
    del reads  # before the matmuls need memory
    flops_per_ms = max(_flops_per_ms(each, device, watch, num_read) for each in {dtype, torch.float32})
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Rates(num_read / read_ms * 1e3, flops_per_ms * 1e3)


def _weights_in_place(layers: Sequence[nn.Module]) -> ReadBandwidth:
    pieces, num_bytes = [], 0
    for layer in layers:
        if num_bytes < READ_BYTES:
            pieces.append(_memory_of(layer))
            num_bytes += pieces[-1].nbytes
    return ReadBandwidth(pieces)


def _memory_of(layer: nn.Module) -> torch.Tensor:
    """The memory of a linear layer's weight, for as long as the layer lives: numbers of no meaning."""
    if isinstance(layer, PackedLinear):
        address, num_bytes = layer.packed_address, layer.packed_nbytes
    else:
        assert isinstance(layer, nn.Linear)
        address, num_bytes = layer.weight.data_ptr(), layer.weight.nbytes
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32, count=num_bytes // 4)


def _new_buffer(device: torch.device) -> ReadBandwidth:
    """Half of what is free where that is little: what serves later must not fail for want of a measurement."""
    num_free, _ = torch.cuda.mem_get_info(device)
    return ReadBandwidth.of_new_buffer(min(READ_BYTES, num_free // 2), device)


def _flops_per_ms(dtype: torch.dtype, device: torch.device, watch: Stopwatch, max_nbytes: int) -> float:
    """The best of all sizes tried; a matmul takes no more than `max_nbytes` of memory, except the smallest."""
    best, size = 0.0, _SMALLEST_MATMUL
    while True:
        # Every number another one, made faster than random ones are.
        matrix = (torch.randn((size, 1), device=device) + torch.randn(size, device=device)).to(dtype)
        ms = _least_ms(partial(functional.linear, matrix, matrix), watch, _MATMUL_ROUNDS)
        best = max(best, 2 * size**3 / ms)
        size *= 2
        if ms >= _MATMUL_MS or size > _LARGEST_MATMUL or 2 * size**2 * dtype.itemsize > max_nbytes:
            return best


@torch.inference_mode()
def _least_ms(task: Task, watch: Stopwatch, rounds: int) -> float:
    return min(watch.milliseconds(task) for _ in range(rounds))
