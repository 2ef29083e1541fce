"""The linear layers' replaceable part: what is done to a model's `nn.Linear` modules before its first forward."""

from typing import Protocol

from torch import nn


class LinearBackend(Protocol):
    name: str

    def prepare(self, model: nn.Module) -> None:
        """Replaces or repacks the model's linear layers in place.

        The layers' rows must not depend on how many rows there are, from two on: the runner never runs fewer.
        """
        ...


class TorchLinear:
    """The layers as they are: `F.linear` on plain weights, on any device."""

    name = "torch"

    def prepare(self, model: nn.Module) -> None:
        """Checks only that there is something to run: a model without linear layers is not one of ours."""
        if not any(isinstance(module, nn.Linear) for module in model.modules()):
            raise ValueError("the model has no linear layers")
