"""The sampler beside transformers' processors: the same scores, the same tokens let through, the same probabilities."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from splitserve.engine import sampler
from splitserve.engine.history import TokenHistory
from splitserve.engine.sampler import SampleRow, adjusted, sample, weight_floor
from splitserve.engine.sampling_params import SamplingParams
from tests.chi_square import assert_drawn_from

EOS = frozenset({2, 5})
VOCAB = 300
PROMPT = [7, 7, 9, 11, 250, 2, 8]
OUTPUT = [9, 30, 31, 30, 30, 250]


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100} | values))


def row_of(params: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT) -> SampleRow:
    return SampleRow(params, 0, len(output), TokenHistory([*prompt, *output], len(prompt)))


def logits_of(seed: int, vocab: int = VOCAB, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.round(logits) if ties else logits


def processors(params: SamplingParams, num_prompt: int) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """What transformers would do: before the penalties that it does not have, and after them."""
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if params.logit_bias:
        before.append(SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in params.logit_bias}))
    if params.repetition_penalty != 1.0:
        before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        stops = sorted({*params.stop_token_ids, *(() if params.ignore_eos else EOS)})
        after.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, stops))
    if params.temperature not in (0.0, 1.0):
        after.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        after.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        after.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        after.append(MinPLogitsWarper(params.min_p))
    return before, after


def reference_scores(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT
) -> torch.Tensor:
    before, after = processors(params, len(prompt))
    ids = torch.tensor([[*prompt, *output]])
    scores = before(ids, logits[None].clone())
    for token_id, count in Counter(output).items():
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    return after(ids, scores)[0]


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.6},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.9, "presence_penalty": -0.3},
    {"logit_bias": ((9, 3.5), (250, -100.0), (0, 1.25))},
    {"min_tokens": 7},
    {"min_tokens": 7, "stop_token_ids": (30, 31)},
    {"min_tokens": 7, "stop_token_ids": (30,), "ignore_eos": True},
    {"min_tokens": 6},
    # The order shows: a bias that turns a sign before the repetition penalty looks at it.
    {"repetition_penalty": 1.7, "logit_bias": ((30, 8.0), (7, -8.0), (9, 2.0)), "min_tokens": 50},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ((31, 4.0),)},
]

CUTS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 12},
    {"top_k": VOCAB},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.001},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.8, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    # top_p before min_p: the nucleus is one of all tokens.
    {"top_p": 0.6, "min_p": 0.3},
]


@pytest.mark.parametrize("values", PENALTIES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_scores_before_the_draw_differ(values: dict[str, Any], seed: int) -> None:
    params = params_of(**values)
    logits = logits_of(seed)
    before = logits.clone()
    ours = torch.from_numpy(adjusted(logits.numpy(), row_of(params), EOS))
    expected = reference_scores(logits, params)
    if params.presence_penalty or params.frequency_penalty:  # transformers has none: only rounding may differ
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(ours, expected)
    assert torch.equal(logits, before), "the caller's logits changed"


@pytest.mark.parametrize("values", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_other_tokens_are_let_through(values: dict[str, Any], seed: int) -> None:
    params = params_of(**values)
    logits = logits_of(seed)
    assert torch.equal(let_through(logits, params), reference_scores(logits, params).isfinite())


@pytest.mark.parametrize("values", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_are_told_apart(values: dict[str, Any], seed: int) -> None:
    """With many equal logits transformers' top_p cuts through equals as its sort happens to have them; ours does not.
    Everything else is the same."""
    params = params_of(**values)
    logits = logits_of(seed, ties=True)
    ours, theirs = let_through(logits, params), reference_scores(logits, params).isfinite()
    if params.top_p == 1.0:
        assert torch.equal(ours, theirs)
    assert (ours | ~theirs).all(), "a token that transformers lets through is banned"
    assert ours.equal(logits >= logits[theirs].min()), "a token of its own is let through, or one of several equals"


def let_through(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    weights = torch.exp((logits - logits.max()) / params.temperature)
    return weights >= weight_floor(weights.numpy(), params)


@pytest.mark.parametrize("values", [{}, *CUTS, *PENALTIES, CUTS[-2] | PENALTIES[-1], CUTS[-3] | PENALTIES[-2]], ids=str)
def test_token_has_another_probability(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of each token's share of the unit interval, with transformers' probabilities, draws that token."""
    params = params_of(**values)
    logits = logits_of(11, vocab=1000)
    probabilities = torch.softmax(reference_scores(logits, params).double(), -1).numpy()
    edges = np.concatenate([[0.0], probabilities.cumsum()])
    tokens = np.flatnonzero(probabilities > 1e-5)
    numbers = iter((edges[tokens] + edges[tokens + 1]) / 2)
    monkeypatch.setattr(sampler, "uniform", lambda *_: next(numbers))
    rows = [row_of(params)] * len(tokens)
    assert sample(logits.expand(len(tokens), -1), rows, EOS) == tokens.tolist()


