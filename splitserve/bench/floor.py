"""What a forward cannot be faster than on this machine, measured piece by piece.

A decode step reads every weight and the KV cache once: linear layers with prepacked weights, plus KV bytes at the read
bandwidth. A prefill computes linear layers and attention: the former as they are, the latter's useful operations at the
rate of a batched matmul. Independent of the engine's own back ends. Used by the engine's benchmark, which owns nothing
else on the machine meanwhile; what a worker knows of its own floors is `splitserve.engine.floor`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from splitserve.engine.linear import SIBLINGS
from splitserve.engine.shape import LinearShape, ModelShape
from splitserve.engine.stopwatch import Task

# Query rows x context of one attention tile. The best of these is what a tiled attention could reach; a GPU needs more
# work at once than a processor's caches hold.
_TILES = {"cpu": ((64, 256), (256, 512), (512, 1024)), "cuda": ((512, 1024), (2048, 2048), (4096, 4096))}


def merge_siblings(shapes: Sequence[LinearShape]) -> tuple[LinearShape, ...]:
    """As if layers of one module that read the same rows were one: for some shapes the faster way."""
    merged: dict[tuple[str, ...], LinearShape] = {}
    for shape in shapes:
        parent, _, name = shape.name.rpartition(".")
        group = next((names for names in SIBLINGS if name in names), (name,))
        key = (parent, *group, str(shape.in_features))
        before = merged.get(key)
        out_features = shape.out_features + (before.out_features if before else 0)
        merged[key] = replace(shape, out_features=out_features)
    return tuple(merged.values())


class LinearLayers:
    """A model's linear layers one after the other, each with weights of its own, and nothing between them."""

    def __init__(self, shapes: Sequence[LinearShape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        largest = max(shape.out_features * shape.in_features for shape in shapes)
        # Which numbers they are changes no time; that each layer has its own memory does.
        values = torch.randn(largest, dtype=torch.float32).mul_(0.02).to(device=device, dtype=dtype)
        self._weights = [
            values[: s.out_features * s.in_features].clone().view(s.out_features, s.in_features) for s in shapes
        ]
        self._biases = [torch.zeros(s.out_features, dtype=dtype, device=device) if s.has_bias else None for s in shapes]

    def task(self, calls: Sequence[tuple[int, int]]) -> Task:
        """Runs all layers once per (rows, rows of logits) in `calls`; a head of no rows is left out."""
        by_call = {call: self._run_for(*call) for call in set(calls)}  # packed once for each number of rows
        runs = [by_call[call] for call in calls]

        @torch.inference_mode()
        def run() -> None:
            for layers in runs:
                for layer in layers:
                    layer()

        return run

    def _run_for(self, rows: int, head_rows: int) -> list[Callable[[], torch.Tensor]]:
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        layers = []
        for shape, weight, bias in zip(self._shapes, self._weights, self._biases, strict=True):
            count = head_rows if shape.is_head else rows
            if not count:
                continue
            key = (count, shape.in_features)
            if key not in inputs:
                inputs[key] = torch.randn(key, dtype=torch.float32).to(device=self._device, dtype=self._dtype)
            layers.append(_layer(inputs[key], weight, bias))
        return layers


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """On the CPU with the weight packed by oneDNN for as many rows as `x` has; elsewhere the device's own matmul."""
    if x.device.type != "cpu":
        return lambda: functional.linear(x, weight, bias)
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, x.shape[0])
    compute = ops._linear_pointwise.default
    return lambda: compute(x, packed, bias, "none", [], "")


@dataclass(frozen=True)
class MatmulTile:
    """Q·K and weights·V of all heads for one tile, as two batched matmuls."""

    name: str
    flops: int
    run: Task


class MatmulRate:
    """The tiles whose best rate is taken for attention's: several shapes, the model's dtype and float32."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.tiles = tuple(self._make(shape, dtype, device))

    @staticmethod
    def _make(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Iterator[MatmulTile]:
        heads, head_dim = shape.num_heads, shape.head_dim
        for tile_dtype in dict.fromkeys((dtype, torch.float32)):

            def random(*size: int, dtype: torch.dtype = tile_dtype) -> torch.Tensor:
                return torch.randn(heads, *size, device=device).to(dtype)

            for rows, context in _TILES[device.type]:
                query, key, value = random(rows, head_dim), random(head_dim, context), random(context, head_dim)
                weights = random(rows, context)
                name = f"{str(tile_dtype).removeprefix('torch.')} {rows}x{context}"
                flops = 4 * heads * head_dim * rows * context
                yield MatmulTile(name, flops, _two_matmuls(query, key, weights, value))

    def tasks(self) -> dict[str, Task]:
        return {tile.name: tile.run for tile in self.tiles}

    def best(self, least_ms: Mapping[str, float]) -> tuple[str, float]:
        """The fastest tile's name and its operations per millisecond, from the least time of each."""
        rates = {tile.name: tile.flops / least_ms[tile.name] for tile in self.tiles}
        return max(rates.items(), key=lambda item: item[1])


def _two_matmuls(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> Task:
    def run() -> None:
        torch.matmul(query, key)
        torch.matmul(weights, value)

    return run
