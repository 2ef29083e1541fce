"""Values that are wrong for one request: refused with the true numbers, and no worker or other request is harmed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.service.errors import InvalidRequest, NotFound
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import BLOCK_NBYTES, prompt_of
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([5], {"temperature": NAN}),
        ([5], {"temperature": INF}),
        ([5], {"temperature": -0.1}),
        ([5], {"temperature": 1e30}),
        ([5], {"top_p": NAN}),
        ([5], {"top_p": 0.0}),
        ([5], {"top_k": -5}),
        ([5], {"min_p": NAN}),
        ([5], {"max_tokens": 0}),
        ([5], {"max_tokens": -1}),
        ([5], {"max_tokens": 2**31 - 1}),
        ([5], {"stop_token_ids": [VOCAB_SIZE]}),
        ([5], {"stop_token_ids": [-1]}),
        ([-1], {}),
        ([VOCAB_SIZE], {}),
        ([2**40], {}),
        ([], {}),
        ("", {}),
        ("x" * 200_000, {}),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_value_reaches_a_worker(prompt: Any, options: dict[str, Any], pair: Cluster) -> None:
    """C62, C64: each is refused by name, and the next request is served by the same workers."""
    steps = {worker["id"]: worker["steps"] for worker in pair.state()["workers"]}
    with pair.undisturbed():
        with pytest.raises(InvalidRequest) as refusal:
            pair.client.generate(prompt, **options)
        assert refusal.value.field
        assert {worker["id"]: worker["steps"] for worker in pair.state()["workers"]} == steps
        assert len(pair.client.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("prompt", [" ", "\0", "\u200b", "é", "🧑\u200d🧑"])
def test_odd_text_hurts_a_worker(prompt: str, pair: Cluster) -> None:
    """C64."""
    with pair.undisturbed():
        assert len(pair.client.generate(prompt, max_tokens=2, ignore_eos=True).token_ids) == 2


def test_extreme_but_legal_values_hurt_a_worker(pair: Cluster) -> None:
    """C62: a tiny temperature is greedy, and the ends of every range are served."""
    with pair.undisturbed():
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        greedy = pair.client.generate([5, 6, 7], temperature=0.0, **options).token_ids
        assert pair.client.generate([5, 6, 7], temperature=1e-9, seed=3, **options).token_ids == greedy
        for extreme in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"seed": 2**64 - 1}, {"top_k": 2**31 - 1}):
            assert len(pair.client.generate([5, 6, 7], **options, **extreme).token_ids) == 8


def test_unknown_model_is_served(pair: Cluster) -> None:
    with pytest.raises(NotFound):
        pair.client.generate([5], model="nope", max_tokens=1)


def test_context_is_passed(pair: Cluster) -> None:
    """Prompt and output fill the context exactly; one token more is refused with the numbers."""
    with pair.undisturbed():
        answer = pair.client.generate(prompt_of(1000), max_tokens=24, ignore_eos=True)
        assert (len(answer.token_ids), answer.finish_reason) == (24, "length")
        assert len(pair.client.generate(prompt_of(1023), ignore_eos=True).token_ids) == 1
        with pytest.raises(InvalidRequest, match="1024"):
            pair.client.generate(prompt_of(1000), max_tokens=25)
        with pytest.raises(InvalidRequest, match="1024"):
            pair.client.generate(prompt_of(1024))


@pytest.fixture(scope="module")
def uneven(tiny: Tiny) -> Iterator[Cluster]:
    """Prefill holds 10 blocks of 16 tokens, decode 12."""
    cluster = Cluster(
        tiny("llama"),
        prefill_flags={"kv_cache_memory": 10 * BLOCK_NBYTES},
        decode_flags={"kv_cache_memory": 12 * BLOCK_NBYTES},
    )
    yield cluster
    cluster.close()


def test_prompt_above_one_sides_pool_kills_it(uneven: Cluster) -> None:
    """C54, C44: the smaller limit is known and named; 160 tokens go, 161 and 900 do not, and the small one runs."""
    with uneven.undisturbed():
        for length in (143, 159, 160, 161, 191, 193, 900):
            if length <= 160:
                answer = uneven.client.generate(prompt_of(length), max_tokens=1, ignore_eos=True)
                assert len(answer.token_ids) == 1
            else:
                with pytest.raises(InvalidRequest, match=rf"{length} tokens; .* prefill workers can hold is 160"):
                    uneven.client.generate(prompt_of(length), max_tokens=1)
            assert len(uneven.client.generate(prompt_of(10), max_tokens=2, ignore_eos=True).token_ids) == 2


def test_growth_beyond_the_pool_hangs(uneven: Cluster) -> None:
    """C44: 100 tokens of prompt and 200 of output pass the 160 of prefill, from which an interrupted request would go
    on, and its last one: refused with the numbers, and without max_tokens it ends there by length."""
    with uneven.undisturbed():
        with pytest.raises(
            InvalidRequest, match="the prefill workers allow 161 tokens, so at most 61 can be generated"
        ):
            uneven.client.generate(prompt_of(100), max_tokens=200, ignore_eos=True)
        for options in ({}, {"max_tokens": 61}):
            answer = uneven.client.generate(prompt_of(100), ignore_eos=True, **options)
            assert (len(answer.token_ids), answer.finish_reason) == (61, "length")
        assert len(uneven.client.generate(prompt_of(10), max_tokens=2, ignore_eos=True).token_ids) == 2
