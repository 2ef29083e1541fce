"""Fused decoder layers: what they compute, which layers they stand in for, and that company changes nothing."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from splitserve.bench.parts import breakdown
from splitserve.engine.batch import Segment
from splitserve.engine.cpu_attention import CpuAttention
from splitserve.engine.fused_layer import FusedDecoderLayer, FusedNorm
from splitserve.engine.fusing import Fusion, fuse_layers
from splitserve.engine.runner import ModelRunner
from splitserve.engine.stopwatch import Stopwatch
from splitserve.engine.torch_attention import TorchAttention
from tests.compiled import KERNEL_FOLDER
from tests.engine.driver import load, random_prompt
from tests.exactness import require_exact
from tests.tiny_models import FAMILIES

TinyModel = Callable[..., Path]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FUSED = ["llama", "mistral", "qwen2", "qwen3"]
NUM_BLOCKS = 6  # of 16 tokens, for a prompt of the tests


def _logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    return runner.run([Segment(prompt, 0, range(NUM_BLOCKS), True)])[0]


def _unfuse(runner: ModelRunner) -> nn.ModuleList:
    layers: nn.ModuleList = runner.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = layer._original[0] if isinstance(layer, FusedDecoderLayer) else layer
    return layers


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / (theirs - theirs.mean()).norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_layers_are_fused_than_should_be(family: str, dtype: str, tiny_model: TinyModel) -> None:
    fusion = load(tiny_model(family), dtype=dtype).report.layers
    assert (fusion.num_fused, fusion.num_layers) == (2 if family in FUSED else 0, 2)
    assert (fusion.reason == "") == (family in FUSED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_fused_model_computes_something_else(family: str, dtype: str, tiny_model: TinyModel) -> None:
    """Than transformers' own in float32, and than the same model with its layers as they were."""
    runner, prompt = load(tiny_model(family), dtype=dtype), random_prompt(75, seed=1)
    fused = _logits(runner, prompt)
    _unfuse(runner)
    unfused = _logits(runner, prompt)
    assert _distance(fused, unfused) < (2e-6 if dtype == "float32" else 0.03)
    own = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        exact = own.eval()(torch.tensor([prompt])).logits[0, -1]
    assert _distance(fused, exact) < (1e-5 if dtype == "float32" else 1.2 * _distance(unfused, exact))


