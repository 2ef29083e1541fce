"""`splitserve plan`: sizes of models whose sizes are known, and models that the engine refuses."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from splitserve.models.locate import locate_model
from splitserve.plan.model_size import model_size
from splitserve.service.errors import InvalidRequest
from tests.plan import architectures as known
from tests.plan.architectures import written

# Config, parameters as published, those that a token meets in matmuls, bytes of K and V a token, layers by window.
SIZES: dict[str, tuple[dict[str, Any], int, float, int, dict[int | None, int]]] = {
    "llama-3-8b": (known.LLAMA, 8_030_261_248, 7.50e9, 131_072, {None: 32}),
    "llama-3-70b": (known.LLAMA_70B, 70_553_706_496, 69.5e9, 327_680, {None: 80}),
    "mistral-7b": (known.MISTRAL, 7_241_732_096, 7.11e9, 131_072, {4096: 32}),
    "mixtral-8x7b": (known.MIXTRAL, 46_702_792_704, 12.9e9 - 32_000 * 4096, 131_072, {None: 32}),
    "qwen2.5-0.5b": (known.QWEN2, 494_032_768, 494e6, 12_288, {None: 24}),
    "qwen3-30b-a3b": (known.QWEN3_MOE, 30_532_122_624, 3.35e9 - 151_936 * 2048, 98_304, {None: 48}),
    "gemma-2-9b": (known.GEMMA2, 9_241_705_984, 9.24e9, 344_064, {None: 21, 4096: 21}),
    "gemma-3-1b": (known.GEMMA3, 999_885_952, 1.0e9, 26_624, {None: 4, 512: 22}),
    "phi-3-mini-4k": (known.PHI3, 3_821_079_552, 3.72e9, 393_216, {2047: 32}),
    "phi-3-mini-128k": (known.PHI3_LONG, 3_821_079_552, 3.72e9, 393_216, {262_144: 32}),
    "gpt2": (known.GPT2, 124_439_808, 123.5e6, 36_864, {None: 12}),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_of_a_known_model_is_another(name: str, tmp_path: Path) -> None:
    config, num_parameters, num_matmul, kv_token_nbytes, windows = SIZES[name]
    size = model_size(written(config, tmp_path), 32)
    assert size.num_parameters == num_parameters
    assert size.num_matmul == pytest.approx(num_matmul, rel=0.01)
    assert (size.layout.token_nbytes, size.layout.block_nbytes) == (kv_token_nbytes, 32 * kv_token_nbytes)
    assert Counter(size.shape.windows) == windows
    # What several sequences read beyond what one computes with: experts.
    looked_up = num_parameters - size.read_nbytes(2) / 2
    assert 0 <= looked_up <= num_parameters * 0.07
    assert (size.num_other_experts > 0) == ("num_experts_per_tok" in config)


def test_default_model_is_sized_wrong() -> None:
    size = model_size(locate_model(None, loads_weights=False).directory, 16)
    assert (size.num_parameters, size.weight_nbytes) == (134_515_008, 269_030_016)
    assert size.num_matmul == 134_515_008 - (2 * 30 + 1) * 576, "all but the norms"
    assert (size.layout.token_nbytes, size.max_model_len) == (23_040, 8192)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (known.DEEPSEEK_V3, "MLA"),
        (known.MIMO, "keys and values of one size"),
        (known.GEMMA4, "differ in their attention heads"),
        (known.GPT_OSS, "attention sinks"),
        (known.QWEN3_NEXT, "linear_attention"),
        (known.LLAVA, "several models"),
        (known.BERT, "attends to later tokens"),
        (known.LLAMA_FP8, r"quantized \(fp8\)"),
        ({"model_type": "t5"}, "encoder"),
        (known.LLAMA | {"hidden_size": "large"}, "no usable model config"),
        (known.LLAMA | {"hidden_act": "never_heard_of"}, "transformers makes no llama"),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_model_that_is_not_served_gets_a_plan(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        model_size(written(config, tmp_path), 16)


def test_place_without_a_model_gets_a_plan(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no usable model config"):
        model_size(tmp_path / "nowhere", 16)
