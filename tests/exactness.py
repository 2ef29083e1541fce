"""Where tests of exact recomputation may be skipped: only where the libraries below our code cannot do it.

Used by every test that needs invariant 10. Asking the runner alone would let a fault of ours silence its own tests.
"""

from functools import cache

import pytest
import torch

from splitserve.engine.pool import DTYPES
from splitserve.engine.runner import ModelRunner

_IN_FEATURES = 2048  # one row alone differs from about a thousand on
_MOST_ROWS = 300


def require_exact(runner: ModelRunner) -> None:
    """Goes on where `runner` recomputes exactly, skips where oneDNN does not do so by itself, and fails elsewhere."""
    if runner.recompute_exact:
        return
    reason = why_not_exact(runner.layout.dtype)
    assert reason, f"oneDNN is exact here in {runner.layout.dtype}, and the runner is not: {runner.report}"
    pytest.skip(reason)


@cache
@torch.inference_mode()
def why_not_exact(dtype: str) -> str:
    """Why packed matmuls of two and more rows do not give equal rows equal bits here, or "" if they do.

    The library's own operators are called, and none of our code.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    generator = torch.Generator().manual_seed(0)
    weight, rows = (
        torch.randn((count, _IN_FEATURES), generator=generator).to(DTYPES[dtype]) for count in (96, _MOST_ROWS)
    )
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        whole = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        for count in (2, 3, 4, 7, 8, 15, 16, 17, 33, 64, 100, 257):
            part = torch.ops.mkldnn._linear_pointwise(rows[-count:].clone(), packed, None, "none", [], "")
            if not torch.equal(part, whole[-count:]):
                return f"oneDNN's matmul of {count} rows in {dtype} rounds differently than that of {_MOST_ROWS} here"
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN's packed matmuls do not run here: {str(error).splitlines()[0]}"
    return ""


@torch.inference_mode()
def why_batched_matmul_is_not_exact() -> str:
    """Why torch's batched float32 matmuls of eight and more rows do not give equal rows equal bits here, or ""."""
    generator = torch.Generator().manual_seed(0)
    for depth, width in ((24, 256), (256, 24), (256, 128)):
        rows, right = (torch.randn(shape, generator=generator) for shape in ((2, 192, depth), (2, depth, width)))
        whole = rows @ right
        for count in (8, 9, 13, 16, 25, 64, 100, 191):
            if not torch.equal(rows[:, -count:].contiguous() @ right, whole[:, -count:]):
                return f"torch's matmul of {count} rows rounds differently than that of {rows.shape[1]} here"
    return ""
