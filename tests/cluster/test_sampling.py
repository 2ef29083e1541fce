"""Every option of a request through real processes, as the Python client has them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitserve.client.types import Generation
from splitserve.service.errors import InvalidRequest
from tests.cluster.expected import Reference
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import prompt_of
from tests.cluster.test_failover import busy
from tests.reference import greedy
from tests.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {30: 4.0, 7: -100.0}}, {"sequence_bias": {(30,): 4.0, (7,): -100.0}}),
        ({"logit_bias": {EOS_TOKEN_ID: 3.0}, "min_tokens": 9, "ignore_eos": False}, None),
    ],
    ids=["repetition", "bias", "min_tokens"],
)
def test_option_gets_lost_on_the_way(
    ours: dict[str, Any], theirs: dict[str, Any] | None, pair: Cluster, tiny: Tiny
) -> None:
    prompt = prompt_of(60)
    if theirs is None:
        theirs = {"sequence_bias": {(EOS_TOKEN_ID,): 3.0}, "min_new_tokens": 9, "ignore_eos": False}
    expected = greedy(tiny("llama"), prompt, 20, **theirs)
    assert expected != greedy(tiny("llama"), prompt, 20)
    answer = pair.client.generate(prompt, max_tokens=20, **(GREEDY | ours))
    assert list(answer.token_ids) == expected


def test_penalties_do_not_reach_decode(pair: Cluster) -> None:
    """With a frequency penalty of 2 and hardly any other choice, 30 tokens cannot be but a few."""
    bias = dict.fromkeys(range(40, 60), 100.0)
    few = pair.client.generate(prompt_of(20), max_tokens=20, logit_bias=bias, **GREEDY)
    many = pair.client.generate(
        prompt_of(20), max_tokens=20, logit_bias=bias, frequency_penalty=2.0, presence_penalty=2.0, **GREEDY
    )
    assert len(set(many.token_ids)) > len(set(few.token_ids))
    assert set(many.token_ids) | set(few.token_ids) <= set(bias)


def test_client_gets_other_logprobs(pair: Cluster, tiny: Tiny) -> None:
    """C10: for every token of output and prompt, by the model's own logits, over several chunks of the prompt."""
    prompt = prompt_of(200)
    options = GREEDY | {"max_tokens": 8, "logprobs": 3, "prompt_logprobs": 2}
    answer = pair.client.generate(prompt, **options)
    Reference(tiny("llama")).check(prompt, answer, options)


def test_logprobs_without_alternatives_or_without_being_asked_for(pair: Cluster) -> None:
    answer = pair.client.generate(prompt_of(20), max_tokens=3, logprobs=0, prompt_logprobs=0, **GREEDY)
    assert [dict(entry.top) for entry in answer.logprobs + answer.prompt_logprobs] == [{}] * 23
    assert all(math.isfinite(entry.logprob or 0.0) for entry in answer.logprobs)
    plain = pair.client.generate(prompt_of(20), max_tokens=3, **GREEDY)
    assert (plain.logprobs, plain.prompt_logprobs) == ((), ())


def test_failover_changes_what_is_chosen_or_told(two_by_three: Cluster, tiny: Tiny) -> None:
    """Decode dies on the way: the same tokens with the same logprobs, one entry each, and the prompt's only once."""
    options: dict[str, Any] = {
        "max_tokens": 120, "ignore_eos": True, "seed": 5, "temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2,
        "frequency_penalty": 0.3, "logit_bias": {30: 2.0}, "logprobs": 2, "prompt_logprobs": 1,
    }  # fmt: skip
    prompt = prompt_of(100)
    undisturbed = two_by_three.client.generate(prompt, **options)
    with two_by_three.client.stream(prompt, **options) as stream:
        num_tokens = 0
        for chunk in stream:
            num_tokens += len(chunk.token_ids)
            if num_tokens == 20 and chunk.token_ids:
                busy(two_by_three, "decode").kill()
        answer = stream.result()
    assert answer.attempts == 2
    assert answer.token_ids == undisturbed.token_ids
    assert answer.logprobs == undisturbed.logprobs
    assert answer.prompt_logprobs == undisturbed.prompt_logprobs
    Reference(tiny("gemma2")).check(prompt, answer, options)
    assert (len(answer.logprobs), len(answer.prompt_logprobs)) == (120, 100)


def test_first_token_escapes_the_end_rules(pair: Cluster) -> None:
    """C09: by max_tokens, end-of-sequence, a stop token, a stop string: one token each, and nothing behind it."""

    def only(finish_reason: str, **options: Any) -> Generation:
        answer = pair.client.generate(prompt_of(20), **options)
        assert (answer.finish_reason, answer.completion_tokens, len(answer.token_ids)) == (finish_reason, 1, 1)
        return answer

    with pair.undisturbed():
        only("length", max_tokens=1, temperature=0.9)
        ended = only("stop", logit_bias={EOS_TOKEN_ID: 100.0})
        assert (ended.text, ended.matched_stop, ended.token_ids) == ("", None, (EOS_TOKEN_ID,))
        letter = pair.client.tokenize("x")[0]
        stopped = only("stop", logit_bias={letter: 100.0}, stop_token_ids=[letter])
        assert (stopped.text, stopped.matched_stop) == ("", letter)
        matched = only("stop", logit_bias={letter: 100.0}, stop="x")
        assert (matched.text, matched.matched_stop) == ("", "x")


def test_text_without_an_end_goes_past_the_context(pair: Cluster) -> None:
    """C51: max_tokens absent and None are one; 0 is refused; end-of-sequence is banned by bias."""
    prompt = prompt_of(1000)
    for options in ({}, {"max_tokens": None}):
        answer = pair.client.generate(prompt, logit_bias={EOS_TOKEN_ID: -100.0}, temperature=1.0, **options)
        assert (answer.finish_reason, answer.completion_tokens) == ("length", 24)
        assert EOS_TOKEN_ID not in answer.token_ids
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        pair.client.generate(prompt, max_tokens=0)
