"""What computes a model's forwards here: attention, linear layers, and the decoder layers that are fused of both.

Chosen by the loader, used by the runner. The parts that a GPU of another kind would bring its own of.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.engine.attention import AttentionBackend
from splitserve.engine.cpu_attention import CpuAttention, choose_attention
from splitserve.engine.fusing import Fusion, fuse_layers
from splitserve.engine.kernels.compiled import Progress
from splitserve.engine.linear import LinearBackend, choose_linear
from splitserve.engine.pool import DTYPES


@dataclass(frozen=True)
class Backends:
    """`linear_reason` says why the linear layers stay as they are, where that is nobody's choice."""

    attention: AttentionBackend
    linear: LinearBackend
    linear_reason: str = ""

    def load_kernels(self, dtype: str) -> None:
        """Those for models of another dtype than the one that the back ends were chosen for."""
        if isinstance(self.attention, CpuAttention):
            self.attention.prepare(dtype)

    def prepare(self, model: Any, dtype: str) -> Fusion:
        """Makes `model` ready for forwards in `dtype`, in place. ValueError for a model without linear layers."""
        self.linear.prepare(model)
        return fuse_layers(model, self.attention, dtype)


def choose_backends(
    device: str,
    dtype: str,
    kernel_folder: Path | None,
    progress: Progress,
    attention: AttentionBackend | None = None,
    linear: LinearBackend | None = None,
) -> Backends:
    """Those given, and the fastest that work on `device` for the others."""
    if attention is None:
        attention = choose_attention(device, dtype, kernel_folder, progress)
    if linear is not None:
        return Backends(attention, linear)
    linear, reason = choose_linear(device, DTYPES[dtype])
    if reason:
        progress(f"linear layers stay as they are: {reason}")
    return Backends(attention, linear, reason)
