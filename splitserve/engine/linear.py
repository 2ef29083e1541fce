"""The linear layers' replaceable part: what is done to a model's `nn.Linear` modules before its first forward.

Called by the loader, which reports what is left in memory. The weights belong to the model, packed or not.
"""

from typing import Protocol

import torch
from torch import nn

# oneDNN asks for how many rows it should lay the weights out. One layout serves every number of rows as well as one of
# its own would (measured from 1 to 2,048), so there is one copy.
_LAYOUT_ROWS = 16


class LinearBackend(Protocol):
    name: str

    def prepare(self, model: nn.Module) -> None:
        """Replaces or repacks the model's linear layers in place.

        The layers' rows must not depend on how many rows there are, from two on: the runner never runs fewer.
        ValueError for a model without linear layers, which is not one of ours.
        """
        ...


class TorchLinear:
    """The layers as they are: `F.linear` on plain weights, on any device."""

    name = "torch"

    def prepare(self, model: nn.Module) -> None:
        _linear_layers(model)


class PackedLinears:
    """Weights in oneDNN's own layout: a step of few tokens takes two thirds of the time, and rounds the same with any
    number of rows in bfloat16 and in float32."""

    name = "onednn"

    @torch.inference_mode()
    def prepare(self, model: nn.Module) -> None:
        for parent, name, layer in _linear_layers(model):
            setattr(parent, name, PackedLinear(layer))


class PackedLinear(nn.Module):
    """Computes what `layer` does, from a packed copy of its weight.

    The plain weight is not kept: it is gone with `layer`, unless something else (a tied embedding) holds it too.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        # Neither parameter nor buffer: nothing that moves or saves a model can handle this layout.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _LAYOUT_ROWS)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed copy, padding included."""
        return int(torch.ops.mkldnn._nbytes(self._packed))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the weight's dtype."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def choose_linear(device: str, dtype: torch.dtype) -> tuple[LinearBackend, str]:
    """The fastest back end that works here, and, where that is the plain one, why it is."""
    reason = _why_not_packed(device, dtype)
    return (TorchLinear(), reason) if reason else (PackedLinears(), "")


def _why_not_packed(device: str, dtype: torch.dtype) -> str:
    if torch.device(device).type != "cpu":
        return f"packing is for the CPU, not for {device}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    layer = nn.Linear(24, 40, dtype=dtype)
    rows = torch.randn(5, 24, dtype=dtype)
    try:
        with torch.inference_mode():
            distance = float((PackedLinear(layer)(rows) - layer(rows)).abs().max())
    except (RuntimeError, AttributeError) as error:  # an operator that is missing, or that refuses this processor
        return f"oneDNN's packed layers do not run here: {str(error).splitlines()[0]}"
    if not distance < 0.1:
        return f"oneDNN's packed layers are wrong here, by {distance:.2g}"
    return ""


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of every `nn.Linear`; subclasses compute something else and are not among them."""
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]
    if not found:
        raise ValueError("the model has no linear layers")
    return found