@cache
def _exact_case(directory: Path, dtype: str) -> tuple[ModelRunner, list[int], torch.Tensor, torch.Tensor]:
    """A prompt of whole blocks, its logits after each token and its blocks, from one forward alone."""
    runner, prompt = load(directory, dtype=dtype), random_prompt(80, seed=3)
    require_exact(runner)
    rows = runner.run([Segment(prompt, 0, range(NUM_BLOCKS), True, True)])
    return runner, prompt, rows, runner.pool.tensor[: len(prompt) // 16].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "intermediate_size"), [("llama", 96), ("qwen3", 96), ("llama", 1536)])
@settings(max_examples=12, deadline=None)
@given(cuts=st.sets(st.integers(1, 79), max_size=4), company=st.lists(st.integers(1, 70), max_size=2))
@example(cuts={1, 79}, company=[])  # lone rows, which differ in a matmul of one row from 1,024 inputs on
@example(cuts={79}, company=[1])
def test_chunk_or_company_changes_a_row(
    family: str, intermediate_size: int, dtype: str, tiny_model: TinyModel, cuts: set[int], company: list[int]
) -> None:
    """Logits, and K and V in the pool."""
    directory = tiny_model(family, intermediate_size=intermediate_size)
    runner, prompt, expected, expected_kv = _exact_case(directory, dtype)
    runner.pool.tensor.fill_(torch.nan)
    ends = [*sorted(cuts), 80]
    for start, end in zip([0, *ends], ends, strict=False):
        others = [
            Segment(random_prompt(length, seed=length), 0, range(NUM_BLOCKS * index, NUM_BLOCKS * (index + 1)), False)
            for index, length in enumerate(company, 1)
        ]
        segment = Segment(prompt[start:end], start, range(NUM_BLOCKS), True)
        assert torch.equal(runner.run([*others, segment])[0], expected[end - 1])
    assert torch.equal(runner.pool.tensor[: len(expected_kv)], expected_kv)


class _OneMore(nn.Module):
    """Norm whose weight counts from one, as gemma's."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = rows.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return (values * (1 + self.weight.float())).to(rows.dtype)


def _replace_forward(module: nn.Module, change: Callable[..., Any]) -> None:
    """`change` gets the module's own forward and what it is called with."""
    own = module.forward
    vars(module)["forward"] = MethodType(lambda _, *args, **kwargs: change(own, *args, **kwargs), module)


def _with_other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _with_other_norm(layer: Any) -> None:
    layer.post_attention_layernorm = _OneMore(layer.post_attention_layernorm)


def _with_other_epsilon(layer: Any) -> None:
    _replace_forward(layer.input_layernorm, lambda own, rows: own(rows) * 1.0)
    layer.input_layernorm.variance_epsilon = 1e-3
    norm = copy.deepcopy(layer.input_layernorm)
    norm.variance_epsilon = 1e-6
    _replace_forward(layer.input_layernorm, lambda _, rows: LlamaRMSNorm.forward(norm, rows))


def _with_bias_on_the_norm(layer: Any) -> None:
    layer.input_layernorm.bias = nn.Parameter(torch.zeros(64), requires_grad=False)


def _with_scaled_residual(layer: Any) -> None:
    _replace_forward(layer.mlp, lambda own, rows: own(rows) * 0.9)


def _with_norm_after_attention(layer: Any) -> None:
    layer.self_attn.add_module("norm", copy.deepcopy(layer.input_layernorm))


def _with_limit(layer: Any) -> None:
    _replace_forward(layer, lambda own, rows, **kwargs: own(rows.clamp(-200, 200), **kwargs))


def _with_scaling_far_away(layer: Any) -> None:
    def scaled(own: Any, *, hidden_states: Any, position_ids: Any, **kwargs: Any) -> Any:
        output, weights = own(hidden_states=hidden_states, position_ids=position_ids, **kwargs)
        return output * (1 + 0.1 * (position_ids // 512)).unsqueeze(-1).to(output.dtype), weights

    _replace_forward(layer.self_attn, scaled)


def _with_parameter_of_its_own(layer: Any) -> None:
    layer.scale = nn.Parameter(torch.ones(()), requires_grad=False)


def _with_plain_matmul(layer: Any) -> None:
    layer.self_attn.o_proj = nn.Linear(64, 64).to(layer.input_layernorm.weight.dtype)


def _without_rotary_embedding(layer: Any) -> None:
    def unturned(own: Any, *, position_embeddings: Any, **kwargs: Any) -> Any:
        cosines, sines = position_embeddings
        return own(position_embeddings=(torch.ones_like(cosines), torch.zeros_like(sines)), **kwargs)

    _replace_forward(layer.self_attn, unturned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_other_activation, "differs"),
        (_with_other_norm, "differs"),
        (_with_other_epsilon, "differs"),
        (_with_bias_on_the_norm, "another norm"),
        (_with_scaled_residual, "differs"),
        (_with_norm_after_attention, "other parts"),
        (_with_limit, "differs"),
        (_with_scaling_far_away, "differs"),
        (_with_parameter_of_its_own, "other parts"),
        (_with_plain_matmul, "not packed"),
        (_without_rotary_embedding, "differs"),
    ],
)
def test_layer_that_differs_is_fused(
    change: Callable[[Any], None], reason: str, dtype: str, tiny_model: TinyModel
) -> None:
    """It alone stays as it was, and the reason is told."""
    runner = load(tiny_model("llama"), dtype=dtype)
    layers = _unfuse(runner)
    change(layers[1])
    fusion = fuse_layers(runner.model, runner.attention, dtype)
    assert fusion.num_fused == 1, fusion
    assert reason in fusion.reason
    assert [type(layer).__name__ for layer in layers] == ["FusedDecoderLayer", "LlamaDecoderLayer"]


def test_other_rotation_is_fused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring dimensions turn together, as in some families of the same structure."""
    runner = load(tiny_model("llama"))
    _unfuse(runner)

    def rotate_pairs(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack((-rows[..., 1::2], rows[..., ::2]), dim=-1).flatten(-2)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_pairs)
    assert "differs" in fuse_layers(runner.model, runner.attention, "float32").reason


def test_layers_are_fused_for_another_back_end(tiny_model: TinyModel) -> None:
    runner = load(tiny_model("llama"))
    _unfuse(runner)
    fusion = fuse_layers(runner.model, TorchAttention(), "float32")
    assert (fusion.num_fused, fusion.num_layers) == (0, 2)
    assert str(Fusion(2, 3, "why")) == "fused 2 of 3: why"


def test_rotary_embeddings_with_gaps_are_misread(tiny_model: TinyModel) -> None:
    """Kernels read them by address: others than they expect go to the layer's own forward."""
    runner, prompt = load(tiny_model("llama")), random_prompt(9, seed=2)
    expected = _logits(runner, prompt)

    def with_gaps(own: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(torch.stack([each, torch.zeros_like(each)], -1)[..., 0] for each in own(*args, **kwargs))

    _replace_forward(runner.model.model.rotary_emb, with_gaps)
    torch.testing.assert_close(_logits(runner, prompt), expected, rtol=1e-5, atol=1e-5)


def test_part_of_a_fused_layer_is_not_accounted_for(tiny_model: TinyModel) -> None:
    """By a clock that ticks when it is read, a part's time is the number of its calls: a fused layer stores and attends
    in one."""
    runner = load(tiny_model("llama"))

    class Ticks(Stopwatch):
        count = 0

        def now_ms(self) -> float:
            Ticks.count += 1
            return Ticks.count

    expected = _logits(runner, [5, 6, 7])
    parts = breakdown(runner, lambda: _logits(runner, [5, 6, 7]), Ticks(torch.device("cpu")))
    assert (parts["linear"], parts["attention"], parts["norms"]) == (4 * 2 + 1, 2, 2 * 2 + 1)
    assert torch.equal(_logits(runner, [5, 6, 7]), expected)
    assert isinstance(runner.attention, CpuAttention)


def test_part_of_the_rows_is_left_out_by_threads(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, prompt = load(tiny_model("qwen3")), random_prompt(77, seed=4)
    expected = _logits(runner, prompt)
    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(runner.attention, "num_threads", 3)
        monkeypatch.setattr(runner.attention, "_threads", threads)
        assert torch.equal(_logits(runner, prompt), expected)
        assert torch.equal(_logits(runner, prompt[:64]), _logits(runner, prompt[:64]))


@pytest.mark.parametrize("norm", [LlamaRMSNorm(64).double(), LlamaRMSNorm(32)])
def test_norm_whose_weight_would_be_misread_is_fused(norm: nn.Module) -> None:
    with pytest.raises(ValueError, match="a norm's weight is"):
        FusedNorm(norm, 64, CpuAttention(KERNEL_FOLDER), "float32")
