"""The least time of a step: counted wrongly, or by another machine's rates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splitserve.engine import rates
from splitserve.engine.checkpoint import read_config
from splitserve.engine.floor import Rates, StepFloor
from splitserve.engine.layout import KVLayout
from splitserve.engine.linear import OneDnnBackend, PackedLinear, PlainBackend
from splitserve.engine.shape import LinearShape, ModelShape, read_shape
from splitserve.engine.stopwatch import Stopwatch, Task
from splitserve.engine.support import attention_shape
from splitserve.engine.transformers_api import AutoModelForCausalLM
from splitserve.engine.trust import SAFE

CPU = torch.device("cpu")


def shape_of(directory: Path) -> ModelShape:
    config = read_config(directory, SAFE)
    num_heads, num_kv_heads, head_dim = attention_shape(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, 16, "float32")
    return read_shape(model, layout, num_heads)


def test_floor_is_not_the_one_by_hand(tiny_model: Callable[..., Path]) -> None:
    """Two layers of 30,720 weights in float32 and a head of 24,576; a token's K and V have 256 bytes in each layer, and
    a pair of tokens takes 4 x 4 heads x 16 operations there. At 1 GB/s and 10 GFLOP/s, in microseconds:"""
    floor = StepFloor(shape_of(tiny_model("llama")), Rates(bytes_per_s=1e9, flops_per_s=1e10))
    weights, row, head, logit_row = 245.76, 12.288, 98.304, 4.9152
    lone, prompt, chunk, half = (1, 100), (100, 100), (60, 100), (2, 100)
    lone_us, prompt_us, chunk_us, half_us = 51.2, 5050 * 2 * 0.0256, (5050 - 820) * 2 * 0.0256, 51.2
    for sequences, num_logit_rows, microseconds in [
        ([lone], 1, weights + head + lone_us),
        ([lone] * 30, 30, 30 * row + 30 * logit_row + 30 * lone_us),
        ([prompt], 1, 100 * row + head + prompt_us),
        ([chunk], 0, 60 * row + chunk_us),
        ([half], 0, weights + half_us),  # it reads more than it multiplies
        ([lone, prompt], 2, 101 * row + head + lone_us + prompt_us),
        ([prompt], 100, 100 * row + 100 * logit_row + prompt_us),
        ([], 0, 0.0),
    ]:
        assert floor.seconds(sequences, num_logit_rows) * 1e6 == pytest.approx(microseconds), sequences


def test_experts_are_forgotten_or_all_counted(tiny_model: Callable[..., Path]) -> None:
    """A token meets two of four, of three matrices each."""
    shape = shape_of(tiny_model("mixtral"))
    assert shape.num_expert_weights == 2 * 2 * 3 * 64 * 96
    assert shape.num_weights == shape.num_expert_weights + 2 * (2 * 64 * 64 + 2 * 64 * 32)
    assert shape.num_head_weights == 64 * 384


def test_window_of_a_model_is_not_seen(tiny_model: Callable[..., Path]) -> None:
    for family, windows in {"llama": (None, None), "mistral": (20, 20), "gemma2": (20, None)}.items():
        assert shape_of(tiny_model(family)).windows == windows


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_useful_work_is_miscounted(window: int | None) -> None:
    """Beside looking at every pair."""
    shape = ModelShape(windows=(None, window), num_heads=3, head_dim=8, layer_token_nbytes=10)
    for num_new in (1, 2, 5, 12):
        seen = [
            [set(range(max(0, query + 1 - (w or 12)), query + 1)) for query in range(12 - num_new, 12)]
            for w in (None, window)
        ]
        num_pairs = sum(len(keys) for layer in seen for keys in layer)
        assert shape.num_pairs(num_new, 12) == num_pairs
        assert shape.num_keys(num_new, 12) == sum(len(set[int]().union(*layer)) for layer in seen)
        assert shape.flops([(num_new, 12)] * 5, 1) == 5 * 4 * 8 * 3 * num_pairs
    assert shape.kv_nbytes(12) == 10 * shape.num_keys(1, 12)


SEQUENCE = st.integers(1, 60).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))


@given(st.lists(SEQUENCE, min_size=1, max_size=5), st.integers(0, 5), SEQUENCE, st.sampled_from([1e2, 1e5]))
def test_more_work_has_a_lower_floor(
    sequences: list[tuple[int, int]], num_logit_rows: int, other: tuple[int, int], flops_per_s: float
) -> None:
    """Where reading takes longest, and where multiplying does."""
    linears = (LinearShape("a", 8, 4, False, False), LinearShape("b", 5, 4, False, True))
    shape = ModelShape(
        linears=linears, weight_nbytes=2, windows=(None, 7), num_heads=2, head_dim=4, layer_token_nbytes=8
    )
    seconds = StepFloor(shape, Rates(1e3, flops_per_s)).seconds
    least = seconds(sequences, num_logit_rows)
    (num_new, context), rest = sequences[0], sequences[1:]
    for more in ([*sequences, other], [(num_new, context + 1), *rest], [(num_new + 1, context + 1), *rest]):
        assert seconds(more, num_logit_rows) >= least * (1 - 1e-9)
    assert seconds([(min(num_new + 1, context), context), *rest], num_logit_rows) >= least * (1 - 1e-9)
    assert seconds(sequences, num_logit_rows + 1) >= least


class FixedTime(Stopwatch):
    """Every task takes half a millisecond; it is run all the same."""

    def milliseconds(self, task: Task) -> float:
        task()
        return 0.5


def some_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(64, 64, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("backend", [PlainBackend(), OneDnnBackend()], ids=["plain", "packed"])
def test_rate_is_not_that_of_the_weights(backend: PlainBackend | OneDnnBackend) -> None:
    model = some_layers()
    plain = [layer.weight.flatten().sort().values for layer in model]
    backend.prepare(model)
    layers = backend.layers(model)
    for layer, weights in zip(layers, plain, strict=True):
        read = rates._memory_of(layer)
        assert torch.equal(read[read != 0].sort().values, weights)
    found = rates.measure_rates(layers, torch.float32, CPU, FixedTime(CPU))
    assert found.bytes_per_s == pytest.approx(4 * (64 * 128 + 64 * 64) / 0.5e-3)
    # No larger matmul, for that would take more memory than was read.
    assert found.flops_per_s == pytest.approx(2 * 256**3 / 0.5e-3)


def test_more_is_read_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model the first layers are enough."""
    monkeypatch.setattr(rates, "READ_BYTES", 4096)
    layers = PlainBackend().layers(some_layers())
    assert rates._weights_in_place(layers).num_bytes == 4 * 64 * 128


def test_slower_dtype_sets_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.dtype] = []

    def flops_per_ms(dtype: torch.dtype, *_: object) -> float:
        tried.append(dtype)
        return {torch.float32: 5.0, torch.bfloat16: 3.0}[dtype]

    monkeypatch.setattr(rates, "_flops_per_ms", flops_per_ms)
    measure = partial(rates.measure_rates, [PackedLinear(torch.ones(64, 64), None)], device=CPU)
    assert measure(torch.bfloat16).flops_per_s == 5e3
    assert sorted(tried, key=str) == [torch.bfloat16, torch.float32]
    assert measure(torch.float32).bytes_per_s > 0
