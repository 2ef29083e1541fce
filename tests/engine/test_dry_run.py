"""A forward without memory: models that are judged wrongly by it, and traces that it leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from splitserve.engine.checkpoint import read_config
from splitserve.engine.dry_run import require_paged
from splitserve.engine.layout import KVLayout
from splitserve.engine.support import UnsupportedModel, attention_shape
from splitserve.engine.trust import SAFE
from tests.tiny_models import FAMILIES


def tried(config: Any) -> Any:
    num_heads, num_kv_heads, head_dim = attention_shape(config)
    return require_paged(
        config, KVLayout(config.num_hidden_layers, num_kv_heads, head_dim, 1, "bfloat16"), num_heads, SAFE
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_served_model_is_refused_or_changed(family: str, tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model(family)
    config = read_config(directory, SAFE)
    before = config.to_dict(), config._attn_implementation, config._experts_implementation
    model = tried(config)
    assert (config.to_dict(), config._attn_implementation, config._experts_implementation) == before
    parameters = dict(model.named_parameters())
    assert {parameter.device for parameter in parameters.values()} == {torch.device("meta")}
    stored = load_file(directory / "model.safetensors").values()
    assert sum(parameter.numel() for parameter in parameters.values()) == sum(tensor.numel() for tensor in stored)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "mimo_v2_flash",
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "heads of size 128 for values",
        ),
        ("diffllama", {"num_hidden_layers": 2}, "ran for layers"),
        ("bert", {"num_hidden_layers": 2}, "later tokens"),
        ("granite_swa", {"num_hidden_layers": 2}, "sinks"),
    ],
)
def test_attention_that_is_not_ours_is_not_seen(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        tried(AutoConfig.for_model(family, **changes))


def test_heads_other_than_the_config_says_are_not_seen() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    layout = KVLayout(2, 4, config.head_dim, 16, "bfloat16")
    assert require_paged(config, layout, 8, SAFE) is not None
    for wrong, num_heads in [(KVLayout(2, 2, config.head_dim, 16, "bfloat16"), 8), (layout, 4)]:
        with pytest.raises(UnsupportedModel, match="config says"):
            require_paged(config, wrong, num_heads, SAFE)


def test_model_that_looks_at_values_is_refused() -> None:
    """Its experts are chosen in Python. The self-test decides on it."""
    assert tried(AutoConfig.for_model("jetmoe", num_hidden_layers=2)) is not None
