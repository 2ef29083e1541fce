"""Attention over the paged pool, as transformers' models call it: the back ends' contract and the interface function.

The runner passes a `ForwardContext` through the model's forward; each attention layer hands it to `paged_attention`,
which lets the back end's plan store the new K and V in the pool and read all of them. State belongs to the runner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from splitserve.engine.packing import PackedBatch, fill_up
from splitserve.engine.pool import KVPool
from splitserve.engine.transformers_api import ALL_ATTENTION_FUNCTIONS

INTERFACE_NAME = "splitserve_paged"


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks for beyond causal attention: `window` counts the token itself; None means no limit."""

    scaling: float
    softcap: float | None
    window: int | None


class AttentionPlan(Protocol):
    """One forward's attention, prepared once and used by every layer: each first stores, then attends."""

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Writes the batch's K and V, `[tokens, kv_heads, head_dim]`, to their slots in the pool."""
        ...

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """`query` and the result are `[tokens, heads, head_dim]` in the model's dtype; K and V are in the pool.

        A row's result must depend on its own sequence only, bit for bit: not on the batch nor on chunks.
        """
        ...


class AttentionBackend(Protocol):
    name: str

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> AttentionPlan:
        """Prepares one forward of a model with `num_heads` query heads, before its first layer runs."""
        ...


@dataclass
class ForwardContext:
    """Travels through the model's forward as keyword argument `paged_context`."""

    batch: PackedBatch
    plan: AttentionPlan
    on_layer: Callable[[], None]
    layers_called: list[int] = field(default_factory=list)
    rows_in_use: dict[int, torch.Tensor] = field(default_factory=dict)
    fitting_embeddings: object = None  # those that a fused layer has looked at; the others get the same

    def rows(self, like: torch.Tensor, width: int) -> torch.Tensor:
        """`[1, rows, width]` with the rows, dtype and device of `like`: the same memory each time in this forward, for
        what is read before the next is asked for."""
        found = self.rows_in_use.get(width)
        if found is None:
            found = self.rows_in_use[width] = like.new_empty((1, like.shape[1], width))
        return found

    def enter(self, layer: int) -> None:
        """Called once for each layer's attention, in order."""
        self.layers_called.append(layer)
        self.on_layer()


def register_paged_attention() -> None:
    """Makes `attn_implementation="splitserve_paged"` known to transformers; doing it again changes nothing.

    It gets no function that makes masks, so transformers makes none and does not look for packed sequences, which it
    would find by a tensor's values: causality and windows follow from positions in the pool.
    """
    ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim], as key and value with kv_heads
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    paged_context: ForwardContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: returns `[1, tokens, heads, head_dim]` and no weights."""
    if paged_context is None:
        raise ValueError("the model does not pass our keyword arguments on to its attention")
    if kwargs.get("s_aux") is not None:
        raise ValueError("the model uses attention sinks")
    if getattr(module, "is_causal", True) is False:
        raise ValueError("the model attends to later tokens; only causal attention is served")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ValueError("the model's attention does not know its layer")
    spec = AttentionSpec(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap, window=sliding_window
    )
    heads_last = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    paged_context.enter(layer)
    return attend_in_pool(paged_context, layer, spec, *heads_last).unsqueeze(0), None


def attend_in_pool(
    context: ForwardContext,
    layer: int,
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """One layer's attention: `query` and the result are `[rows, heads, head_dim]`, `key` and `value` have KV heads.

    Rows after the batch's last token are filled up.
    """
    num_rows, num_tokens = query.shape[0], context.batch.num_tokens
    if num_rows > num_tokens:
        query, key, value = query[:num_tokens], key[:num_tokens], value[:num_tokens]
    context.plan.store(key, value, layer)
    return fill_up(context.plan.attend(query, layer, spec), num_rows)
