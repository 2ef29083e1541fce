"""The attention back ends against float64, and what a row's result must not depend on: company, chunks, threads."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Event
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.attention import AttentionBackend
from splitserve.engine.batch import Segment
from splitserve.engine.cpu_attention import ROWS_PER_ITEM, CpuAttention, divide, make_items
from splitserve.engine.kernels.paging import make_geometry
from splitserve.engine.packing import pack
from splitserve.engine.torch_attention import TorchAttention
from tests.compiled import KERNEL_FOLDER
from tests.engine.attention_cases import Problem, compute, expected, make_problem, poisoned_pool
from tests.exactness import why_batched_matmul_is_not_exact

BACKENDS = [CpuAttention(KERNEL_FOLDER), TorchAttention()]

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

# The reference back end is as exact as the library's matmuls; ours has to be exact everywhere.
_INEXACT = why_batched_matmul_is_not_exact()
IF_EXACT = pytest.mark.skipif(bool(_INEXACT), reason=_INEXACT)
by_exact_backend = pytest.mark.parametrize(
    "backend", [BACKENDS[0], pytest.param(BACKENDS[1], marks=IF_EXACT)], ids=lambda backend: backend.name
)

# Relative to values of about 1: float32 sums of some hundred products, or an output rounded to bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}

SHAPES: list[dict[str, Any]] = [
    {},
    {"heads_per_kv_head": 1, "block_size": 8},
    {"heads_per_kv_head": 7, "num_kv_heads": 1, "head_dim": 80},
    {"heads_per_kv_head": 4, "head_dim": 96, "block_size": 32},
    {"heads_per_kv_head": 5, "head_dim": 24, "block_size": 7},
    {"heads_per_kv_head": 2, "head_dim": 128, "block_size": 1},
    {"heads_per_kv_head": 8, "num_kv_heads": 1, "head_dim": 256, "block_size": 512},
    {"window": 1},
    {"window": 20, "head_dim": 16},
    {"window": 100, "softcap": 3.0},
    {"softcap": 50.0, "scaling": 0.3, "head_dim": 8},
]


def _whole(problem: Problem, backend: AttentionBackend) -> list[torch.Tensor]:
    pieces = [(index, 0, len(query)) for index, query in enumerate(problem.queries)]
    return compute(problem, backend, poisoned_pool(problem), pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_backend
def test_attention_differs_from_float64(backend: AttentionBackend, shape: dict[str, Any], dtype: str) -> None:
    problem = make_problem([1, 5, 64, 65, 200], seed=3, dtype=dtype, **shape)
    for index, output in enumerate(_whole(problem, backend)):
        _require_near(output, problem, index)


def _require_near(output: torch.Tensor, problem: Problem, index: int) -> None:
    """The whole sequence's rows against float64."""
    difference = np.abs(output.double().numpy() - expected(problem, index)).max()
    assert difference < TOLERANCE[problem.layout.dtype], (index, difference)


def test_output_is_cut_off_instead_of_rounded() -> None:
    """Both within a vector and in the tail of a head."""
    problem = make_problem([200], seed=4, dtype="bfloat16", head_dim=24)
    nearest = torch.from_numpy(expected(problem, 0)).bfloat16()
    for backend in BACKENDS:
        is_nearest = _whole(problem, backend)[0] == nearest
        assert float(is_nearest[..., :16].float().mean()) > 0.99
        assert float(is_nearest[..., 16:].float().mean()) > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_over_an_old_cache_differs_from_float64(dtype: str) -> None:
    """K and V of the earlier tokens come from earlier forwards, and only the last row is computed."""
    problem = make_problem([700, 130, 3], seed=5, dtype=dtype)
    for backend in BACKENDS:
        pool = poisoned_pool(problem)
        compute(problem, backend, pool, [(0, 0, 699), (1, 0, 129), (2, 0, 2)])
        outputs = compute(problem, backend, pool, [(2, 2, 3), (0, 699, 700), (1, 129, 130)])
        for index, output in zip((2, 0, 1), outputs, strict=True):
            assert np.abs(output[0].double().numpy() - expected(problem, index)[-1]).max() < TOLERANCE[dtype]


