"""Layers that round by the number of rows: the self-test says so, or finds from how many rows on they do not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from splitserve.engine import selftest
from splitserve.engine.batch import Segment
from splitserve.engine.linear import LinearBackend, PlainBackend
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from tests.compiled import KERNEL_FOLDER
from tests.engine.driver import random_prompt

TinyModel = Callable[..., Path]
Differs = Callable[[int], bool]


class _OddLinear(nn.Linear):
    """Its rows are the same bits with any number of rows, and other ones where `differs` says so of the number."""

    differs: Differs

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = nn.functional.linear(rows.double(), self.weight.double()).to(rows.dtype)
        return torch.nextafter(result, torch.full_like(result, torch.inf)) if self.differs(rows.shape[-2]) else result


class _OddBackend(PlainBackend):
    """Makes each of a model's layers one that `differs`."""

    name = "odd"

    def __init__(self, differs: Differs) -> None:
        self._differs = differs

    def prepare(self, model: nn.Module) -> None:
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = _OddLinear
                layer.differs = self._differs


def _load(
    directory: Path,
    linear: LinearBackend | None,
    dtype: str = "float32",
    progress: Callable[[str], None] | None = None,
) -> ModelRunner:
    return load_runner(
        directory,
        dtype=dtype,
        device="cpu",
        block_size=16,
        kv_cache_bytes=1 << 20,
        linear=linear,
        progress=progress,
        kernel_folder=KERNEL_FOLDER,
    )


@pytest.mark.parametrize(
    ("differs", "is_exact"),
    [
        (lambda rows: False, True),
        (lambda rows: 30 < rows < 50, False),  # a chunk
        (lambda rows: rows > 100, False),  # company of a prompt
        (lambda rows: 80 < rows < 90, False),  # a shorter prompt as company, before it decodes
        (lambda rows: rows < 3, False),  # a decode step
        (lambda rows: rows > 1000, True),  # never in these forwards
    ],
    ids=["never", "chunk", "company", "decode's prompts", "decode", "elsewhere"],
)
def test_rounding_that_depends_on_the_batch_is_not_seen(
    differs: Differs, is_exact: bool, tiny_model: TinyModel
) -> None:
    runner = _load(tiny_model("llama"), _OddBackend(differs))
    runner.result = replace(runner.result, min_rows=1)
    assert selftest.is_exact(runner) is is_exact


@pytest.mark.parametrize(
    ("differs", "recompute_exact", "min_rows"),
    [
        (lambda rows: False, True, 2),  # plain layers are not trusted with a lone row
        (lambda rows: rows < 2, True, 2),
        (lambda rows: rows < 16, True, 16),
        (lambda rows: rows < 17, False, 1),
        (lambda rows: rows == 112, False, 1),  # the fixed ids in company
        (lambda rows: rows == 257, False, 1),  # none of the fixed ids: a layer by itself
    ],
    ids=["never", "one row", "few rows", "more than are filled up", "in company", "a layer by itself"],
)
def test_runner_promises_what_its_layers_do_not_keep(
    differs: Differs, recompute_exact: bool, min_rows: int, tiny_model: TinyModel
) -> None:
    runner = _load(tiny_model("llama"), _OddBackend(differs))
    assert (runner.recompute_exact, runner.result.min_rows) == (recompute_exact, min_rows)
    if recompute_exact:
        _require_equal_rows(runner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_layers_run_on_too_few_rows(dtype: str, tiny_model: TinyModel) -> None:
    """Where the libraries of this machine need more than one row, or more than two, such steps are filled up. What a
    lone row of bfloat16 differs by is seen once in thousands of outputs."""
    runner = _load(tiny_model("llama", intermediate_size=1536), PlainBackend(), dtype)
    assert runner.result.min_rows > 1 or not runner.recompute_exact
    if runner.recompute_exact:
        _require_equal_rows(runner)
    fewest = max((count for count in range(1, 16) if not _is_exact_with(runner, count)), default=0)
    assert runner.result.min_rows > fewest or not runner.recompute_exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_called_exact(dtype: str, tiny_model: TinyModel) -> None:
    """They compute as many rows as the gate sends them, from weights that are no linear layer's."""
    said: list[str] = []
    runner = _load(tiny_model("mixtral"), None, dtype, said.append)
    assert not runner.recompute_exact
    reason = "model.layers.0.mlp.gate cannot be tried with any number of rows, as linear layers are"
    assert runner.result.inexact_reason == reason
    assert f"recomputation is not exact: {reason}" in said


def test_linear_layers_of_experts_are_called_exact(tiny_model: TinyModel) -> None:
    """Where a layer needs company, filling up a forward does not help one that gets few of its rows."""

    class Sparse(nn.Module):
        def __init__(self, expert: nn.Module) -> None:
            super().__init__()
            self.expert = expert

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result = torch.zeros_like(rows)
            result[:, ::9] = self.expert(rows[:, ::9])
            return result

    runner = _load(tiny_model("llama"), _OddBackend(lambda rows: rows < 2))
    assert runner.recompute_exact
    layer = runner.model.model.layers[1]
    layer.mlp = Sparse(layer.mlp)
    assert selftest.why_inexact(runner) == (
        "model.layers.1.mlp.expert.gate_proj gets some rows of a forward only, perhaps fewer than 2"
    )
    runner.result = replace(runner.result, min_rows=1)
    assert "gets some rows" not in selftest.why_inexact(runner)


def _is_exact_with(runner: ModelRunner, count: int) -> bool:
    """Whether plain layers of the model's shapes give `count` rows the bits that they have among more."""
    for layer in runner.model.modules():
        if isinstance(layer, nn.Linear):
            rows = torch.randn((64, layer.in_features), generator=torch.Generator().manual_seed(1)).to(layer.weight)
            if not torch.equal(layer(rows[:count]), layer(rows)[:count]):
                return False
    return True


def _require_equal_rows(runner: ModelRunner) -> None:
    """Logits, K and V of a prompt in one forward, then token by token and in small company."""
    prompt, table = random_prompt(48, seed=3), range(3)
    expected = runner.run([Segment(prompt, 0, table, True, True)])
    expected_kv = runner.pool.tensor[:3].clone()
    for num_others in (0, 1, 5):
        runner.pool.tensor.fill_(torch.nan)
        for index, token in enumerate(prompt):
            others = [Segment([5 + other], 0, [3 + other], False) for other in range(num_others)]
            assert torch.equal(runner.run([*others, Segment([token], index, table, True)])[0], expected[index])
        assert torch.equal(runner.pool.tensor[:3], expected_kv)
