"""A decoder layer in a few large calls: matmuls, attention, and one compiled kernel for all that lies between two.

Made by `fusing`, which also tries it. It has the place and the children of a transformers layer, so that names and
weights of the model are what they were; the threads are those of the CPU's attention back end.
"""

from collections.abc import Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from splitserve.engine.attention import AttentionSpec, ForwardContext, attend_in_pool
from splitserve.engine.cpu_attention import CpuAttention, CpuAttentionPlan
from splitserve.engine.linear import GroupMember, PackedLinear
from splitserve.engine.pool import DTYPES

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedNorm(nn.Module):
    """Root-mean-square norm of rows, after a residual is added to them if there is one."""

    def __init__(self, norm: nn.Module, width: int, backend: CpuAttention, dtype: str) -> None:
        super().__init__()
        weight, epsilon = _norm_parts(norm, width, dtype)
        self._weight = weight  # the kernels have only its address
        self._rest = weight.data_ptr(), width, epsilon
        kernels = backend.prepare(dtype)
        self._normalize = partial(backend.run_rows, kernels.normalize_rows, kernels.elements)
        self._add_and_normalize = partial(backend.run_rows, kernels.add_and_normalize_rows, kernels.elements)

    def forward(self, rows: torch.Tensor, results: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`results`, as `rows` `[1, rows, width]` and contiguous; `residual` is added to `rows` in place."""
        count, source, target = rows.shape[1], rows.data_ptr(), results.data_ptr()
        if residual is None:
            self._normalize(count, source, target, *self._rest)
        else:
            self._add_and_normalize(count, source, residual.data_ptr(), target, *self._rest)
        return results


class _Parts(NamedTuple):
    """The modules of a fused layer, where Python finds them sooner than among the children of a module. Their forwards
    are called directly, for the same reason: nothing hooks them."""

    first_norm: FusedNorm
    qkv: PackedLinear
    o_proj: PackedLinear
    second_norm: FusedNorm
    gate_up: PackedLinear
    down_proj: PackedLinear


class FusedDecoderLayer(nn.Module):
    """norm → attention with rotary embeddings → residual → norm → MLP with a SiLU gate → residual."""

    def __init__(self, layer: nn.Module, spec: AttentionSpec, head_dim: int, backend: CpuAttention, dtype: str) -> None:
        """Takes the place of `layer`, whose attention asks for `spec`. ValueError for another structure."""
        super().__init__()
        self._original = [layer]  # in a list, it is no child: its children are this layer's
        self.self_attn: Any
        for name, child in _children(layer, _CHILDREN).items():
            self.add_module(name, child)
        attention = _children(layer.self_attn, _ATTENTION_CHILDREN, optional=_HEAD_NORMS)
        mlp = _children(layer.mlp, _MLP_CHILDREN)
        qkv = _whole(attention["q_proj"], attention["k_proj"], attention["v_proj"])
        gate_up, down_proj = _whole(mlp["gate_proj"], mlp["up_proj"]), _packed(mlp["down_proj"])
        self.first_norm = FusedNorm(layer.get_submodule("input_layernorm"), qkv.in_features, backend, dtype)
        self.second_norm = FusedNorm(layer.get_submodule("post_attention_layernorm"), qkv.in_features, backend, dtype)
        self._parts = _Parts(self.first_norm, qkv, _packed(attention["o_proj"]), self.second_norm, gate_up, down_proj)
        self._spec, self._head_dim, self._dtype = spec, head_dim, DTYPES[dtype]
        self._num_heads = [attention[name].out_features // head_dim for name in ("q_proj", "k_proj", "v_proj")]
        if 2 * down_proj.in_features != gate_up.out_features or sum(self._num_heads) * head_dim != qkv.out_features:
            raise ValueError("matmuls that do not fit together")
        kernels = backend.prepare(dtype)
        self._normalize_heads = partial(backend.run_rows, kernels.normalize_heads, kernels.elements)
        self._rotate_heads = partial(backend.run_rows, kernels.rotate_heads, kernels.elements)
        self._gate_rows = partial(backend.run_rows, kernels.gate_rows, kernels.elements)
        norms = [_norm_parts(attention[name], head_dim, dtype) for name in ("q_norm", "k_norm") if name in attention]
        self._head_norms = list(zip(norms, self._num_heads, strict=False))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, rows, width]
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        paged_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the layer in whose place this is; that one computes whatever is no forward on the paged pool."""
        if paged_context is None or not self._fits(hidden_states, position_embeddings, paged_context):
            own = {"position_embeddings": position_embeddings, "paged_context": paged_context}
            given = {name: value for name, value in own.items() if value is not None}
            return self._original[0](hidden_states, *args, **given, **kwargs)
        assert position_embeddings is not None
        parts = self._parts
        normalized = paged_context.rows(hidden_states, hidden_states.shape[2])
        qkv = parts.qkv.forward(parts.first_norm.forward(hidden_states, normalized))
        rows = parts.o_proj.forward(self._attend(qkv, *position_embeddings, paged_context))
        gate_up = parts.gate_up.forward(parts.second_norm.forward(rows, normalized, hidden_states))
        return parts.down_proj.forward(self._gate(gate_up, paged_context)).add_(rows)

    def _fits(
        self, rows: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor] | None, context: ForwardContext
    ) -> bool:
        """Whether all that kernels get the address of is as they take it to be."""
        if embeddings is None or rows.dtype != self._dtype or not rows.is_contiguous():
            return False
        if context.fitting_embeddings is embeddings:
            return True
        shape = (1, rows.shape[1], self._head_dim)
        for each in embeddings:
            if each.dtype != self._dtype or each.shape != shape or not each.is_contiguous():
                return False
        context.fitting_embeddings = embeddings
        return True

    def _attend(
        self, qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`[1, rows, heads * head_dim]`; `qkv` is changed in place."""
        _, count, stride = qkv.shape
        address, head_dim, num_heads = qkv.data_ptr(), self._head_dim, self._num_heads
        at = address
        for (weight, epsilon), number in self._head_norms:
            self._normalize_heads(count, at, stride, weight.data_ptr(), number, head_dim, epsilon)
            at += number * head_dim * qkv.element_size()
        num_rotated = num_heads[0] + num_heads[1]
        self._rotate_heads(count, address, stride, num_rotated, head_dim, cosines.data_ptr(), sines.data_ptr())
        layer, plan = self.self_attn.layer_idx, context.plan
        context.enter(layer)
        if isinstance(plan, CpuAttentionPlan):
            return plan.attend_merged(qkv, layer, self._spec)
        heads = qkv.view(count, -1, head_dim).split_with_sizes(num_heads, 1)
        return attend_in_pool(context, layer, self._spec, *heads).reshape(1, count, -1)

    def _gate(self, gate_up: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[1, rows, width of the MLP]`."""
        _, count, width = gate_up.shape
        gated = context.rows(gate_up, width // 2)
        self._gate_rows(count, gate_up.data_ptr(), gated.data_ptr(), width // 2)
        return gated


def _children(module: Any, names: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """The children of `module`, if these are their names and it has no parameters beside theirs."""
    children = dict(module.named_children())
    if children.keys() not in (names, names | optional) or any(True for _ in module.parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__} has other parts")
    return children


def _whole(*layers: Any) -> PackedLinear:
    """The one matmul that computes all of `layers`, in this order."""
    if not all(type(layer) is GroupMember and layer.group is layers[0].group for layer in layers):
        raise ValueError("matmuls that are not merged")
    whole: PackedLinear = layers[0].group.whole
    if sum(layer.out_features for layer in layers) != whole.out_features:
        raise ValueError("matmuls that are merged with others")
    return whole


def _packed(layer: Any) -> PackedLinear:
    if type(layer) is not PackedLinear:
        raise ValueError("matmuls that are not packed")
    return layer


def _norm_parts(norm: Any, width: int, dtype: str) -> tuple[torch.Tensor, float]:
    """A norm's one weight and its epsilon, by the names that transformers' families have for it."""
    parameters = dict(norm.named_parameters())
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if parameters.keys() != {"weight"} or not isinstance(epsilon, float):
        raise ValueError(f"{type(norm).__name__} is another norm")
    weight: torch.Tensor = parameters["weight"].detach()
    if weight.shape != (width,) or weight.dtype != DTYPES[dtype] or not weight.is_contiguous():
        raise ValueError(f"a norm's weight is {weight.dtype} {list(weight.shape)}")
    return weight, epsilon
