"""Sampling across the hand-off: prefill, decode and every later attempt choose and tell the same."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.sampling import sampling_params
from tests.chi_square import assert_drawn_from
from tests.exactness import require_exact
from tests.reference import greedy, logits, sampled
from tests.tiny_models import EOS_TOKEN_ID
from tests.workers.pair import Pair, limits
from tests.workers.test_hand_off import prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]

PENALTIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"logit_bias": {7: -100.0, 30: 4.0}}, {"sequence_bias": {(7,): -100.0, (30,): 4.0}}),
    (
        {"repetition_penalty": 1.2, "logit_bias": {2: 3.0}, "ignore_eos": False, "min_tokens": 9},
        {"repetition_penalty": 1.2, "sequence_bias": {(2,): 3.0}, "ignore_eos": False, "min_new_tokens": 9},
    ),
]

EVERYTHING: dict[str, Any] = {
    "seed": 3,
    "temperature": 1.2,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.5,
    "logit_bias": {30: 3.0, 31: 3.0},
    "min_tokens": 10,
    "ignore_eos": False,
    "logprobs": 4,
}


def generated(pair: Pair, prompt: Sequence[int], outputs: Sequence[int] = (), **changes: Any) -> list[messages.Token]:
    """What decode says of one attempt, the repeated first token included."""
    attempt = pair.begin(prompt, outputs, **changes)
    pair.until(lambda: pair.is_finished(attempt))
    return pair.tokens(attempt)


def first_token(pair: Pair) -> messages.Token:
    """What prefill said last."""
    token: messages.Token = pair.prefill.said(reports.FirstTokens)[-1].tokens[0]
    return token


@pytest.mark.parametrize(("ours", "theirs"), PENALTIES, ids=["repetition", "bias", "together"])
def test_text_differs_from_transformers(
    ours: dict[str, Any], theirs: dict[str, Any], tiny: Tiny, make_pair: MakePair
) -> None:
    pair = make_pair(max_num_batched_tokens=24)
    plain = [greedy(tiny("llama"), prompt_of(length), 30) for length in (1, 40)]
    expected = [greedy(tiny("llama"), prompt_of(length), 30, **theirs) for length in (1, 40)]
    assert expected != plain, "the options change nothing"
    texts = pair.generate([prompt_of(1), prompt_of(40)], max_tokens=30, **ours)
    assert texts == expected


def test_later_attempt_chooses_or_tells_something_else(make_pair: MakePair) -> None:
    """Each output position in turn is the first of an attempt: drawn by prefill, where otherwise decode draws it."""
    pair = make_pair(max_num_batched_tokens=24)
    prompt = prompt_of(40)
    whole = generated(pair, prompt, max_tokens=14, **EVERYTHING)
    ids = [token.token_id for token in whole]
    assert len(ids) == 14
    for cut in range(1, 14):
        again = generated(pair, prompt, ids[:cut], max_tokens=14, **EVERYTHING)
        assert [(t.token_id, t.position, t.logprobs) for t in again] == [
            (t.token_id, t.position, t.logprobs) for t in whole[cut:]
        ]
        assert first_token(pair).logprobs == whole[cut].logprobs
    pair.assert_drained()


def test_company_changes_what_is_chosen(make_pair: MakePair) -> None:
    prompts = [prompt_of(length, seed=length) for length in (3, 17, 40)]
    alone = [make_pair().generate([prompt], max_tokens=14, **EVERYTHING)[0] for prompt in prompts]
    assert make_pair(max_num_batched_tokens=24).generate(prompts, max_tokens=14, **EVERYTHING) == alone


def test_first_token_has_another_logprob_or_none(tiny: Tiny, make_pair: MakePair) -> None:
    """C10: one entry per token, the first included, from both workers, by the model's own logits."""
    prompt = prompt_of(40)
    tokens = generated(make_pair(), prompt, max_tokens=12, **(EVERYTHING | {"min_tokens": 12}))
    ids = [token.token_id for token in tokens]
    assert len(ids) == 12
    expected = torch.log_softmax(logits(tiny("llama"), prompt + ids)[len(prompt) - 1 :], -1)
    for row, token in zip(expected, tokens, strict=False):
        assert token.logprobs is not None
        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert token.logprobs.top_ids == row.topk(4).indices.tolist()
        assert token.logprobs.top_logprobs == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_limit_of_the_request_is_not_the_samplers() -> None:
    asked = limits(
        seed=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, min_tokens=2, stop_token_ids=[3], ignore_eos=False,
        repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.25, logit_bias={3: -1.0}, logprobs=4,
    )  # fmt: skip
    params = sampling_params(asked)
    for name in set(messages.Limits.__struct_fields__) - {"stop_token_ids", "logit_bias", "prompt_logprobs"}:
        assert getattr(params, name) == getattr(asked, name), name
    assert (params.stop_token_ids, params.logit_bias) == ((3,), ((3, -1.0),))


