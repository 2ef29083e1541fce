"""Draws: repeatable from (seed, sample, position) alone, distributed as asked, and safe from another row's values."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from splitserve.engine.sampler import SampleRow, sample, uniform
from splitserve.engine.sampling_params import SamplingParams
from splitserve.engine.stopping import FinishReason, finish_reason
from tests.chi_square import assert_drawn_from, limit

PARAMS = SamplingParams(max_tokens=100)
GREEDY = replace(PARAMS, temperature=0.0)
EOS = frozenset({2})


def _draws(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    rows = [SampleRow(params, 0, position) for position in range(count)]
    tokens = sample(logits.expand(count, -1), rows, EOS)
    assert None not in tokens
    return tokens  # type: ignore[return-value]


def _probabilities(logits: torch.Tensor) -> np.ndarray:
    return torch.softmax(logits.double(), -1).numpy()


def test_greedy_takes_a_later_one_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [SampleRow(GREEDY, 0, 0)] * 2, EOS) == [1, 0]
    tiny = replace(PARAMS, temperature=1e-9)
    assert sample(logits, [SampleRow(tiny, 0, 0)] * 2, EOS) == [1, 0]


def test_draw_depends_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500)
    rows = [SampleRow(replace(PARAMS, seed=seed, top_p=0.9, top_k=50), seed % 2, seed * 3) for seed in range(6)]
    together = sample(logits, rows, EOS)
    backwards = sample(logits.flip(0), rows[::-1], EOS)
    assert backwards[::-1] == together == sample(logits, rows, EOS)
    assert [sample(logits[index : index + 1], [row], EOS)[0] for index, row in enumerate(rows)] == together


def test_draw_repeats_over_positions_samples_or_seeds() -> None:
    logits = torch.zeros(1, 4096)
    same = SampleRow(replace(PARAMS, seed=7), 0, 0)
    others = [
        SampleRow(replace(PARAMS, seed=7), 0, 1),
        SampleRow(replace(PARAMS, seed=7), 1, 0),
        SampleRow(replace(PARAMS, seed=8), 0, 0),
    ]
    tokens = sample(logits.expand(5, -1), [same, same, *others], EOS)
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 4


def test_uniform_differs_between_machines_or_leaves_the_unit_interval() -> None:
    assert uniform(0, 0, 0) == 0.16279964104263878
    numbers = [
        uniform(seed, sample_index, position)
        for seed in (0, 2**64 - 1)
        for sample_index in (0, 3)
        for position in range(500)
    ]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_not_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 1.5, -0.5, 2.5])
    tokens = _draws(logits, replace(PARAMS, temperature=temperature, seed=1234), 20_000)
    assert_drawn_from(np.bincount(tokens, minlength=8), _probabilities(logits / temperature))


@pytest.mark.parametrize(
    ("degrees", "exact"), [(1, 10.828), (4, 18.467), (5, 20.515), (7, 24.322), (9, 27.877), (30, 59.703)]
)
def test_limit_is_that_of_other_degrees_of_freedom(degrees: int, exact: float) -> None:
    """Against a table of chi-square's quantile 0.999."""
    assert limit(degrees) == pytest.approx(exact, rel=0.015 if degrees > 3 else 0.04)


