"""The CPU's attention back end: compiled kernels over flat arrays, prepared once per forward.

Made by the loader, planned with by the runner. The back end owns threads and scratch memory. Results do not depend on
the number of threads, because every item of work is computed whole by one of them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from splitserve.engine.attention import AttentionSpec
from splitserve.engine.kernels.attention import NO_WINDOW, Item
from splitserve.engine.kernels.compiled import Kernels, Progress, load_kernels
from splitserve.engine.kernels.paging import Geometry, make_geometry
from splitserve.engine.kernels.tiles import Softmax, scratch_size
from splitserve.engine.packing import PackedBatch
from splitserve.engine.pool import DTYPES, KVPool
from splitserve.engine.torch_attention import TorchAttention

# Query rows of one item: they share each tile that is turned into float32, and their sums stay in the cache.
ROWS_PER_ITEM = 192

# Rows of a layer's kernels that one thread takes at least: below, waking another takes longer than the rows.
_ROWS_PER_THREAD = 32

_LOG2_E = float(np.log2(np.e))


class CpuAttention:
    """For pools in host memory, of both dtypes; arithmetic is float32. Uses as many threads as torch does."""

    name = "cpu"

    def __init__(self, folder: Path | None = None, progress: Progress | None = None) -> None:
        """`folder` keeps compiled kernels for the next process; None compiles for this one alone."""
        self._folder = folder
        self._progress = progress or (lambda _: None)
        self._scratch: list[np.ndarray] = []
        self.num_threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(self.num_threads - 1, "attention") if self.num_threads > 1 else None

    def prepare(self, dtype: str) -> Kernels:
        """Loads the kernels for pools of `dtype`, compiled if need be; done already, it takes no time."""
        return load_kernels(dtype, self._folder, self._progress)

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> "CpuAttentionPlan":
        layout = pool.layout
        kernels = self.prepare(layout.dtype)
        geometry = make_geometry(layout.num_layers, layout.num_kv_heads, num_heads, layout.block_size, layout.head_dim)
        return CpuAttentionPlan(self, kernels, geometry, batch, pool)

    def scratch(self, num_parts: int, size: int) -> list[np.ndarray]:
        """One float32 array of at least `size` elements for each part of a forward, kept for the next one."""
        kept = [array for array in self._scratch if array.size >= size]
        self._scratch = kept + [np.empty(size, np.float32) for _ in range(num_parts - len(kept))]
        return self._scratch[:num_parts]

    def run_rows(self, kernel: Callable[..., None], elements: np.ndarray, num_rows: int, *arguments: float) -> None:
        """Calls one of `kernels.layers` for the rows 0 to `num_rows - 1`, in as many parts as pay."""
        if self._threads is None or num_rows < 2 * _ROWS_PER_THREAD:
            kernel(elements, 0, num_rows, *arguments)
            return
        num_parts = min(self.num_threads, num_rows // _ROWS_PER_THREAD)
        ends = [num_rows * part // num_parts for part in range(num_parts + 1)]
        self.run([partial(kernel, elements, *ends[part : part + 2], *arguments) for part in range(num_parts)])

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Makes the calls, side by side if there are threads, and raises what one of them raised. The caller makes the
        first itself.

        All have ended by then, whatever happened: they write to memory by its address, which may be another's next.
        """
        if self._threads is None:
            for call in calls:
                call()
            return
        first, *others = calls
        futures: list[Future[None]] = []
        try:
            for call in others:
                futures.append(self._threads.submit(call))  # noqa: PERF401 - what was submitted before an error counts
            first()
        finally:
            wait(futures)
        for future in futures:
            future.result()


def choose_attention(
    device: str, dtype: str, kernel_folder: Path | None, progress: Progress
) -> CpuAttention | TorchAttention:
    """The fastest back end for `device`, ready to run a model of `dtype`."""
    if torch.device(device).type != "cpu":
        return TorchAttention()
    attention = CpuAttention(kernel_folder, progress)
    attention.prepare(dtype)
    return attention


