"""Random attention problems, their answer in float64, and the way to a back end's answer without a model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splitserve.engine.attention import AttentionBackend, AttentionSpec
from splitserve.engine.batch import Segment
from splitserve.engine.layout import KVLayout
from splitserve.engine.packing import pack
from splitserve.engine.pool import DTYPES, KVPool


@dataclass(frozen=True)
class Problem:
    """Sequences of ragged lengths with their Q, K and V, `[tokens, heads, head_dim]` each, and blocks in one pool."""

    layout: KVLayout
    num_heads: int
    spec: AttentionSpec
    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    tables: tuple[tuple[int, ...], ...]
    num_blocks: int
    layer: int


def make_problem(
    lengths: Sequence[int],
    *,
    seed: int,
    num_kv_heads: int = 2,
    heads_per_kv_head: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    scaling: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Problem:
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layout = KVLayout(2, num_kv_heads, head_dim, block_size, dtype)
    num_heads = num_kv_heads * heads_per_kv_head

    def tensors(heads: int, size: float) -> tuple[torch.Tensor, ...]:
        shapes = [(length, heads, head_dim) for length in lengths]
        return tuple((torch.randn(shape, generator=generator) * size).to(DTYPES[dtype]) for shape in shapes)

    counts = [layout.blocks_for(length) for length in lengths]
    num_blocks = sum(counts) + 3
    blocks = chooser.sample(range(num_blocks), sum(counts))
    return Problem(
        layout=layout,
        num_heads=num_heads,
        spec=AttentionSpec(head_dim**-0.5 if scaling is None else scaling, softcap, window),
        queries=tensors(num_heads, 2.0),
        keys=tensors(num_kv_heads, 1.0),
        values=tensors(num_kv_heads, 1.0),
        tables=tuple(tuple(blocks.pop() for _ in range(count)) for count in counts),
        num_blocks=num_blocks,
        layer=1,
    )


def expected(problem: Problem, sequence: int) -> np.ndarray:
    """Attention of one sequence, `[tokens, heads, head_dim]` in float64."""
    query, key, value = (
        tensors[sequence].double().numpy() for tensors in (problem.queries, problem.keys, problem.values)
    )
    spec, ratio = problem.spec, problem.num_heads // problem.layout.num_kv_heads
    scores = np.einsum("qhd,khd->hqk", query, key.repeat(ratio, axis=1)) * spec.scaling
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    distance = np.arange(len(query))[:, None] - np.arange(len(query))
    hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value.repeat(ratio, axis=1))


def poisoned_pool(problem: Problem) -> KVPool:
    pool = KVPool(problem.layout, problem.num_blocks)
    pool.tensor.fill_(torch.nan)
    return pool


def compute(
    problem: Problem, backend: AttentionBackend, pool: KVPool, pieces: Sequence[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """One forward over `pieces`, each (sequence, start, end), as a runner makes it; one result per piece."""
    segments = [Segment([0] * (end - start), start, problem.tables[index], False) for index, start, end in pieces]
    batch = pack(segments, problem.layout.block_size, torch.device("cpu"))
    pool.clear(batch.started_blocks)
    plan = backend.plan(batch, pool, problem.num_heads)

    def rows(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        # As models make them: heads first in shape, tokens first in memory.
        packed = torch.cat([tensors[index][start:end] for index, start, end in pieces])
        return packed.transpose(0, 1).unsqueeze(0)[0].transpose(0, 1)

    plan.store(rows(problem.keys), rows(problem.values), problem.layer)
    output = plan.attend(rows(problem.queries), problem.layer, problem.spec)
    assert output.dtype == problem.queries[0].dtype
    return list(output.split([end - start for _, start, end in pieces]))
