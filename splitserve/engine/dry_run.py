"""A forward on a model without memory: what its layers ask of paged attention, before any weight is read.

Called by the loader, and by whoever has to know beforehand whether it would refuse a model; keeps no state.
"""

from typing import Any

import torch

from splitserve.engine import support
from splitserve.engine.attention import AttentionSpec, register_paged_attention
from splitserve.engine.backends import Backends
from splitserve.engine.batch import Segment
from splitserve.engine.checkpoint import empty_model
from splitserve.engine.layout import KVLayout
from splitserve.engine.linear import PlainBackend
from splitserve.engine.packing import PackedBatch
from splitserve.engine.pool import KVPool
from splitserve.engine.report import LoadReport
from splitserve.engine.runner import ModelRunner
from splitserve.engine.selftest_result import SelfTestResult
from splitserve.engine.support import UnsupportedModel
from splitserve.engine.trust import Trust

# transformers' other ways to compute experts look into the routers' results, and a tensor without memory has none.
_EXPERTS_WITHOUT_VALUES = "batched_mm"

_NUM_TOKENS = 2


def require_paged(config: Any, layout: KVLayout, num_heads: int, trust: Trust) -> Any:
    """The model of `config` without memory. UnsupportedModel, with the reason, unless every layer of it calls paged
    attention once, with K and V such as `layout` has, and asks for nothing that it does not do.

    A few models look at values to go on, and there are none: of them nothing is found out here, and the self-test has
    the word.
    """
    register_paged_attention()
    model = empty_model(config, trust)
    model.set_experts_implementation(_EXPERTS_WITHOUT_VALUES)
    runner = ModelRunner(
        model,
        KVPool(layout, _NUM_TOKENS, "meta"),
        Backends(_ShapeCheck(), PlainBackend()),
        num_heads=num_heads,
        max_model_len=support.max_positions(config),
        result=SelfTestResult.untested(min_rows=1),
        report=LoadReport(),
    )
    try:
        runner.run([Segment([0] * _NUM_TOKENS, 0, range(_NUM_TOKENS), wants_logits=True)])
    except ValueError as error:
        raise UnsupportedModel(f"{config.model_type} is not served: {error}") from error
    except RuntimeError:
        pass  # it asked for a value
    return model


class _ShapeCheck:
    """An attention back end that computes nothing."""

    name = "shape check"

    def plan(self, batch: PackedBatch, pool: KVPool, num_heads: int) -> "_ShapeCheckPlan":
        return _ShapeCheckPlan(num_heads, pool.layout)


class _ShapeCheckPlan:
    def __init__(self, num_heads: int, layout: KVLayout) -> None:
        self._query = (num_heads, layout.head_dim)
        self._kv = (layout.num_kv_heads, layout.head_dim)

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        self._require(key, self._kv, "keys", layer)
        self._require(value, self._kv, "values", layer)

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        self._require(query, self._query, "queries", layer)
        return torch.empty_like(query)

    def _require(self, tensor: torch.Tensor, expected: tuple[int, int], what: str, layer: int) -> None:
        heads = tuple(tensor.shape[1:])
        if heads != expected:
            raise ValueError(
                f"layer {layer} has {heads[0]} heads of size {heads[1]} for {what}, its config says {expected[0]} of "
                f"{expected[1]}; only layers of one shape are served, with keys and values of one size"
            )