class CpuAttentionPlan:
    """One forward's work, in as many parts as there are threads."""

    def __init__(
        self, backend: CpuAttention, kernels: Kernels, geometry: Geometry, batch: PackedBatch, pool: KVPool
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._sizes = np.array(geometry)
        self._dtype = DTYPES[pool.layout.dtype]
        key_width = geometry.num_kv_heads * geometry.head_dim
        query_width = key_width * geometry.heads_per_kv_head
        self._widths = geometry.head_dim, query_width, key_width, self._dtype.itemsize
        self._pool = _elements(pool.tensor.flatten())
        self._blocks, self._offsets = batch.slot_blocks.numpy(), batch.slot_offsets.numpy()
        self._tables = np.fromiter(chain.from_iterable(segment.block_table for segment in batch.segments), np.int32)
        parts = divide(make_items(batch, geometry, backend.num_threads), backend.num_threads)
        self._items = np.array([item for part in parts for item in part], np.int64)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        most_rows = max(item.num_tokens * item.num_heads for part in parts for item in part)
        scratch = backend.scratch(len(parts), scratch_size(geometry, most_rows * geometry.heads_per_kv_head))
        self._parts = list(zip([0, *ends[:-1]], ends, scratch, strict=True))
        self._merged_output: torch.Tensor | None = None

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        key, value = self._readable(key), self._readable(value)
        self._store(layer, *_rows(key), *_rows(value))

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        readable = self._readable(query)
        output = torch.empty(query.shape, dtype=self._dtype)
        self._attend(layer, spec, *_rows(readable), output.data_ptr())
        return output if output.dtype == query.dtype else output.to(query.dtype)

    def attend_merged(self, qkv: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """Stores, then attends: `qkv` is `[1, rows, width]` of the pool's dtype, contiguous, each row the heads of
        query, key and value. The result, `[1, rows, heads * head_dim]`, lasts until the next layer's; rows after the
        batch's last token are 0 there.
        """
        _, num_rows, width = qkv.shape
        head_dim, query_width, key_width, itemsize = self._widths
        if self._merged_output is None:
            self._merged_output = torch.zeros((1, num_rows, query_width), dtype=self._dtype)
        query = qkv.data_ptr()
        key = query + query_width * itemsize
        self._store(layer, key, width, head_dim, key + key_width * itemsize, width, head_dim)
        self._attend(layer, spec, query, width, head_dim, self._merged_output.data_ptr())
        return self._merged_output

    def _store(self, layer: int, *rows: int) -> None:
        self._kernels.store_tokens(self._pool, self._sizes, layer, self._blocks, self._offsets, *rows)

    def _attend(self, layer: int, spec: AttentionSpec, *rows: int) -> None:
        common = (self._tables, self._pool, self._sizes, layer, *_softmax(spec), *rows)
        attend, items = self._kernels.attend, self._items
        (first, last, scratch), *others = self._parts
        if others:
            self._backend.run([partial(attend, items, *part[:2], *common, part[2]) for part in self._parts])
        else:
            attend(items, first, last, *common, scratch)

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, head_dim]` of the pool's dtype with contiguous heads; mostly that is `tensor` itself."""
        if tensor.dtype != self._dtype:
            tensor = tensor.to(self._dtype)
        return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def make_items(batch: PackedBatch, geometry: Geometry, num_threads: int) -> list[Item]:
    """The forward's work in pieces: a decode step's token with all heads, or with one for more than one thread; else
    `ROWS_PER_ITEM` query rows of one KV head.
    """
    tokens_per_item = max(1, ROWS_PER_ITEM // geometry.heads_per_kv_head)
    items: list[Item] = []
    table = 0
    for segment, row in zip(batch.segments, batch.first_rows, strict=True):
        num_tokens = len(segment.token_ids)
        heads = geometry.num_kv_heads if num_tokens == 1 and num_threads == 1 else 1
        for first in range(0, num_tokens, tokens_per_item):
            count = min(tokens_per_item, num_tokens - first)
            items.extend(
                Item(row + first, count, segment.start + first, table, head, heads)
                for head in range(0, geometry.num_kv_heads, heads)
            )
        table += len(segment.block_table)
    return items


def divide(items: Sequence[Item], num_parts: int) -> list[list[Item]]:
    """Items in at most `num_parts` parts of about equal work, none empty: the next largest to the least loaded."""
    if num_parts == 1:
        return [list(items)]
    parts: list[list[Item]] = [[] for _ in range(min(num_parts, len(items)))]
    loads = [0] * len(parts)
    for item in sorted(items, key=_work, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(item)
        loads[least] += _work(item)
    return parts


def _work(item: Item) -> int:
    return item.num_heads * item.num_tokens * (item.first_position + item.num_tokens)


@cache
def _softmax(spec: AttentionSpec) -> Softmax:
    """Scores as exponents of two, so that a weight is a power of two of a difference."""
    window = NO_WINDOW if spec.window is None else spec.window
    if spec.softcap:
        return Softmax(np.float32(spec.scaling / spec.softcap), np.float32(spec.softcap * _LOG2_E), window)
    return Softmax(np.float32(spec.scaling * _LOG2_E), np.float32(0.0), window)


def _rows(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides, for a kernel that runs while the caller holds `tensor`."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


def _elements(flat: torch.Tensor) -> np.ndarray:
    """numpy knows no bfloat16: its bits as uint16."""
    elements: np.ndarray = (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()
    return elements