@pytest.mark.parametrize("observed", [[40, 120, 40], [66, 67, 66, 1], [200, 0, 0]], ids=str)
def test_wrong_frequencies_pass(observed: list[int]) -> None:
    probabilities = np.array([1 / 3, 1 / 3, 1 / 3, 0.0][: len(observed)])
    assert_drawn_from(np.array([60, 75, 65, 0])[: len(observed)], probabilities)
    with pytest.raises(AssertionError):
        assert_drawn_from(np.array(observed), probabilities)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 1}, {4}),
        ({"top_k": 3}, {4, 3, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {4}),
        ({"top_p": 0.7}, {4, 3}),
        ({"top_p": 0.9}, {4, 3, 2}),
        ({"min_p": 0.2}, {4, 3}),
        ({"min_p": 1.0}, {4}),
        # After top_k the nucleus is taken of what is left: 0.64 / 0.87 reaches 0.7 alone.
        ({"top_k": 2, "top_p": 0.7}, {4}),
    ],
)
def test_excluded_token_is_drawn_or_allowed_one_never(changes: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])  # 0.012, 0.032, 0.086, 0.234, 0.636
    assert set(_draws(logits, replace(PARAMS, seed=5, **changes), 2000)) == allowed


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_nucleus_of_a_large_vocabulary_is_cut_short(top_p: float) -> None:
    """Flat enough that the nucleus has more tokens than the sampler's short list in one case."""
    torch.manual_seed(1)
    logits = torch.randn(6000) * 0.5
    probabilities = _probabilities(logits)
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(probabilities[order].cumsum(), top_p)) + 1
    tokens = _draws(logits, replace(PARAMS, top_p=top_p, seed=3), 3000)
    assert set(tokens) <= set(order[:size].tolist())
    last_tenth = set(order[int(size * 0.9) : size].tolist())
    assert last_tenth & set(tokens)


def test_min_tokens_lets_the_text_end() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(3, 77))
    assert sample(logits, [SampleRow(params, 0, 1)], EOS) == [1]
    assert sample(logits, [SampleRow(params, 0, 2)], EOS) == [2]
    assert sample(logits, [SampleRow(replace(params, ignore_eos=True), 0, 0)], EOS) == [2]
    assert logits.tolist() == [[0.0, 1.0, 9.0, 8.0]], "the caller's logits changed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_row_ends_its_neighbours(bad: float, temperature: float) -> None:
    """C62: one row of NaN is that row's end, not the step's."""
    torch.manual_seed(2)
    logits = torch.randn(3, 50)
    rows = [SampleRow(replace(PARAMS, temperature=temperature, seed=seed), 0, 0) for seed in range(3)]
    expected = sample(logits, rows, EOS)
    spoiled = logits.clone()
    spoiled[1] = bad
    assert sample(spoiled, rows, EOS) == [expected[0], None, expected[2]]
    spoiled[1] = logits[1]
    spoiled[1, 7] = bad
    row = sample(spoiled, rows, EOS)[1]
    assert (row is None) == (bad != -math.inf)


def test_token_of_no_probability_is_drawn() -> None:
    logits = torch.full((1000,), -math.inf)
    logits[[10, 990]] = 0.0
    assert set(_draws(logits, replace(PARAMS, seed=9), 200)) == {10, 990}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", math.nan),
        ("min_p", -1.0),
        ("top_k", -5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", ((5, 1.0), (6, math.nan))),
        ("logprobs", -1),
        ("seed", 2**64),
        ("seed", -1),
        ("max_tokens", 0),
        ("min_tokens", 101),
        ("min_tokens", -1),
    ],
)
def test_bad_parameter_is_accepted(field: str, value: object) -> None:
    """C62: NaN passes every comparison written the wrong way round."""
    with pytest.raises(ValueError, match=field):
        replace(PARAMS, **{field: value})


def test_rows_and_logits_disagree_silently() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        sample(torch.zeros(2, 4), [SampleRow(PARAMS, 0, 0)], EOS)


@pytest.mark.parametrize(
    ("token", "num_output", "total", "changes", "expected"),
    [
        (5, 1, 10, {}, None),
        (2, 1, 10, {}, FinishReason.STOP),
        (2, 1, 10, {"ignore_eos": True}, None),
        (2, 100, 200, {}, FinishReason.STOP),
        (7, 1, 10, {"stop_token_ids": (7,)}, FinishReason.STOP),
        (2, 3, 10, {"min_tokens": 3}, None),
        (2, 4, 10, {"min_tokens": 3}, FinishReason.STOP),
        (5, 100, 200, {}, FinishReason.LENGTH),
        (5, 101, 201, {}, FinishReason.LENGTH),
        (5, 3, 1024, {}, FinishReason.LENGTH),
        (5, 3, 1023, {}, None),
    ],
)
def test_sequence_ends_too_early_or_too_late(
    token: int, num_output: int, total: int, changes: dict[str, object], expected: FinishReason | None
) -> None:
    assert finish_reason(token, num_output, replace(PARAMS, **changes), EOS, total, 1024) is expected
