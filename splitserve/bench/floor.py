"""What a forward cannot be faster than on this machine, measured piece by piece.

A decode step reads every weight and the KV cache once: linear layers with prepacked weights, plus KV bytes at the read
bandwidth. A prefill computes linear layers and attention: the former as they are, the latter's useful operations at the
rate of a batched matmul. Independent of the engine's own back ends. Used by the engine's benchmark, which owns nothing
else on the machine meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from splitserve.bench.timing import Task
from splitserve.bench.workload import Case
from splitserve.engine.layout import KVLayout
from splitserve.engine.linear import SIBLINGS
from splitserve.engine.transformers_api import AutoConfig, AutoModelForCausalLM

READ_BUFFER_BYTES = 512 << 20  # well above any cache that one model's forward could stay in
_READ_COLUMNS = 1024

# Query rows x context of one attention tile. The best of these is what a tiled attention could reach; a GPU needs more
# work at once than a processor's caches hold.
_TILES = {"cpu": ((64, 256), (256, 512), (512, 1024)), "cuda": ((512, 1024), (2048, 2048), (4096, 4096))}


@dataclass(frozen=True)
class LinearShape:
    name: str  # of the module within the model
    out_features: int
    in_features: int
    has_bias: bool
    is_head: bool  # computes logits: only for the rows that are sampled from


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its floors."""

    linears: tuple[LinearShape, ...]
    windows: tuple[int | None, ...]  # per layer: how many tokens it looks at, None for all
    num_heads: int
    head_dim: int
    layer_token_nbytes: int  # K and V of one token in one layer

    def kv_nbytes(self, context: int) -> int:
        """Bytes of K and V that one new token's attention reads in a sequence of `context` tokens, itself included."""
        return sum(min(context, window or context) for window in self.windows) * self.layer_token_nbytes

    def attention_flops(self, num_tokens: int) -> int:
        """Useful operations of a causal prefill: two for each multiplication of Q·K and of weights·V."""
        pairs = sum(_num_pairs(num_tokens, window) for window in self.windows)
        return 4 * self.head_dim * self.num_heads * pairs

    def linear_flops(self, num_tokens: int, num_logit_rows: int) -> int:
        """Two operations for each weight and row; the head computes `num_logit_rows` rows."""
        rows = {False: num_tokens, True: num_logit_rows}
        return sum(2 * rows[s.is_head] * s.out_features * s.in_features for s in self.linears)

    def flops(self, case: Case) -> int:
        """Useful operations of a case's step: those of its linear layers and of its attention."""
        if case.kind == "prefill":
            return self.linear_flops(case.context, 1) + self.attention_flops(case.context)
        one_token = self.attention_flops(case.context) - self.attention_flops(case.context - 1)
        return self.linear_flops(case.batch, case.batch) + case.batch * one_token

    def guess_ms(self, case: Case, bytes_per_ms: float, flops_per_ms: float) -> float:
        """A case's floor before it is measured, from the machine's rates alone."""
        if case.kind == "prefill":
            return self.flops(case) / flops_per_ms
        weights_ms = self.linear_flops(1, 1) / bytes_per_ms  # as if a weight had two bytes
        linear_ms = max(weights_ms, self.linear_flops(case.batch, case.batch) / flops_per_ms)
        return linear_ms + case.batch * self.kv_nbytes(case.context) / bytes_per_ms


def read_shape(directory: Path, layout: KVLayout) -> ModelShape:
    """From the config alone, without weights; `layout` is that of the engine's pool."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linears = tuple(
        LinearShape(name, module.out_features, module.in_features, module.bias is not None, module is head)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    )
    return ModelShape(
        linears=linears,
        windows=_windows(config),
        num_heads=config.num_attention_heads,
        head_dim=layout.head_dim,
        layer_token_nbytes=layout.token_nbytes // layout.num_layers,
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it looks at, itself included."""
    whole = min(num_tokens, window or num_tokens)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * whole


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


class ReadBandwidth:
    """Reads a buffer once, in two ways: what the machine gives is the faster one's bandwidth."""

    def __init__(self, device: torch.device, num_bytes: int = READ_BUFFER_BYTES) -> None:
        rows = num_bytes // (4 * _READ_COLUMNS)
        self.num_bytes = rows * 4 * _READ_COLUMNS
        self._buffer = torch.ones(rows, _READ_COLUMNS, dtype=torch.float32, device=device)
        self._ones = torch.ones(_READ_COLUMNS, dtype=torch.float32, device=device)

    def tasks(self) -> dict[str, Task]:
        flat = self._buffer.view(-1)
        half = flat.numel() // 2
        return {
            "read as rows": lambda: torch.mv(self._buffer, self._ones),
            "read as halves": lambda: torch.dot(flat[:half], flat[half : 2 * half]),
        }


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
