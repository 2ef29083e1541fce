"""What loading a model made, and how long each part of it took: for logs, metrics and whoever waits for the start.

Filled by the loader, read by the worker. Plain data.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from splitserve.engine.fusing import Fusion
from splitserve.engine.shape import ModelShape


class PartTimes:
    """Seconds by the name of the part; a part that comes again adds up. Parts do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True)
class WeightBytes:
    """`plain` are the model's parameters and buffers, each memory counted once; `packed` the linear layers' copies in
    the back end's own layout. A packed layer keeps no plain weight, unless it is tied to another module's."""

    plain: int
    packed: int

    @classmethod
    def of(cls, model: nn.Module, packed: int) -> "WeightBytes":
        """`packed` is the linear back end's figure."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*model.parameters(), *model.buffers())
        }
        return cls(sum(storages.values()), packed)


@dataclass(frozen=True)
class LoadReport:
    """`linear` and `attention` name the back ends that compute; `linear_reason` says why the linear layers are not
    packed, where they are not; `layers` how many decoder layers are fused; `shape` is the model's."""

    linear: str = ""
    linear_reason: str = ""
    attention: str = ""
    layers: Fusion = field(default_factory=Fusion)
    weights: WeightBytes = field(default_factory=lambda: WeightBytes(0, 0))
    pool_nbytes: int = 0
    shape: ModelShape = field(default_factory=ModelShape)
    seconds: dict[str, float] = field(default_factory=dict)
