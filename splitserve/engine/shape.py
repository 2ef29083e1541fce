"""What of a model decides how fast a step can be at best: its linear layers, its windows, its K and V.

Read by the loader, before back ends replace the layers; plain data from then on. A step's shape is plain, too: for each
sequence how many new tokens it computes and its length with them, and how many rows of logits it wants.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import DTYPES
from splitserve.engine.transformers_api import Conv1D

_EXPERTS = ".experts."


@dataclass(frozen=True)
class LinearShape:
    name: str  # of the module within the model
    out_features: int
    in_features: int
    has_bias: bool
    is_head: bool  # computes logits: only for the rows that are sampled from

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """`windows` says per layer how many tokens it looks at, None for all; `num_expert_weights` are those that one token
    meets of a mixture of experts, over all layers. The default is a model of nothing."""

    linears: tuple[LinearShape, ...] = ()
    num_expert_weights: int = 0
    weight_nbytes: int = 0  # of one weight
    windows: tuple[int | None, ...] = ()
    num_heads: int = 0
    head_dim: int = 0
    layer_token_nbytes: int = 0  # K and V of one token in one layer

    @cached_property
    def num_weights(self) -> int:
        """Those that every row of a step meets, the head's apart."""
        return sum(linear.num_weights for linear in self.linears if not linear.is_head) + self.num_expert_weights

    @cached_property
    def num_head_weights(self) -> int:
        return sum(linear.num_weights for linear in self.linears if linear.is_head)

    @cached_property
    def _num_full(self) -> int:
        return self.windows.count(None)

    @cached_property
    def _num_by_window(self) -> tuple[tuple[int, int], ...]:
        return tuple(Counter(window for window in self.windows if window is not None).items())

    def num_keys(self, num_new: int, context: int) -> int:
        """Tokens whose K and V the last `num_new` of `context` tokens look at, themselves included: over all layers."""
        num_keys = self._num_full * context
        for window, num_layers in self._num_by_window:
            num_keys += num_layers * min(context, window + num_new - 1)
        return num_keys

    def num_pairs(self, num_new: int, context: int) -> int:
        """Pairs of one of these tokens and one that it looks at."""
        start = context - num_new
        num_pairs = self._num_full * (_num_pairs(context, context) - _num_pairs(start, context))
        for window, num_layers in self._num_by_window:
            num_pairs += num_layers * (_num_pairs(context, window) - _num_pairs(start, window))
        return num_pairs

    def kv_nbytes(self, context: int) -> int:
        """Bytes of K and V that one new token's attention reads in a sequence of `context` tokens, itself included."""
        return self.num_keys(1, context) * self.layer_token_nbytes

    @property
    def pair_flops(self) -> int:
        """Useful operations of a pair in one layer: two for each multiplication of Q·K and of weights·V."""
        return 4 * self.head_dim * self.num_heads

    def attention_flops(self, num_new: int, context: int) -> int:
        """Useful operations of causal attention."""
        return self.pair_flops * self.num_pairs(num_new, context)

    def linear_flops(self, num_tokens: int, num_logit_rows: int) -> int:
        """Two operations for each weight and row; the head computes `num_logit_rows` rows."""
        return 2 * (num_tokens * self.num_weights + num_logit_rows * self.num_head_weights)

    def flops(self, sequences: Iterable[tuple[int, int]], num_logit_rows: int) -> int:
        """Useful operations of a step: those of its linear layers and of its attention. `sequences` are (new tokens,
        context with them)."""
        num_tokens = attention = 0
        for num_new, context in sequences:
            num_tokens += num_new
            attention += self.attention_flops(num_new, context)
        return self.linear_flops(num_tokens, num_logit_rows) + attention


def read_shape(model: Any, layout: KVLayout, num_heads: int) -> ModelShape:
    """Of transformers' model as it comes, with weights or on the meta device; `layout` is that of the engine's pool."""
    head = model.get_output_embeddings()
    linears = tuple(
        LinearShape(name, *_features(module), module.bias is not None, module is head)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and _EXPERTS not in name
    )
    return ModelShape(
        linears=linears,
        num_expert_weights=count_expert_weights(model)[1],
        weight_nbytes=DTYPES[layout.dtype].itemsize,
        windows=_windows(model.config),
        num_heads=num_heads,
        head_dim=layout.head_dim,
        layer_token_nbytes=layout.token_nbytes // layout.num_layers,
    )


def _features(layer: Any) -> tuple[int, int]:
    """Outputs and inputs; GPT-2's layers have their weights the other way round."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)


def count_expert_weights(model: Any) -> tuple[int, int]:
    """Of a mixture of experts: the weights of all of them, and of those that one token chooses. Else none."""
    config = model.config
    in_experts = sum(parameter.numel() for name, parameter in model.named_parameters() if _EXPERTS in name)
    chosen = _first(config, "num_experts_per_tok", "moe_topk")
    experts = _first(config, "num_local_experts", "num_experts", "moe_num_experts")
    return in_experts, in_experts * chosen // experts if chosen and experts else in_experts


def _first(config: Any, *names: str) -> Any:
    """What families of models call by different names."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _num_pairs(num_tokens: int, window: int) -> int:
    """Pairs of a token and one that it looks at, itself included, of the first `num_tokens`."""
    whole = min(num_tokens, window)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * whole