def test_scores_far_apart_become_nan() -> None:
    """One key outweighs all others by more than float32 can hold, early or late in the sequence."""
    for place in (0, 100, 199):
        problem = make_problem([200], seed=7, scaling=40.0)
        problem.keys[0][place] *= 30
        for backend in BACKENDS:
            difference = np.abs(_whole(problem, backend)[0].double().numpy() - expected(problem, 0)).max()
            assert difference < 1e-3


@st.composite
def _plans(draw: st.DrawFn) -> tuple[Problem, list[list[tuple[int, int, int]]]]:
    """A problem and forwards that compute each sequence in any chunks, beside any of the others."""
    length = st.one_of(st.integers(1, 150), st.sampled_from([255, 256, 257, 420]))  # up to several tiles
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    problem = make_problem(
        lengths,
        seed=draw(st.integers(0, 99)),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        heads_per_kv_head=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([8, 24, 64])),
        block_size=draw(st.sampled_from([3, 16, 32])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        window=draw(st.sampled_from([None, None, 1, 30, 70])),
        softcap=draw(st.sampled_from([None, None, 4.0])),
    )
    done, forwards = [0] * len(lengths), []
    while any(start < length for start, length in zip(done, lengths, strict=True)):
        unfinished = [index for index, length in enumerate(lengths) if done[index] < length]
        members = draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        forward = []
        for index in members:
            left = lengths[index] - done[index]
            count = draw(st.sampled_from(sorted({1, min(2, left), min(17, left), min(64, left), left})))
            forward.append((index, done[index], done[index] + count))
            done[index] += count
        forwards.append(forward)
    return problem, forwards


@by_exact_backend
@given(case=_plans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_company_or_chunks_change_a_bit(
    backend: AttentionBackend, case: tuple[Problem, list[list[tuple[int, int, int]]]]
) -> None:
    """And what each sequence gives alone is right: random shapes and ragged lengths against float64, beside blocks of
    NaN."""
    problem, forwards = case
    alone = [
        compute(problem, backend, poisoned_pool(problem), [(index, 0, len(query))])[0]
        for index, query in enumerate(problem.queries)
    ]
    for index, output in enumerate(alone):
        _require_near(output, problem, index)
    pool = poisoned_pool(problem)
    for forward in forwards:
        for (index, start, end), output in zip(forward, compute(problem, backend, pool, forward), strict=True):
            assert torch.equal(output, alone[index][start:end]), forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_exact_backend
def test_long_context_changes_a_bit(backend: AttentionBackend, dtype: str) -> None:
    """More query rows than one item holds, and a prompt's last token again as a decode step."""
    problem = make_problem([900, 40], seed=11, dtype=dtype)
    pool = poisoned_pool(problem)
    whole = compute(problem, backend, pool, [(0, 0, 900)])[0]
    again = compute(problem, backend, pool, [(1, 0, 40), (0, 899, 900)])[1]
    assert torch.equal(again[0], whole[-1])
    chunked = [compute(problem, backend, pool, [(0, start, min(start + 333, 900))])[0] for start in range(0, 900, 333)]
    assert torch.equal(torch.cat(chunked), whole)


@by_exact_backend
def test_large_decode_batch_changes_a_bit(backend: AttentionBackend) -> None:
    """More sequences than are gathered together, of very different lengths: each beside all others, and alone."""
    lengths = [1 + 37 * index % 600 for index in range(70)]
    problem = make_problem(lengths, seed=17, num_kv_heads=1, heads_per_kv_head=4, head_dim=16)
    whole = _whole(problem, backend)
    pool = poisoned_pool(problem)
    chunks = [(index, 0, length - 1) for index, length in enumerate(lengths) if length > 1]
    compute(problem, backend, pool, chunks)
    steps = [(index, length - 1, length) for index, length in enumerate(lengths)]
    together = compute(problem, backend, pool, steps)
    for index, step in enumerate(steps):
        assert torch.equal(together[index][0], whole[index][-1])
        assert torch.equal(compute(problem, backend, pool, [step])[0][0], whole[index][-1])


@pytest.fixture
def three_threads() -> Iterator[CpuAttention]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield CpuAttention(KERNEL_FOLDER)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "make", [lambda: CpuAttention(KERNEL_FOLDER), pytest.param(TorchAttention, marks=IF_EXACT)], ids=["cpu", "torch"]
)
def test_number_of_threads_changes_a_bit(make: Callable[[], AttentionBackend], request: pytest.FixtureRequest) -> None:
    problem = make_problem([500, 1, 90, 64], seed=13, heads_per_kv_head=4)
    chunks: Sequence[tuple[int, int, int]] = [(0, 0, 499), (2, 0, 89)]
    step: Sequence[tuple[int, int, int]] = [(2, 89, 90), (0, 499, 500)]

    def results() -> list[torch.Tensor]:
        backend, pool = make(), poisoned_pool(problem)
        compute(problem, backend, pool, chunks)
        return [*_whole(problem, backend), *compute(problem, backend, pool, step)]

    alone = results()
    request.getfixturevalue("three_threads")
    for ours, shared in zip(alone, results(), strict=True):
        assert torch.equal(ours, shared)


