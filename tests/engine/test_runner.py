"""What the runner promises about one forward: how many there are, what they touch, and that company changes nothing."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitserve.engine.batch import Segment
from splitserve.engine.runner import ModelRunner
from splitserve.engine.sampler import SampleRow, sample
from splitserve.engine.sampling_params import SamplingParams
from tests.engine.driver import load, random_prompt
from tests.exactness import require_exact
from tests.tiny_models import build

TinyModel = Callable[[str], Path]

BLOCK = 16
TABLE_A = list(range(40))
TABLE_B = list(range(40, 80))
TABLE_C = list(range(80, 120))


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> ModelRunner:
    return load(tiny_model("llama"))


def test_decode_step_takes_more_than_one_forward(llama: ModelRunner) -> None:
    tables = [TABLE_A, TABLE_B, TABLE_C]
    prompts = [random_prompt(length, seed=length) for length in (3, 20, 33)]
    llama.run([Segment(prompt, 0, table, False) for prompt, table in zip(prompts, tables, strict=True)])
    before = llama.num_forwards
    calls: list[int] = []
    hook = llama._model.register_forward_pre_hook(lambda *_: calls.append(1))
    for step in range(5):
        segments = [
            Segment([7 + step], len(prompt) + step, table, True) for prompt, table in zip(prompts, tables, strict=True)
        ]
        assert llama.run(segments).shape == (3, llama.vocab_size)
    hook.remove()
    assert llama.num_forwards - before == len(calls) == 5


def test_long_forward_looks_stuck(llama: ModelRunner) -> None:
    """Whoever watches hears of every layer while the forward runs."""
    layers = 0

    def count() -> None:
        nonlocal layers
        layers += 1

    llama.on_layer = count
    llama.run([Segment(random_prompt(20, seed=1), 0, TABLE_A, True)])
    assert layers == llama.layout.num_layers


def test_logits_come_for_the_wrong_segments(llama: ModelRunner) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 1, 9)]
    tables = [TABLE_A, TABLE_B, TABLE_C]
    segments = [
        Segment(prompt, 0, table, wants)
        for prompt, table, wants in zip(prompts, tables, (True, False, True), strict=True)
    ]
    logits = llama.run(segments)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, llama.vocab_size)
    for row, segment in zip(logits, (segments[0], segments[2]), strict=True):
        torch.testing.assert_close(row, llama.run([segment])[0], rtol=1e-4, atol=1e-4)
    assert llama.run([Segment(prompts[0], 0, TABLE_A, False)]).shape == (0, llama.vocab_size)


def _counted(forward: Callable[..., torch.Tensor], rows: list[int]) -> Callable[..., torch.Tensor]:
    def count(given: torch.Tensor) -> torch.Tensor:
        rows.append(given.shape[-2])
        return forward(given)

    return count


def test_matmul_runs_on_fewer_rows_than_are_exact(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(tiny_model("llama"))
    fewest = 7
    monkeypatch.setattr(runner, "result", replace(runner.result, min_rows=fewest))
    rows: list[int] = []
    for layer in runner.linear.layers(runner.model):
        monkeypatch.setattr(layer, "forward", _counted(layer.forward, rows))
    assert runner.run([Segment([5], 0, TABLE_A, True)]).shape[0] == 1
    runner.run([Segment(random_prompt(40, seed=0), 1, TABLE_A, True)])
    assert set(rows) == {fewest, 40}


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([], 0, TABLE_A, True), "at least one token"),
        (Segment([384], 0, TABLE_A, True), "token id 384 is not in a vocabulary of 384"),
        (Segment([5, -1], 0, TABLE_A, True), "token id -1"),
        (Segment([5], 1024, list(range(65)), True), "context of 1024"),
        (Segment([5], -1, TABLE_A, True), "context of 1024"),
        (Segment([5] * 17, 0, [0], True), "1 blocks of 16 tokens does not cover 17"),
        (Segment([5], 0, [100_000], True), "pool of"),
        (Segment([5], 0, [-1], True), "pool of"),
    ],
)
def test_bad_segment_reaches_the_pool(llama: ModelRunner, segment: Segment, message: str) -> None:
    good = Segment([9, 9, 9], 0, TABLE_B, False)
    llama.pool.tensor[TABLE_B[0]].fill_(3.0)
    with pytest.raises(ValueError, match=message):
        llama.run([good, segment])
    assert bool((llama.pool.tensor[TABLE_B[0]] == 3.0).all())
    with pytest.raises(ValueError, match="at least one segment"):
        llama.run([])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_stale_bytes_of_an_earlier_owner_poison_a_sequence(family: str, tiny_model: TinyModel) -> None:
    runner = load(tiny_model(family))
    prompt = random_prompt(37, seed=3)
    segments = [Segment(prompt[:21], 0, TABLE_A, True), Segment(prompt[21:], 21, TABLE_A, True)]
    clean = [runner.run([segment]) for segment in segments]
    runner.pool.tensor.fill_(torch.nan)
    for expected, segment in zip(clean, segments, strict=True):
        assert torch.equal(runner.run([segment]), expected)
    step = runner.run([Segment([5], 37, TABLE_A, True), Segment([6], 0, TABLE_B, True)])
    assert bool(step.isfinite().all())


def test_nan_of_one_sequence_reaches_another(llama: ModelRunner) -> None:
    prompt = random_prompt(20, seed=5)
    llama.run([Segment(prompt, 0, TABLE_A, False), Segment(prompt, 0, TABLE_B, False)])
    step = [Segment([5], 20, TABLE_A, True), Segment([5], 20, TABLE_B, True)]
    clean = llama.run(step)
    llama.pool.tensor[TABLE_B[0], 0, 1].fill_(torch.nan)
    poisoned = llama.run(step)
    assert torch.equal(poisoned[0], clean[0])
    row = SampleRow(SamplingParams(max_tokens=4, temperature=0.0), 0, 0)
    assert sample(poisoned, [row, row], frozenset()) == [int(clean[0].argmax()), None]
    llama.pool.clear(TABLE_B)


def _computed(
    runner: ModelRunner, tokens: list[int], cuts: list[int], companions: random.Random | None
) -> torch.Tensor:
    """Logits after the last token, computed in chunks that end at `cuts`; fills `TABLE_A`."""
    logits = torch.empty(0)
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        segments = [Segment(tokens[start:end], start, TABLE_A, True)]
        if companions is not None:
            other = random_prompt(companions.randint(1, 90), seed=end)
            segments.insert(companions.randint(0, 1), Segment(other, 0, TABLE_B, True))
            segments.append(Segment([companions.randint(3, 300)], companions.randint(0, 500), TABLE_C, False))
        wanted = [segment.block_table is TABLE_A for segment in segments if segment.wants_logits].index(True)
        logits = runner.run(segments)[wanted]
    return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        # Heads as wide as real models', and more than 1,024 inputs: there a matmul of one row rounds differently.
        ("llama", {"head_dim": 128, "hidden_size": 640, "num_key_value_heads": 4, "intermediate_size": 1536}),
        ("gemma2", {}),
        ("mistral", {}),
        ("phi3", {}),
    ],
)
def test_recomputation_changes_a_bit(family: str, shape: dict[str, int], dtype: str, tmp_path: Path) -> None:
    runner = load(build(family, tmp_path, **shape), dtype=dtype, kv_cache_bytes=32 << 20)
    require_exact(runner)
    tokens = random_prompt(600, seed=11)
    expected = _computed(runner, tokens, [600], None)
    num_blocks = runner.layout.blocks_for(600)
    expected_kv = runner.pool.tensor[:num_blocks].clone()
    chooser = random.Random(family)
    plans = [sorted({*chooser.sample(range(1, 600), count), 600}) for count in (1, 3, 7)]
    plans.append([400, *range(580, 601)])  # a prompt, a chunk, then token by token
    for cuts in plans:
        for companions in (None, chooser):
            runner.pool.tensor[: TABLE_C[0]].fill_(torch.nan)
            assert torch.equal(_computed(runner, tokens, cuts, companions), expected), cuts
            assert torch.equal(runner.pool.tensor[:num_blocks], expected_kv), cuts


def test_numerics_differ_between_equal_workers(tiny_model: TinyModel) -> None:
    first, second = load(tiny_model("qwen3")), load(tiny_model("qwen3"))
    assert first.numerics == second.numerics != ""
    assert load(tiny_model("llama")).numerics != first.numerics


def test_kv_cache_size_is_not_what_was_asked(tiny_model: TinyModel) -> None:
    runner = load(tiny_model("llama"), kv_cache_bytes=1_000_000)
    assert runner.pool.num_blocks == 1_000_000 // runner.layout.block_nbytes
    assert runner.num_forwards == 0
    assert not runner.pool.tensor.any()
    with pytest.raises(ValueError, match="hold no block"):
        load(tiny_model("llama"), kv_cache_bytes=10)
    with pytest.raises(ValueError, match="dtype"):
        load(tiny_model("llama"), dtype="float16")
