"""Which models the engine serves, decided by their config alone; the self-test decides the rest.

Called by the loader before any weight is read. Pure functions over transformers' configs.
"""

import copy
from typing import Any

from splitserve.engine.transformers_api import MODEL_FOR_CAUSAL_LM_MAPPING

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Most of a large model's weights are here, and none of its attention.
_MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_COPY_MLP_WIDTH = 256

_OTHER_MODALITIES = ("vision", "audio", "speech", "image", "video", "text")


class UnsupportedModel(ValueError):
    """The model cannot be served; the message says why."""


def require_supported(config: Any) -> None:
    """UnsupportedModel with the reason when `config` (a transformers config) describes something else than we serve."""
    name = config.model_type
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModel(f"{name} has an encoder; only decoder-only models are served")
    parts = sorted(part for part in config.sub_configs if any(word in part for word in _OTHER_MODALITIES))
    if parts:
        raise UnsupportedModel(
            f"{name} is made of several models ({', '.join(parts)}); only plain text models are served"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES)
    if others:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(others)}; only full and sliding attention are served"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{name} compresses K and V of all heads into one (MLA), which is not in KV blocks")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model for {name}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a recurrent state, which is not in KV blocks")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"the attention of {name} does not go through transformers' attention interface")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} attends to later tokens; only causal attention is served")


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(query heads, KV heads, head size) of every layer. UnsupportedModel when the config does not say."""
    try:
        num_heads = getattr(config, "num_attention_heads", None)
        num_kv_heads = getattr(config, "num_key_value_heads", None)
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError as error:  # transformers' way to say that a number is not the same in all layers
        raise UnsupportedModel(f"the layers of {config.model_type} differ in their attention heads") from error
    if not isinstance(num_heads, int) or num_heads < 1:
        raise UnsupportedModel(f"the config of {config.model_type} names no number of attention heads")
    num_kv_heads, head_dim = num_kv_heads or num_heads, head_dim or config.hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
    return num_heads, num_kv_heads, head_dim


def quantization(config: Any) -> str:
    """By which method the weights are quantized, "" where they are not. Whether the engine can compute with them is up
    to transformers and what is installed beside it, which their loading finds out."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    return str(settings.get("quant_method", "unknown"))


def max_positions(config: Any) -> int:
    """Longest context in tokens.

    Rotary embeddings that change with the length of the batch ("dynamic", "longrope") would make a token depend on its
    company; such models are served up to the length where they start to.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModel(f"the config of {config.model_type} names no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit


def two_layer_copy(config: Any, *, vocab_size: int, window: int) -> Any:
    """The config with two layers, one of each type if it has two, shrunk windows and a small vocabulary and MLP."""
    small = copy.deepcopy(config)
    num_layers = config.num_hidden_layers
    kept = _two_layers(getattr(config, "layer_types", None) or [""] * num_layers)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(small, name, [value[index] for index in kept])
    small.num_hidden_layers = len(kept)
    small.vocab_size = vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:  # some configs insist on having one
            setattr(small, name, 0)
    if getattr(config, "sliding_window", None) is not None:
        small.sliding_window = window
    for name in _MLP_WIDTHS:
        if isinstance(width := getattr(config, name, None), int):
            setattr(small, name, min(width, _COPY_MLP_WIDTH))
    return small


def _two_layers(layer_types: list[str]) -> list[int]:
    first_of_type = [layer_types.index(layer_type) for layer_type in dict.fromkeys(layer_types)]
    others = [index for index in range(len(layer_types)) if index not in first_of_type]
    return sorted((first_of_type + others)[:2])
