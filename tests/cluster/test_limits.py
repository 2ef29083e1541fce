"""Prompts around a worker's limit, as ids and as chat text: the smaller side's limit counts and no worker is harmed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.client.types import Message
from splitserve.service.errors import InvalidRequest
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]

# Prompt + output that one worker of the role takes; a prompt leaves room for one token of output.
PREFILL_LEN, DECODE_LEN = 100, 120
LIMIT = PREFILL_LEN - 1


@pytest.fixture(scope="module")
def limited(tiny: Tiny) -> Iterator[Cluster]:
    cluster = Cluster(
        tiny("llama"),
        prefill_flags={"max_model_len": PREFILL_LEN},
        decode_flags={"max_model_len": DECODE_LEN},
        max_num_batched_tokens=48,
    )
    yield cluster
    cluster.close()


def chat_of(cluster: Cluster, num_tokens: int) -> list[Message]:
    """A chat that has exactly this many tokens once the template is around it: each digit is one."""
    frame = len(cluster.client.tokenize([{"role": "user", "content": "1"}])) - 1
    messages: list[Message] = [{"role": "user", "content": "1" * (num_tokens - frame)}]
    assert len(cluster.client.tokenize(messages)) == num_tokens
    return messages


def prompt_as(form: str, cluster: Cluster, num_tokens: int) -> Any:
    return chat_of(cluster, num_tokens) if form == "chat" else prompt_of(num_tokens)


@pytest.mark.parametrize("form", ["ids", "chat"])
def test_prompt_around_the_limit_kills_a_worker(form: str, limited: Cluster, tiny: Tiny) -> None:
    """C54: below and at prefill's limit served; above it, around decode's and far above refused with the numbers."""
    small = prompt_of(10)
    expected_small = greedy(tiny("llama"), small, 3)
    with limited.undisturbed():
        for num_tokens in (LIMIT - 1, LIMIT, LIMIT + 1, DECODE_LEN - 1, DECODE_LEN, DECODE_LEN + 1, 500):
            prompt = prompt_as(form, limited, num_tokens)
            if num_tokens <= LIMIT:
                answer = limited.client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
                ids = prompt if form == "ids" else list(limited.client.tokenize(prompt))
                assert list(answer.token_ids) == greedy(tiny("llama"), ids, 1)
                assert answer.prompt_tokens == num_tokens
                assert answer.attempts == 1
            else:
                with pytest.raises(InvalidRequest) as refusal:
                    limited.client.generate(prompt, max_tokens=1)
                assert str(num_tokens) in refusal.value.message
                assert str(LIMIT) in refusal.value.message or str(PREFILL_LEN) in refusal.value.message
            answer = limited.client.generate(small, max_tokens=3, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected_small


def test_refused_prompt_costs_a_step(limited: Cluster) -> None:
    """The router knows the limits: what is too long never reaches a worker."""
    limited.wait_drained()
    steps = {worker["id"]: worker["steps"] for worker in limited.state()["workers"]}
    for form in ("ids", "chat"):
        with pytest.raises(InvalidRequest):
            limited.client.generate(prompt_as(form, limited, LIMIT + 1), max_tokens=1)
    assert {worker["id"]: worker["steps"] for worker in limited.state()["workers"]} == steps


def test_output_passes_the_context(limited: Cluster, tiny: Tiny) -> None:
    """A sequence may have to be prefilled again at any length, so it ends where the shorter role's context ends."""
    prompt = prompt_of(60)
    with limited.undisturbed():
        answer = limited.client.generate(prompt, temperature=0.0, ignore_eos=True)
        assert answer.finish_reason == "length"
        assert list(answer.token_ids) == greedy(tiny("llama"), prompt, PREFILL_LEN - 60)
        with pytest.raises(InvalidRequest, match=str(PREFILL_LEN)):
            limited.client.generate(prompt, max_tokens=PREFILL_LEN - 60 + 1)
