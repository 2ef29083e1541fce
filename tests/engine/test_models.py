"""The paged forward against transformers itself, for every served family, and the refusal of everything else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from splitserve.engine.attention import AttentionPlan, AttentionSpec
from splitserve.engine.batch import Segment
from splitserve.engine.loading import load_runner
from splitserve.engine.packing import PackedBatch
from splitserve.engine.pool import KVPool
from splitserve.engine.support import UnsupportedModel, max_positions, two_layer_copy
from splitserve.engine.torch_attention import TorchAttention
from tests.engine.driver import generate, load, random_prompt, reference
from tests.tiny_models import FAMILIES, REFUSED, build

TinyModel = Callable[[str], Path]

BLOCK = 16
MAX_TOKENS = 12
PROMPTS = [random_prompt(length, seed=length) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 75)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_differ_from_transformers(family: str, tiny_model: TinyModel) -> None:
    directory = tiny_model(family)
    expected = [reference(directory, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that says one thing shows nothing"
    runner = load(directory, block_size=BLOCK)
    # Packed with mixed company, prompts over several forwards; then each alone in one chunk.
    assert generate(runner, PROMPTS, max_tokens=MAX_TOKENS, chunk=24, budget=40) == expected
    alone = [generate(runner, [prompt], max_tokens=MAX_TOKENS, chunk=512, budget=512)[0] for prompt in PROMPTS]
    assert alone == expected


@pytest.mark.parametrize("block_size", [1, 8, 32, 512])
def test_block_size_changes_tokens(block_size: int, tiny_model: TinyModel) -> None:
    directory = tiny_model("gemma2")
    expected = [reference(directory, prompt, MAX_TOKENS) for prompt in PROMPTS]
    runner = load(directory, block_size=block_size)
    assert generate(runner, PROMPTS, max_tokens=MAX_TOKENS, chunk=24, budget=40) == expected


def test_context_over_several_tiles_differs_from_transformers(tiny_model: TinyModel) -> None:
    prompts = [random_prompt(length, seed=length) for length in (255, 256, 257, 600)]
    for family in ("llama", "mistral"):
        directory = tiny_model(family)
        expected = [reference(directory, prompt, 8) for prompt in prompts]
        runner = load(directory)
        assert generate(runner, prompts, max_tokens=8, chunk=200, budget=300) == expected


def test_tied_model_of_qwen_shape_differs_from_transformers(tmp_path: Path) -> None:
    """14 query heads on 2 KV heads, tied, 151,936 ids: shapes that powers of two would hide."""
    directory = build(
        "qwen2",
        tmp_path,
        dtype=torch.bfloat16,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=6,
        use_sliding_window=False,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    prompt = random_prompt(40, seed=1, vocab_size=151_936)
    expected = reference(directory, prompt, 4)
    assert generate(load(directory), [prompt], max_tokens=4, chunk=32, budget=64) == [expected]


@pytest.mark.parametrize(
    ("family", "reason"),
    list(zip(REFUSED, ["chunked_attention", "attention interface", "linear_attention"], strict=True)),
)
def test_unservable_family_is_served(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load(build(family, tmp_path))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder"),
        ("llava", "several models"),
        ("llama4", "several models"),
        ("bert", "later tokens"),
        ("deepseek_v3", "MLA"),
        ("gemma4_text", "differ in their attention heads"),
        ("mimo_v2_flash", "keys and values of one size"),
        ("gpt_oss", "sinks"),
    ],
)
def test_other_architecture_is_served(model_type: str, reason: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, kv_cache_bytes=64 << 20)


def test_unknown_architecture_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(UnsupportedModel, match="config"):
        load(tmp_path)


def test_pickled_weights_are_loaded(tmp_path: Path) -> None:
    build("llama", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load(tmp_path)


def test_missing_weights_become_random(tmp_path: Path) -> None:
    weights = load_file(build("llama", tmp_path) / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="up_proj"):
        load(tmp_path)


def test_quantized_weights_crash_the_loader(tmp_path: Path) -> None:
    """They need packages of their own."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with pytest.raises(UnsupportedModel, match="weights"):
        load(build("llama", tmp_path, quantization_config=quantization))


class _Altered:
    """The reference back end with one part of the layers' wishes ignored."""

    name = "altered"

    def __init__(self, **changes: float | None) -> None:
        self._changes = changes

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> AttentionPlan:
        return _AlteredPlan(TorchAttention().plan(batch, pool, num_heads), self._changes)


class _AlteredPlan:
    def __init__(self, plan: AttentionPlan, changes: dict[str, float | None]) -> None:
        self._plan = plan
        self._changes = changes

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        self._plan.store(key, value, layer)

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        return self._plan.attend(query, layer, replace(spec, **self._changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {"window": None}), ("gemma2", {"softcap": None}), ("granite", {"scaling": 0.25})],
)
def test_wrong_attention_passes_the_self_test(
    family: str, changes: dict[str, float | None], tiny_model: TinyModel
) -> None:
    with pytest.raises(UnsupportedModel, match="random copy"):
        load_runner(
            tiny_model(family),
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            kv_cache_bytes=1 << 20,
            attention=_Altered(**changes),
        )


def test_window_longer_than_the_self_test_hides_its_absence(tmp_path: Path) -> None:
    """With its real window of 500 the model itself never leaves the window in 64 tokens; the copy's is shrunk."""
    directory = build("mistral", tmp_path, sliding_window=500)
    with pytest.raises(UnsupportedModel, match="random copy"):
        load_runner(
            directory,
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            kv_cache_bytes=1 << 20,
            attention=_Altered(window=None),
        )


def test_layer_skips_paged_attention(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(tiny_model("llama"))
    layers = runner._model.model.layers
    monkeypatch.setattr(layers[1].self_attn, "layer_idx", 0)
    with pytest.raises(ValueError, match=r"layers \[0, 0\]"):
        runner.run([Segment([5, 6], 0, [0], True)])


def test_copy_for_the_self_test_loses_a_layer_type() -> None:
    config = AutoConfig.for_model(
        "gemma2",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    )
    small = two_layer_copy(config, vocab_size=64, window=8)
    assert (small.layer_types, small.num_hidden_layers) == (["sliding_attention", "full_attention"], 2)
    assert (small.sliding_window, small.vocab_size) == (8, 64)
    assert config.num_hidden_layers == 4
    assert config.sliding_window != 8


def test_rotary_embedding_depends_on_company() -> None:
    """A rotary embedding that switches with the batch's length is served only up to that length."""
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    config = AutoConfig.for_model("llama", max_position_embeddings=512, rope_parameters=parameters)
    assert max_positions(config) == 128
