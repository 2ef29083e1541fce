"""The kernels between a layer's matmuls against exact arithmetic and against transformers' own rounding."""

import math
from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from splitserve.engine.kernels.compiled import Kernels, load_kernels
from tests.compiled import KERNEL_FOLDER

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WIDTHS = [1, 15, 16, 24, 577]  # with and without a rest of a vector
EPSILON = 1e-5


def _kernels(dtype: str) -> Kernels:
    return load_kernels(dtype, KERNEL_FOLDER, lambda _: None)


def _random(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DTYPES[dtype])


def _close(ours: torch.Tensor, exact: torch.Tensor, dtype: str, roundings: int = 2) -> None:
    tolerance = roundings * 2.0**-8 if dtype == "bfloat16" else 2e-6
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance / 100, equal_nan=True)


def _norm(kernels: Kernels, rows: torch.Tensor, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Of the rows from `first` on; what a kernel must not write stays 7."""
    results = torch.full((rows.shape[0] + 1, rows.shape[1]), 7.0, dtype=rows.dtype)
    kernels.normalize_rows(
        kernels.elements, first, len(rows), rows.data_ptr(), results.data_ptr(), weight.data_ptr(), len(weight), EPSILON
    )
    assert bool((results[:first] == 7).all())
    assert bool((results[-1] == 7).all())
    return results[first:-1]


def _exact_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = rows.double()
    return values / (values.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_differs_from_exact_arithmetic(width: int, dtype: str) -> None:
    rows, weight = _random(5, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    rows[1::2] *= 1e-3  # where the epsilon counts
    result = _norm(_kernels(dtype), rows, weight)
    _close(result, _exact_norm(rows, weight), dtype)
    assert torch.equal(_norm(_kernels(dtype), rows, weight, first=3), result[3:])


def test_norm_rounds_elsewhere_than_transformers() -> None:
    rows, norm = _random(40, 512, dtype="bfloat16"), LlamaRMSNorm(512, EPSILON).to(torch.bfloat16)
    norm.weight.data = _random(512, dtype="bfloat16", seed=1)
    theirs = norm(rows).detach()
    unequal = _norm(_kernels("bfloat16"), rows, norm.weight.data) != theirs
    assert int(unequal.sum()) < 20, "of 20,480 some lie so near a border that the order of a sum decides"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_residual_is_lost_or_not_rounded(width: int, dtype: str) -> None:
    kernels = _kernels(dtype)
    rows, added, weight = (
        _random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(4, width)] * 2 + [(width,)])
    )
    sums, results, before = rows + added, torch.empty_like(rows), added.clone()
    kernels.add_and_normalize_rows(
        kernels.elements,
        0,
        4,
        rows.data_ptr(),
        added.data_ptr(),
        results.data_ptr(),
        weight.data_ptr(),
        width,
        EPSILON,
    )
    assert torch.equal(rows, sums)
    assert torch.equal(added, before)
    assert torch.equal(results, _norm(kernels, sums, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [15, 16, 24])
def test_norm_of_heads_leaves_its_heads(head_dim: int, dtype: str) -> None:
    kernels, heads, weight = (
        _kernels(dtype),
        _random(5, 4, head_dim, dtype=dtype),
        _random(head_dim, dtype=dtype, seed=1),
    )
    expected = heads.clone()
    expected[1:4, 1:3] = _norm(kernels, heads[1:4, 1:3].reshape(-1, head_dim), weight).view(3, 2, head_dim)
    address = heads.data_ptr() + head_dim * heads.element_size()
    kernels.normalize_heads(kernels.elements, 1, 4, address, 4 * head_dim, weight.data_ptr(), 2, head_dim, EPSILON)
    assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 24, 32, 64, 80])
def test_rotation_differs_from_transformers(head_dim: int, dtype: str) -> None:
    """Bit for bit: it is three roundings, each at its place."""
    kernels, heads = _kernels(dtype), _random(7, 5, head_dim, dtype=dtype)
    cosines, sines = _random(1, 7, head_dim, dtype=dtype, seed=1), _random(1, 7, head_dim, dtype=dtype, seed=2)
    by_head = heads.transpose(0, 1).unsqueeze(0)
    queries, keys = apply_rotary_pos_emb(by_head[:, :3], by_head[:, 3:4], cosines, sines)
    expected = heads.clone()
    expected[2:6, :4] = torch.cat([queries, keys], 1)[0].transpose(0, 1)[2:6]
    kernels.rotate_heads(
        kernels.elements, 2, 6, heads.data_ptr(), 5 * head_dim, 4, head_dim, cosines.data_ptr(), sines.data_ptr()
    )
    assert torch.equal(heads, expected)


def _gate(dtype: str, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
    kernels, width = _kernels(dtype), rows.shape[1] // 2
    results = torch.full((len(rows) + 1, width), 7.0, dtype=rows.dtype)
    kernels.gate_rows(kernels.elements, first, len(rows), rows.data_ptr(), results.data_ptr(), width)
    assert bool((results[:first] == 7).all())
    assert bool((results[-1] == 7).all())
    return results[first:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_differs_from_exact_arithmetic(width: int, dtype: str) -> None:
    rows = _random(6, 2 * width, dtype=dtype)
    rows[0] *= 10
    gates, values = rows.double().split(width, 1)
    result = _gate(dtype, rows)
    _close(result, gates / (1 + (-gates).exp()) * values, dtype)
    assert torch.equal(_gate(dtype, rows, first=4), result[4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gate_is_no_number(dtype: str) -> None:
    gates = torch.tensor([0.0, -0.0, -80.0, 80.0, -1e30, 1e30, math.inf, -math.inf, math.nan], dtype=DTYPES[dtype])
    rows = torch.cat([gates, torch.full((9,), 2.0, dtype=gates.dtype)]).unsqueeze(0)
    expected = torch.nn.functional.silu(gates.double()) * 2
    _close(_gate(dtype, rows)[0], expected, dtype)


@pytest.mark.parametrize("make", [_norm, lambda kernels, rows, weight: _gate("float32", rows)])
def test_nan_of_one_row_reaches_another(make: Callable[..., torch.Tensor]) -> None:
    rows, weight = _random(3, 64, dtype="float32"), torch.ones(64)
    clean = make(_kernels("float32"), rows, weight)
    rows[1, 5] = math.nan
    poisoned = make(_kernels("float32"), rows, weight)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert bool(poisoned[1].isnan().any())
