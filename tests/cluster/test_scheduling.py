"""Clusters that are too small for what is asked of them at once: everybody is served, and nobody waits for one."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve.service.errors import InvalidRequest
from tests.cluster.fault_bench import stopped
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exact import BLOCK_NBYTES, B, outputs, prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]

CONTEXT = 6 * B


@pytest.fixture(scope="module")
def narrow(tiny: Tiny) -> Iterator[Cluster]:
    """Decode holds 7 blocks, prefill 12."""
    cluster = Cluster(
        tiny("llama"),
        prefill_flags={"kv_cache_memory": 12 * BLOCK_NBYTES},
        decode_flags={"kv_cache_memory": 7 * BLOCK_NBYTES},
    )
    yield cluster
    cluster.close()


@pytest.mark.parametrize("priorities", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_two_requests_hold_the_blocks_that_the_other_needs(
    priorities: tuple[int, int], narrow: Cluster, tiny: Tiny
) -> None:
    """C43: 4 + 1 and 3 + 1 blocks together, and both grow; over and over, both finish with their own text, whichever is
    the more urgent one."""
    prompts = [prompt_of(4 * B), prompt_of(3 * B)]
    expected = [greedy(tiny("llama"), prompt, 2 * B) for prompt in prompts]
    with narrow.undisturbed():
        for _ in range(2):
            assert outputs(narrow, prompts, 2 * B, priorities) == expected
            assert outputs(narrow, prompts[::-1], 2 * B, priorities) == expected[::-1]


def test_sequence_out_of_blocks_loses_its_request(narrow: Cluster, tiny: Tiny) -> None:
    """C41: decode holds one and a half of three requests at their end. All their blocks had come; who gives way goes on
    later, from the tokens that its client has."""
    prompts = [prompt_of(2 * B, seed) for seed in range(3)]
    expected = [greedy(tiny("llama"), prompt, 3 * B) for prompt in prompts]
    preempted = narrow.metric("splitserve_attempts_total", reason="preempted")
    with narrow.undisturbed(), ThreadPoolExecutor(1) as pool:
        with stopped(narrow.of_role("prefill")[0].engine_pid()):  # so that two of them begin together
            answers = pool.submit(outputs, narrow, prompts, 3 * B)
            wait_for("two reservations", lambda: narrow.workers_of("decode")[0]["attempts"] == 2)
        assert answers.result() == expected
    assert narrow.metric("splitserve_attempts_total", reason="preempted") > preempted


def test_prompt_that_decode_can_never_hold_stops_the_next_one(narrow: Cluster) -> None:
    """C44 on decode's pool, which is the smaller one: the numbers at once, and the small one runs."""
    limit = 7 * B - 1
    with narrow.undisturbed():
        for length in range(limit - 2, limit + 4):
            if length <= limit:
                answer = narrow.client.generate(prompt_of(length), max_tokens=1, ignore_eos=True)
                assert len(answer.token_ids) == 1
            else:
                with pytest.raises(InvalidRequest, match=rf"{length} tokens.*decode workers can hold is {limit}"):
                    narrow.client.generate(prompt_of(length), max_tokens=1)
            assert len(narrow.client.generate(prompt_of(10), max_tokens=2, ignore_eos=True).token_ids) == 2
        with pytest.raises(InvalidRequest, match=f"decode workers allow {limit + 1} tokens, so at most 12 "):
            narrow.client.generate(prompt_of(100), max_tokens=200)


@pytest.fixture(scope="module")
def three_contexts(tiny: Tiny) -> Iterator[Cluster]:
    """Pools for three full contexts of 96 tokens."""
    cluster = Cluster(
        tiny("llama"), max_model_len=CONTEXT, max_num_batched_tokens=48, kv_cache_memory=3 * CONTEXT // B * BLOCK_NBYTES
    )
    yield cluster
    cluster.close()


def test_requests_without_max_tokens_run_one_by_one(three_contexts: Cluster, tiny: Tiny) -> None:
    """C51: eight start together, each on the blocks that it fills, and each goes to the end of the context; who is in
    the way of an older one meanwhile goes on later with the same text."""
    prompts = [prompt_of(10, seed) for seed in range(8)]
    has_started = threading.Barrier(len(prompts))
    together: list[bool] = []

    def run(prompt: list[int]) -> list[int]:
        with three_contexts.client.stream(prompt, temperature=0.0, ignore_eos=True) as stream:
            next(stream)
            has_started.wait(60)
            together.append(not has_started.broken)
            for _ in stream:
                pass
            answer = stream.result()
        assert answer.finish_reason == "length"
        return list(answer.token_ids)

    with three_contexts.undisturbed(), ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(run, prompts))
    assert together == [True] * len(prompts)
    assert answers == [greedy(tiny("llama"), prompt, CONTEXT - 10) for prompt in prompts]


def test_giant_prompts_starve_the_prefill_tier(pair: Cluster) -> None:
    """C47: each takes 21 steps alone, and 20 short prompts come behind eight of them: those do not wait for all."""
    first_tokens: list[str] = []

    def run(name: str, prompt: list[int]) -> None:
        with pair.client.stream(prompt, max_tokens=2, temperature=0.0, ignore_eos=True) as stream:
            next(stream)
            first_tokens.append(name)
            stream.result()

    with pair.undisturbed(), ThreadPoolExecutor(28) as pool:
        giants = [pool.submit(run, "giant", prompt_of(1000, seed)) for seed in range(8)]
        wait_for("a giant prompt to be computed", lambda: pair.workers_of("prefill")[0]["running"] == 1)
        short = [pool.submit(run, "short", prompt_of(20, seed)) for seed in range(20)]
        for future in [*short, *giants]:
            future.result()
    last_short = len(first_tokens) - 1 - first_tokens[::-1].index("short")
    assert first_tokens[:last_short].count("giant") <= 4