def test_other_threads_write_after_an_error(three_threads: CpuAttention) -> None:
    """By then the memory that they have the address of may be another's."""
    raised, ended = Event(), []

    def fail() -> None:
        raised.set()
        raise ValueError("first")

    def go_on() -> None:
        raised.wait()
        sleep(0.05)
        ended.append(1)

    with pytest.raises(ValueError, match="first"):
        three_threads.run([fail, go_on, go_on])
    assert len(ended) == 2
    with pytest.raises(ValueError, match="first"):
        three_threads.run([go_on, fail])
    assert len(ended) == 3


def test_calls_without_threads_are_dropped() -> None:
    made: list[int] = []
    assert CpuAttention(KERNEL_FOLDER).num_threads == 1
    CpuAttention(KERNEL_FOLDER).run([partial(made.append, number) for number in range(3)])
    assert made == [0, 1, 2]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("heads_per_kv_head", [1, 3, 71])
def test_work_is_lost_or_done_twice(heads_per_kv_head: int, num_threads: int) -> None:
    """And no item is so large that its scratch memory grows with the prompt."""
    geometry = make_geometry(2, 4, 4 * heads_per_kv_head, 16, 64)
    segments = [
        Segment([0] * count, start, range(start + count), False)
        for count, start in ((1, 900), (700, 0), (1, 0), (64, 30), (5, 5))
    ]
    batch = pack(segments, 1, torch.device("cpu"))
    parts = divide(make_items(batch, geometry, num_threads), num_threads)
    assert len(parts) == num_threads
    done = Counter(
        (item.first_row + token, item.first_position + token, item.table, item.first_head + head)
        for part in parts
        for item in part
        for token in range(item.num_tokens)
        for head in range(item.num_heads)
    )
    tables = [0, *np.cumsum([len(segment.block_table) for segment in segments])]
    wanted = Counter(
        (row + token, segment.start + token, table, head)
        for segment, row, table in zip(segments, batch.first_rows, tables, strict=False)
        for token in range(len(segment.token_ids))
        for head in range(4)
    )
    assert done == wanted
    most = max(item.num_tokens * item.num_heads * heads_per_kv_head for part in parts for item in part)
    assert most <= max(ROWS_PER_ITEM, 4 * heads_per_kv_head)
    work = [sum(item.num_tokens * item.num_heads * item.first_position for item in part) for part in parts]
    assert max(work) <= 1.5 * min(work) + 50_000
