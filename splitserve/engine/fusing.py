"""Which decoder layers are fused: those whose fused form computes, in a trial, what transformers' own computes.

Called by the loader once per model, after its linear layers are packed. How a layer looks only suggests a fused form;
the trial decides, on rows and positions of many sizes and with the model's own weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from splitserve.engine import support
from splitserve.engine.attention import AttentionBackend, AttentionSpec, ForwardContext
from splitserve.engine.batch import Segment
from splitserve.engine.cpu_attention import CpuAttention
from splitserve.engine.fused_layer import FusedDecoderLayer
from splitserve.engine.packing import pack

# Sizes of a trial's rows: usual, small enough for an epsilon to count, large enough for a limit to.
_SCALES = (1.0, 1e-3, 30.0, 1.0, 1e-2, 1e3, 1.0)
# Root-mean-square distance of a row from transformers', relative to its size: some roundings' worth.
_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 2e-5}


# What a model of another structure answers when it is taken for one of this.
_NOT_OF_THIS_FORM = (ValueError, TypeError, RuntimeError, AttributeError, KeyError)


@dataclass(frozen=True)
class Fusion:
    """How many of a model's decoder layers are fused, and why not the first of the others."""

    num_fused: int = 0
    num_layers: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"fused {self.num_fused} of {self.num_layers}" + (f": {self.reason}" if self.reason else "")


@torch.inference_mode()
def fuse_layers(model: Any, attention: AttentionBackend, dtype: str) -> Fusion:
    """Replaces the decoder layers of `model` that have a fused form equal to them; others stay as they are."""
    num_layers = model.config.num_hidden_layers
    if not isinstance(attention, CpuAttention):
        return Fusion(0, num_layers, f"they are called with the CPU's attention, not with {attention.name}")
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return Fusion(0, num_layers, "the model has no list of layers")
    num_fused, reasons = 0, []
    try:
        inputs = _TrialInputs.of(model)
    except _NOT_OF_THIS_FORM as error:
        return Fusion(0, num_layers, str(error))
    for index, layer in enumerate(layers):
        try:
            layers[index] = _fused(layer, inputs, attention, dtype)
            num_fused += 1
        except _NOT_OF_THIS_FORM as error:
            reasons.append(f"layer {index}: {error}")
    return Fusion(num_fused, num_layers, reasons[0] if reasons else "")


@dataclass(frozen=True)
class _TrialInputs:
    """What every layer of a model is tried with."""

    rows: torch.Tensor  # [1, rows, hidden_size]
    positions: torch.Tensor  # [1, rows]
    embeddings: Any
    head_dim: int

    @classmethod
    def of(cls, model: Any) -> "_TrialInputs":
        _, _, head_dim = support.attention_shape(model.config)
        rows, positions = _rows(model), _positions(model)
        return cls(rows, positions, model.base_model.rotary_emb(rows, position_ids=positions), head_dim)


def _fused(layer: nn.Module, inputs: _TrialInputs, attention: CpuAttention, dtype: str) -> FusedDecoderLayer:
    """ValueError if there is no fused form, or it computes something else; other errors if `layer` does not run so."""
    expected = _Trial(layer, inputs)
    fused = FusedDecoderLayer(layer, expected.spec, inputs.head_dim, attention, dtype)
    actual = _Trial(fused, inputs)
    if actual.spec is not expected.spec:
        raise ValueError("rows or rotary embeddings of another form")
    for name, theirs in expected.tensors.items():
        distance = _distance(actual.tensors[name], theirs)
        if not distance <= _TOLERANCE[inputs.rows.dtype]:  # NaN fails too
            raise ValueError(f"the fused {name} differs by {distance:.2g} of its size")
    return fused


class _Trial:
    """One run of a layer on rows of a pretended batch, whose K and V go here and whose attention returns the query."""

    spec: AttentionSpec

    def __init__(self, layer: nn.Module, inputs: _TrialInputs) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        batch = pack([Segment([0] * len(_SCALES), 0, [0], wants_logits=False)], len(_SCALES), inputs.rows.device)
        output = layer(
            inputs.rows.clone(),
            attention_mask=None,
            position_ids=inputs.positions,
            position_embeddings=inputs.embeddings,
            cache=None,
            use_cache=False,
            paged_context=ForwardContext(batch, self, lambda: None),
        )
        self.tensors["output"] = output[0]

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        self.tensors |= {"K": key.clone(), "V": value.clone()}

    def attend(self, query: torch.Tensor, layer: int, spec: AttentionSpec) -> torch.Tensor:
        self.spec = spec
        self.tensors["query"] = query.clone()
        return self.tensors["query"]


def _rows(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((1, len(_SCALES), model.config.hidden_size), generator=generator)
    return (rows * torch.tensor(_SCALES).unsqueeze(-1)).to(model.dtype)


def _positions(model: Any) -> torch.Tensor:
    """From the first to the last: some layers change their ways far from the start."""
    last = support.max_positions(model.config) - 1
    return torch.linspace(0, last, len(_SCALES)).long().unsqueeze(0)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest of all rows'."""
    ours, theirs = (tensor.float().reshape(len(_SCALES), -1) for tensor in (ours, theirs))
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())