@pytest.mark.parametrize("values", PENALTIES, ids=str)
def test_greedy_overlooks_what_was_adjusted(values: dict[str, Any]) -> None:
    params = params_of(**values, temperature=0.0)
    for seed in range(20):
        logits = logits_of(seed)
        assert sample(logits[None], [row_of(params)], EOS) == [int(reference_scores(logits, params).argmax())]


def test_frequencies_of_all_options_together_are_wrong() -> None:
    """20,000 positions of one seed against transformers' probabilities, by chi-square."""
    params = params_of(
        max_tokens=30_000, seed=99, temperature=1.3, top_k=10, top_p=0.95, min_p=0.02, repetition_penalty=1.2,
        frequency_penalty=0.2, logit_bias=((30, 2.0),), min_tokens=30_000,
    )  # fmt: skip
    logits = logits_of(3, vocab=60)
    prompt, output = [7, 9, 11, 2], [9, 30, 31, 30]
    probabilities = torch.softmax(reference_scores(logits, params, prompt, output).double(), -1).numpy()
    count = 20_000
    history = TokenHistory([*prompt, *output], len(prompt))
    rows = [SampleRow(params, 0, position, history) for position in range(count)]
    observed = np.bincount(sample(logits.expand(count, -1), rows, EOS), minlength=60)
    assert 4 < (probabilities > 0).sum() < 11
    assert_drawn_from(observed, probabilities)


@st.composite
def sample_rows(draw: st.DrawFn) -> SampleRow:
    token = st.integers(0, VOCAB - 1)
    params = SamplingParams(
        max_tokens=50,
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        top_k=draw(st.sampled_from([0, 1, 7, 500])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        logit_bias=tuple(draw(st.dictionaries(token, st.floats(-100, 100), max_size=3)).items()),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.integers(0, 5)),
    )
    prompt, output = draw(st.lists(token, min_size=1, max_size=9)), draw(st.lists(token, max_size=9))
    return replace(row_of(params, prompt, output), sample_index=draw(st.integers(0, 3)))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(sample_rows(), min_size=2, max_size=6), seed=st.integers(0, 10_000), data=st.data())
def test_row_depends_on_its_company(rows: list[SampleRow], seed: int, data: st.DataObject) -> None:
    logits = torch.stack([logits_of(seed + index, vocab=2000) for index in range(len(rows))])
    spoiled = data.draw(st.sampled_from(range(len(rows))))
    alone = [sample(logits[index : index + 1], [row], EOS)[0] for index, row in enumerate(rows)]
    assert sample(logits, rows, EOS) == alone
    assert sample(logits.flip(0), rows[::-1], EOS) == alone[::-1]
    logits[spoiled] = float("nan")
    assert sample(logits, rows, EOS) == [None if index == spoiled else token for index, token in enumerate(alone)]


@settings(max_examples=100, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    num_prompt=st.integers(0, 60),
    asked=st.sets(st.integers(1, 60)),
)
def test_counts_depend_on_when_they_were_asked_for(token_ids: list[int], num_prompt: int, asked: set[int]) -> None:
    num_prompt = min(num_prompt, len(token_ids))
    growing = token_ids[:num_prompt]
    history = TokenHistory(growing, num_prompt)
    for token_id in token_ids[num_prompt:]:
        growing.append(token_id)
        if len(growing) in asked:
            history.counts()
    ids, num_outputs = history.counts()
    outputs = Counter(token_ids[num_prompt:])
    assert dict(zip(ids.tolist(), num_outputs.tolist(), strict=True)) == {i: outputs[i] for i in set(token_ids)}
    assert (history.num_outputs, history.total_len) == (len(token_ids) - num_prompt, len(token_ids))
