"""Packed linear layers: what they compute, what they keep in memory, and what is used where packing cannot be."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitserve.bench.parts import breakdown
from splitserve.engine import linear, selftest
from splitserve.engine.batch import Segment
from splitserve.engine.linear import OneDnnBackend, PackedLinear, PlainBackend, choose_linear
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from splitserve.engine.stopwatch import Stopwatch
from tests.compiled import KERNEL_FOLDER
from tests.engine.driver import load
from tests.exactness import why_not_exact

TinyModel = Callable[[str], Path]

DTYPES = [torch.bfloat16, torch.float32]
MOST_ROWS = 2048
SHAPES = [(576, 1536), (1536, 576), (4096, 96), (64, 384)]  # a deep reduction is where matmuls split differently


def _layer(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(in_features)
        return nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)


def _rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_packed_layer_computes_something_else(dtype: torch.dtype, bias: bool) -> None:
    layer = _layer(192, 320, dtype, bias=bias)
    for shape in ((1, 192), (33, 192), (1, 7, 192), (1, 0, 192)):
        rows = _rows(shape[-2], 192, dtype).view(shape)
        exact = rows.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
        result = PackedLinear.of(layer)(rows)
        assert result.shape == (*shape[:-1], 320)
        tolerance = 2**-7 if dtype == torch.bfloat16 else 2**-18
        torch.testing.assert_close(result, exact.to(dtype), rtol=tolerance, atol=1e-5)


_EXPECTED: dict[tuple[object, ...], tuple[PackedLinear, torch.Tensor, torch.Tensor]] = {}


def _packed_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    if (shape, dtype) not in _EXPECTED:
        packed = PackedLinear.of(_layer(*shape, dtype))
        rows = _rows(MOST_ROWS, shape[0], dtype)
        _EXPECTED[shape, dtype] = packed, rows, packed(rows)
    return _EXPECTED[shape, dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=60, deadline=None)
@given(count=st.one_of(st.integers(1, 64), st.sampled_from([65, 100, 128, 255, 512])), place=st.floats(0, 1))
@torch.inference_mode()
def test_company_changes_a_row(shape: tuple[int, int], dtype: torch.dtype, count: int, place: float) -> None:
    packed, rows, expected = _packed_case(shape, dtype)
    first = int(place * (MOST_ROWS - count))
    assert torch.equal(packed(rows[first : first + count].clone()), expected[first : first + count])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recomputation_with_packed_layers_is_inexact(dtype: str, tiny_model: TinyModel) -> None:
    """One row suffices in both dtypes, as layers that need two see to it; plain ones of float32 need sixteen."""
    if reason := why_not_exact(dtype):
        pytest.skip(reason)
    runner = load(tiny_model("llama"), dtype=dtype)
    assert runner.report.linear == OneDnnBackend.name, runner.report.linear_reason
    assert runner.recompute_exact
    assert runner.result.min_rows == 1


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_lone_row_rounds_otherwise_than_in_company(dtype: torch.dtype) -> None:
    model = nn.ModuleList(_layer(*shape, dtype) for shape in SHAPES)
    OneDnnBackend().prepare(model)
    num_padded = 0
    for layer in model:
        assert isinstance(layer, PackedLinear)
        rows = _rows(64, layer.in_features, dtype)
        together = layer(rows)
        assert torch.equal(torch.cat([layer(row) for row in rows.split(1)]), together)
        assert torch.equal(torch.cat([layer(row.unsqueeze(0))[0] for row in rows.split(1)]), together)
        needs_company = not torch.equal(torch.cat([layer.compute(row) for row in rows.split(1)]), together)
        assert layer.pads_lone_row == needs_company, "a row is computed twice for nothing, or not where it must be"
        num_padded += needs_company
    assert num_padded < len(model), "the faster way for a lone row is never taken"


class _Attention(nn.Module):
    """Three layers that read the same rows, as transformers names them, and one that does not."""

    def __init__(self, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = _layer(96, 160, dtype, bias=bias)
        self.k_proj = _layer(96, 32, dtype, bias=bias)
        self.v_proj = _layer(96, 48, dtype, bias=bias)
        self.o_proj = _layer(160, 96, dtype)

    def forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_merged_layers_compute_something_else(dtype: torch.dtype, bias: bool) -> None:
    model = _Attention(dtype, bias=bias)
    rows = _rows(9, 96, dtype)
    expected = model(rows)
    OneDnnBackend().prepare(model)
    assert len({id(model.get_submodule(f"{name}_proj.group")) for name in "qkv"}) == 1
    for result, exact in zip(model(rows), expected, strict=True):
        tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-18
        torch.testing.assert_close(result, exact, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_merged_layer_answers_for_other_rows() -> None:
    """In any order, alone, twice, and never with what it made of an earlier tensor."""
    model = _Attention(torch.float32, bias=False)
    first, second = _rows(5, 96, torch.float32), -_rows(5, 96, torch.float32)
    expected = {id(rows): model(rows) for rows in (first, second)}
    OneDnnBackend().prepare(model)
    layers = [model.q_proj, model.k_proj, model.v_proj]
    order = [(0, first), (1, second), (2, first), (2, first), (0, second), (0, first), (1, first), (1, second)]
    for index, rows in order:
        torch.testing.assert_close(layers[index](rows), expected[id(rows)][index])
    model(first)
    assert model.q_proj.group._rows is None, "the rows of a step are kept after it"


def test_unequal_siblings_are_merged() -> None:
    model = _Attention(torch.float32, bias=False)
    model.k_proj = _layer(96, 32, torch.float32, bias=True)
    OneDnnBackend().prepare(model)
    assert {type(layer) for layer in model.children()} == {PackedLinear}


def test_subclass_of_linear_is_packed() -> None:
    class Doubling(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    model = nn.Sequential(nn.Linear(8, 8), Doubling(8, 8))
    OneDnnBackend().prepare(model)
    assert [type(module) for module in model] == [PackedLinear, Doubling]


@pytest.mark.parametrize("backend", [PlainBackend(), OneDnnBackend()])
def test_model_without_linear_layers_is_prepared(backend: linear.LinearBackend) -> None:
    with pytest.raises(ValueError, match="no linear layers"):
        backend.prepare(nn.Sequential(nn.LayerNorm(4)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # qwen3's head is tied to its embedding
def test_memory_is_reported_wrongly(family: str, tiny_model: TinyModel) -> None:
    if reason := why_not_exact("float32"):
        pytest.skip(reason)
    runner = load(tiny_model(family))
    assert runner.report.linear == OneDnnBackend.name, runner.report.linear_reason
    model = runner._model
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert runner.report.weights.plain == sum(parameter.nbytes for parameter in model.parameters()) + sum(
        buffer.nbytes for buffer in model.buffers()
    )
    assert runner.report.weights.packed == sum(int(torch.ops.mkldnn._nbytes(module._packed)) for module in packed)
    assert runner.report.weights.packed >= 4 * sum(module.in_features * module.out_features for module in packed)
    assert runner.report.pool_nbytes == runner.pool.tensor.nbytes


def test_plain_weight_is_kept_beside_the_packed(tiny_model: TinyModel) -> None:
    """The embedding's is the only matrix left as it was, whether a head is tied to it or not."""
    for family in ("llama", "qwen3"):
        model = load(tiny_model(family))._model
        matrices = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
        assert matrices == ["model.embed_tokens.weight"], family