def test_logprobs_come_uninvited(make_pair: MakePair) -> None:
    pair = make_pair()
    assert [token.logprobs for token in generated(pair, prompt_of(20), max_tokens=3)] == [None] * 3
    (own,) = {len(token.logprobs.top_ids) for token in generated(pair, prompt_of(20), max_tokens=3, logprobs=0)}
    assert own == 0


@pytest.mark.parametrize("length", [1, 2, 16, 61])
@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs_differ_from_one_forward(length: int, budget: int, tiny: Tiny, make_pair: MakePair) -> None:
    """C10: whatever the chunks, and beside a prompt that asks for none."""
    pair = make_pair(max_num_batched_tokens=budget)
    prompt = prompt_of(length)
    other = pair.begin(prompt_of(20), max_tokens=3)
    attempt = pair.begin(prompt, max_tokens=3, prompt_logprobs=3)
    pair.until(lambda: pair.is_finished(attempt) and pair.is_finished(other))
    entries = prompt_entries(pair, attempt)
    assert [entry.token_id for entry in entries] == prompt
    assert (entries[0].logprob, entries[0].top_ids) == (None, [])
    expected = torch.log_softmax(logits(tiny("llama"), prompt), -1)
    for row, entry in zip(expected, entries[1:], strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.top_ids == row.topk(3).indices.tolist()
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert prompt_entries(pair, other) == []
    assert [token.token_id for token in pair.tokens(attempt)] == greedy(tiny("llama"), prompt, 3)
    pair.assert_drained()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asking_for_prompt_logprobs_changes_a_bit(dtype: str, make_pair: MakePair) -> None:
    """All rows of logits or the last alone, in whatever chunks: the same numbers."""
    prompt = prompt_of(61)
    entries, outputs = [], []
    for budget, wanted in ((512, None), (512, 3), (7, 3), (33, 3)):
        pair = make_pair(max_num_batched_tokens=budget, dtype=dtype)
        require_exact(pair.prefill.runner)
        attempt = pair.begin(prompt, max_tokens=3, logprobs=5, prompt_logprobs=wanted)
        pair.until(lambda pair=pair, attempt=attempt: pair.is_finished(attempt))
        outputs.append([(token.token_id, token.logprobs) for token in pair.tokens(attempt)])
        entries.append(prompt_entries(pair, attempt))
    assert outputs == outputs[:1] * 4
    assert entries == [[], *entries[1:2] * 3]


def test_warm_cache_leaves_prompt_logprobs_out(make_pair: MakePair) -> None:
    """The prompt is in both caches, whole: its logprobs are computed all the same, and a request without them hits."""
    pair = make_pair(max_num_batched_tokens=24)
    prompt = prompt_of(64)
    cold = pair.begin(prompt, max_tokens=2, prompt_logprobs=2)
    pair.until(lambda: pair.is_finished(cold))
    for wanted in (2, None, 2):
        again = pair.begin(prompt, max_tokens=2, prompt_logprobs=wanted)
        pair.until(lambda again=again: pair.is_finished(again))
        (accepted,) = [report for report in pair.prefill.said(reports.Accepted) if report.attempt == again]
        assert accepted.num_cached_tokens == (63 if wanted is None else 0)
        assert pair.ticket(again).num_cached_blocks == 4
        expected = [] if wanted is None else prompt_entries(pair, cold)
        assert prompt_entries(pair, again) == expected
    pair.assert_drained()


def prompt_entries(pair: Pair, attempt: str) -> list[messages.Logprobs]:
    """In the order of their positions, each said once, and all before the first tokens."""
    entries: list[messages.Logprobs] = []
    for report in pair.prefill.reports:
        if isinstance(report, reports.PromptLogprobs) and report.attempt == attempt:
            assert report.start == len(entries)
            entries += report.tokens
        elif isinstance(report, reports.FirstTokens) and report.attempt == attempt:
            return entries
    raise AssertionError("no first tokens")


def test_prompt_of_nan_gives_numbers(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: the attempt ends with a reason, and its neighbour does not."""
    pair = make_pair()
    run = pair.prefill.runner.run

    def poisoned(segments: Any) -> torch.Tensor:
        rows = run(segments).clone()
        if len(rows) > 1:  # those of the prompt alone, or behind the last one of its neighbour
            rows[-5] = math.nan
        return rows

    monkeypatch.setattr(pair.prefill.runner, "run", poisoned)
    good, bad = pair.begin(prompt_of(5), max_tokens=3), pair.begin(prompt_of(20), max_tokens=3, prompt_logprobs=0)
    pair.until(lambda: pair.is_finished(good) and bool(pair.endings(bad)))
    assert pair.endings(bad)[0].reason is Reason.INTERNAL
    pair.decode.inbox.put(commands.Release(bad, "lost"))
    pair.assert_drained()


@pytest.mark.parametrize("options", [{"seed": 1, "temperature": 0.8}, EVERYTHING], ids=["C08", "everything"])
def test_seeded_text_differs_from_one_process(options: dict[str, Any], tiny: Tiny, make_pair: MakePair) -> None:
    """C08: transformers' logits, row by row, and one draw per position; twice, with the prompt in the caches too."""
    pair = make_pair(max_num_batched_tokens=24)
    prompt = prompt_of(40)
    params = sampling_params(limits(max_tokens=20, **options))
    expected = sampled(tiny("llama"), prompt, params)
    assert expected != greedy(tiny("llama"), prompt, 20)
    for _ in range(2):
        tokens = generated(pair, prompt, max_tokens=20, **options)
        assert [token.token_id for token in tokens] == expected
    start = messages.Start(prompt, [messages.Sample(index, []) for index in range(3)], limits(max_tokens=20, **options))
    pair.decode.inbox.put(commands.Reserve(1, "trio", start, 60.0))
    pair.until(lambda: pair.ticket("trio") is not None)
    pair.prefill.inbox.put(commands.Prefill(1, "trio", start, pair.ticket("trio"), 60.0))
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("trio")) == 3)
    for index in range(3):
        ids = [token.token_id for token in pair.tokens("trio") if token.sample == index]
        assert ids == sampled(tiny("llama"), prompt, params, sample_index=index)
    pair.assert_drained()


