"""The linear layers' replaceable part: what is done to a model's `nn.Linear` modules before its first forward.

Called by the loader, which reports what is left in memory. The weights belong to the model, packed or not.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import nn

# Layers of one module that read the same rows, by the names that transformers gives them in nearly all families.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# oneDNN asks for how many rows it should lay the weights out. One layout serves every number of rows as well as one of
# its own would (measured from 1 to 2,048), so there is one copy.
_LAYOUT_ROWS = 16

_TRIAL_OUTPUTS, _TRIAL_ROWS = 64, 8


class LinearBackend(Protocol):
    name: str

    def prepare(self, model: nn.Module) -> None:
        """Replaces or repacks the model's linear layers in place.

        ValueError for a model without linear layers, which is not one of ours.
        """
        ...

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The modules that compute the linear layers of a prepared model: `[..., in_features]` to
        `[..., out_features]`, attributes of theirs.

        A row's result should not depend on how many rows there are, from some number on: the self-test tries each of
        these modules, and the runner never runs fewer rows than it found. What is not here, it cannot try.
        """
        ...

    def packed_nbytes(self, model: nn.Module) -> int:
        """Memory of a prepared model's weights that are no parameters of its modules."""
        ...


class PlainBackend:
    """The layers as they are: `F.linear` on plain weights, on any device."""

    name = "torch"

    def prepare(self, model: nn.Module) -> None:
        _require_linear_layers(model)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, nn.Linear)]

    def packed_nbytes(self, model: nn.Module) -> int:
        return 0


class OneDnnBackend:
    """Weights in oneDNN's own layout: a step of few tokens takes two thirds of the time, and rounds the same with any
    number of rows in bfloat16 and in float32. Layers that read the same rows are one matmul, which takes less time than
    several small ones."""

    name = "onednn"

    @torch.inference_mode()
    def prepare(self, model: nn.Module) -> None:
        _require_linear_layers(model)
        for parent in list(model.modules()):
            for names in SIBLINGS:
                _merge(parent, names)
        for parent, name, plain in _linear_layers(model):
            setattr(parent, name, PackedLinear.of(plain))
        is_exact = cache(_lone_row_is_exact)
        for layer in model.modules():
            if isinstance(layer, PackedLinear):
                layer.pads_lone_row = not is_exact(layer.in_features, layer.dtype)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Subclasses of `nn.Linear`, which are not packed, among them."""
        return [module for module in model.modules() if isinstance(module, PackedLinear | nn.Linear)]

    def packed_nbytes(self, model: nn.Module) -> int:
        return sum(module.packed_nbytes for module in model.modules() if isinstance(module, PackedLinear))


class PackedLinear(nn.Module):
    """A linear layer from a packed copy of `weight` `[out_features, in_features]`, which it does not keep."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # Neither parameter nor buffer: nothing that moves or saves a model can handle this layout.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAYOUT_ROWS)
        self.pads_lone_row = True
        self._compute = torch.ops.mkldnn._linear_pointwise.default  # found once: looking for it takes time in each call

    @classmethod
    def of(cls, layer: nn.Linear) -> "PackedLinear":
        """Computes what `layer` does. The plain weight is gone with it, unless a tied embedding holds it too."""
        return cls(layer.weight, layer.bias)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed copy, padding included."""
        return int(torch.ops.mkldnn._nbytes(self._packed))

    @property
    def packed_address(self) -> int:
        """Where they lie, for as long as the layer lives."""
        return int(torch.ops.mkldnn.data_ptr(self._packed))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., rows, in_features]` to `[..., rows, out_features]`, in the weight's dtype."""
        if self.pads_lone_row and rows.shape[-2] == 1:
            return self.compute(torch.cat((rows, rows), dim=-2)).narrow(-2, 0, 1)
        return self.compute(rows)

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """As `forward`, with exactly these rows."""
        result: torch.Tensor = self._compute(rows, self._packed, self.bias, "none", [], "")
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _lone_row_is_exact(in_features: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN's faster way for a lone row adds up in the order that it has for more rows.

    Tried on sums that cancel: what is left of them is rounding, so that another order shows in nearly all of them.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((count, in_features // 2), generator=generator) for count in (_TRIAL_OUTPUTS, _TRIAL_ROWS)]
    rest = [torch.zeros((part.shape[0], in_features % 2)) for part in parts]
    weight = torch.cat((parts[0], -parts[0].flip(1), rest[0]), dim=1)
    rows = torch.cat((parts[1], parts[1].flip(1), rest[1]), dim=1).to(dtype)
    layer = PackedLinear(weight.to(dtype), None)
    alone = [layer.compute(rows[index : index + 1]) for index in range(_TRIAL_ROWS)]
    return torch.equal(torch.cat(alone), layer.compute(rows))


class LinearGroup(nn.Module):
    """Several layers that read the same rows, packed as one. Whichever of them is called first computes them all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._widths = [layer.out_features for layer in layers]
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weights: list[torch.Tensor] = [layer.weight for layer in layers]
        self.whole = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None)
        self._rows: torch.Tensor | None = None
        self._results: Sequence[torch.Tensor] = ()

    def result(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """What layer `index` makes of `rows`, a view with the whole's strides.

        Results are kept until the last layer has been called, for that very tensor only: a layer that is called on its
        own, or out of order, is right as well.
        """
        if self._rows is not rows:
            self._rows, self._results = rows, torch.split(self.whole.forward(rows), self._widths, dim=-1)
        result = self._results[index]
        if index == len(self._widths) - 1:
            self._rows, self._results = None, ()
        return result


class GroupMember(nn.Module):
    """Takes the place of one of the layers in `group`."""

    def __init__(self, group: LinearGroup, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.group = group
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.group.result(self._index, rows)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def choose_linear(device: str, dtype: torch.dtype) -> tuple[LinearBackend, str]:
    """The fastest back end that works here, and, where that is the plain one, why it is."""
    reason = _why_not_packed(device, dtype)
    return (PlainBackend(), reason) if reason else (OneDnnBackend(), "")


def _why_not_packed(device: str, dtype: torch.dtype) -> str:
    if torch.device(device).type != "cpu":
        return f"packing is for the CPU, not for {device}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    layer = nn.Linear(24, 40, dtype=dtype)
    rows = torch.randn(5, 24, dtype=dtype)
    try:
        with torch.inference_mode():
            distance = float((PackedLinear.of(layer)(rows) - layer(rows)).abs().max())
    except (RuntimeError, AttributeError) as error:  # an operator that is missing, or that refuses this processor
        return f"oneDNN's packed layers do not run here: {str(error).splitlines()[0]}"
    if not distance < 0.1:
        return f"oneDNN's packed layers are wrong here, by {distance:.2g}"
    return ""


def _merge(parent: nn.Module, names: Sequence[str]) -> None:
    """Replaces the children of these names by one matmul, if they are plain linear layers of one kind."""
    children = [getattr(parent, name, None) for name in names]
    # Not isinstance: subclasses compute something else.
    layers: list[nn.Linear] = [child for child in children if type(child) is nn.Linear]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    if len(layers) < len(names) or len(kinds) > 1:
        return
    group = LinearGroup(layers)
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, GroupMember(group, index, layer))


def _require_linear_layers(model: nn.Module) -> None:
    if not _linear_layers(model):
        raise ValueError("the model has no linear layers")


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of every `nn.Linear`; subclasses compute something else and are not among them."""
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]