def _refuse(*_: object) -> torch.Tensor:
    raise RuntimeError("this processor cannot\nand a long explanation")


def test_missing_operator_is_hidden(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without packing the same model is served by the plain layers, and everybody can see that and why."""
    monkeypatch.setattr(linear.PackedLinear, "forward", _refuse)
    said: list[str] = []
    runner = load_runner(
        tiny_model("llama"), dtype="float32", device="cpu", block_size=16, kv_cache_bytes=1 << 20, progress=said.append
    )
    assert runner.report.linear == PlainBackend.name
    assert runner.report.linear_reason.endswith("do not run here: this processor cannot")
    assert runner.report.weights.packed == 0
    assert any(runner.report.linear_reason in line for line in said)
    assert runner.numerics


@pytest.mark.parametrize(("device", "reason"), [("cuda:0", "not for cuda:0"), ("meta", "not for meta")])
def test_weights_are_packed_for_another_device(device: str, reason: str) -> None:
    backend, why = choose_linear(device, torch.bfloat16)
    assert isinstance(backend, PlainBackend)
    assert reason in why


def test_wrong_packed_layer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_bit(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, layer._packed, layer.bias, "none", [], "") + 0.25

    monkeypatch.setattr(linear.PackedLinear, "forward", off_by_a_bit)
    backend, why = choose_linear("cpu", torch.float32)
    assert isinstance(backend, PlainBackend)
    assert "wrong here" in why


class _SplitByRows(nn.Module):
    """Rounds differently above `limit` rows, as a library does that splits its sums otherwise for large inputs."""

    bias = None

    def __init__(self, layer: nn.Linear, limit: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.limit = layer.in_features, layer.out_features, limit
        self.packed = [layer.weight]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        (weight,) = self.packed
        if rows.shape[-2] <= self.limit:
            return (rows.double() @ weight.T.double()).float()  # whose own differences are rounded away
        half = self.in_features // 2
        return rows[..., :half] @ weight.T[:half] + rows[..., half:] @ weight.T[half:]


class _OtherBackend:
    """Of somebody else, with layers of its own."""

    name = "other"

    def __init__(self, limit: int, *, shows_layers: bool = True) -> None:
        self._limit, self._shows_layers = limit, shows_layers

    def prepare(self, model: nn.Module) -> None:
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    setattr(parent, name, _SplitByRows(layer, self._limit))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, _SplitByRows) and self._shows_layers]

    def packed_nbytes(self, model: nn.Module) -> int:
        return sum(module.packed[0].nbytes for module in model.modules() if isinstance(module, _SplitByRows))


def _load_with(backend: linear.LinearBackend, directory: Path) -> ModelRunner:
    return load_runner(
        directory,
        dtype="float32",
        device="cpu",
        block_size=16,
        kv_cache_bytes=1 << 20,
        kernel_folder=KERNEL_FOLDER,
        linear=backend,
    )


def test_layers_of_another_back_end_are_overlooked(tiny_model: TinyModel) -> None:
    """By the self-test, whose ids alone make no batch above 120 rows, by the report and by the benchmark."""
    runner = _load_with(_OtherBackend(120), tiny_model("llama"))
    assert selftest.is_exact(runner)
    assert not runner.recompute_exact
    assert runner.report.linear == "other"
    assert runner.report.weights.packed == 4 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 384)

    class Ticks(Stopwatch):
        now = 0.0

        def now_ms(self) -> float:
            self.now += 1.0
            return self.now

    step = partial(runner.run, [Segment([5, 6, 7], 0, [0], True)])
    assert breakdown(runner, step, Ticks(torch.device("cpu")))["linear"] == 2 * 7 + 1


def test_back_end_that_shows_no_layers_is_believed(tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match="other shows no layers to try"):
        _load_with(_OtherBackend(10**6, shows_layers=False), tiny_model("llama"))


def test_rows_that_round_differently_beyond_the_fixed_ids_pass(tiny_model: TinyModel) -> None:
    runner = load(tiny_model("llama"))
    assert runner.report.linear != OneDnnBackend.name or selftest.linear_rows_are_exact(runner)

    class Doubling(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * (2 if len(rows) > 100 else 1)

    runner.model.add_module("odd", Doubling(64, 96))
    assert not selftest.linear_rows_are_exact(runner)