def test_seed_gives_two_texts_or_seeds_give_one(tiny: Tiny, make_pair: MakePair) -> None:
    """C08: twenty times seed 1; then seeds 1 to 50, whose first tokens vary as the probabilities say."""
    pair = make_pair()
    prompt = prompt_of(20)
    texts = [pair.generate([prompt], seed=1, temperature=0.8, max_tokens=20)[0] for _ in range(20)]
    assert texts == texts[:1] * 20
    first = [pair.generate([prompt], seed=seed, temperature=0.8, max_tokens=1)[0][0] for seed in range(1, 51)]
    probabilities = torch.softmax(logits(tiny("llama"), prompt)[-1].double() / 0.8, -1).numpy()
    # Five groups of tokens of about a fifth of the probability each: 50 draws make some ten in each.
    order = np.argsort(-probabilities)
    group = np.empty(probabilities.size, dtype=np.int64)
    group[order] = np.minimum(probabilities[order].cumsum() * 5, 4.999).astype(np.int64)
    assert_drawn_from(np.bincount(group[first], minlength=5), np.bincount(group, weights=probabilities, minlength=5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 1, "temperature": 1.0}, "length"),
        ({"logit_bias": {EOS_TOKEN_ID: 100.0}, "ignore_eos": False}, "stop"),
        ({"logit_bias": {77: 100.0}, "stop_token_ids": [77]}, "stop"),
        ({"logit_bias": {77: 100.0}, "stop_token_ids": [77], "max_tokens": 1}, "stop"),
    ],
    ids=["max_tokens", "eos", "stop token", "both"],
)
def test_first_token_escapes_the_end_rules(changes: dict[str, Any], reason: str, make_pair: MakePair) -> None:
    """C09: one token, the right reason from both workers, and no step on decode."""
    pair = make_pair()
    forwards = pair.decode.runner.num_forwards
    tokens = generated(pair, prompt_of(20), **changes)
    assert [(token.position, token.finish_reason) for token in tokens] == [(0, reason)]
    assert first_token(pair).finish_reason == reason
    assert pair.decode.runner.num_forwards == forwards
    pair.assert_drained()


def test_banned_end_comes_or_the_context_does_not_end_it(make_pair: MakePair) -> None:
    """C51: end-of-sequence banned by bias, no max_tokens of its own: the text ends with the context."""
    pair = make_pair(max_model_len=64)
    (text,) = pair.generate([prompt_of(20)], max_tokens=500, ignore_eos=False, logit_bias={EOS_TOKEN_ID: -100.0})
    assert len(text) == 44
    assert EOS_TOKEN_ID not in text
    pair.assert_drained()


def test_requests_without_max_tokens_run_one_by_one(make_pair: MakePair) -> None:
    """C51: eight at once in a pool of three contexts, each free to fill one: blocks are taken as they are needed."""
    context = 256
    pair = make_pair(max_model_len=context, decode_blocks=3 * context // 16)
    options = {"max_tokens": context - 20, "ignore_eos": False, "min_tokens": 40, "logit_bias": {EOS_TOKEN_ID: 20.0}}
    attempts = [pair.begin(prompt_of(20, seed), seed=seed, **options) for seed in range(8)]
    pair.until(lambda: len(pair.decode.engine._running) == 8 or any(map(pair.is_finished, attempts)))
    assert len(pair.decode.engine._running) == 8
    pair.until(lambda: all(map(pair.is_finished, attempts)))
    assert {pair.tokens(attempt)[-1].finish_reason for attempt in attempts} == {"stop"}
    pair.assert_drained()
