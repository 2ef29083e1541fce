"""Through real processes: the text is that of one process, whatever the lengths, the company and the pair."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve.engine.sampling_params import SamplingParams
from tests.cluster.harness import Cluster
from tests.reference import greedy, sampled
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.cluster

B = 16
BLOCK_NBYTES = 2 * 2 * 2 * B * 16 * 4  # layers, K and V, KV heads, tokens, head size, float32
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 48, 49, 200]

Tiny = Callable[[str], Path]


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB_SIZE) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, vocab), k=length)


def outputs(
    cluster: Cluster, prompts: list[list[int]], max_tokens: int, priorities: Sequence[int] = ()
) -> list[list[int]]:
    """All at once over gRPC; those of no priority of their own have 0."""

    def run(prompt: list[int], priority: int) -> list[int]:
        answer = cluster.client.generate(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, priority=priority
        )
        assert answer.finish_reason == "length"
        assert (answer.prompt_tokens, answer.completion_tokens) == (len(prompt), max_tokens)
        return list(answer.token_ids)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(run, prompts, priorities or [0] * len(prompts)))


def test_text_differs_from_one_process(either_pair: Cluster, tiny: Tiny) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    for prompt in prompts:
        assert outputs(either_pair, [prompt], 10) == [greedy(tiny("llama"), prompt, 10)]


def test_prompt_without_a_whole_block_never_ends(either_pair: Cluster, tiny: Tiny) -> None:
    """C46: 1, B-1, B and B+1 tokens, twenty of each, all answered with the right text."""
    for length in (1, B - 1, B, B + 1):
        prompts = [prompt_of(length, seed) for seed in range(20)]
        assert outputs(either_pair, prompts, 3) == [greedy(tiny("llama"), prompt, 3) for prompt in prompts]


def test_decode_recomputes_instead_of_receiving(either_pair: Cluster) -> None:
    """The bytes that crossed are the prompts' blocks, no more and no fewer."""
    either_pair.wait_drained()
    sent, received = either_pair.kv_bytes()
    outputs(either_pair, [prompt_of(length, seed=100) for length in LENGTHS], 4)  # nothing of these is cached
    either_pair.wait_drained()
    expected = sum(-(-length // B) for length in LENGTHS) * BLOCK_NBYTES
    now_sent, now_received = either_pair.kv_bytes()
    assert (now_sent - sent, now_received - received) == (expected, expected)


def test_company_changes_the_text(two_by_three: Cluster, tiny: Tiny) -> None:
    """Forty mixed requests at once over two prefill and three decode workers; every worker takes part."""
    prompts = [prompt_of(LENGTHS[seed % len(LENGTHS)], seed) for seed in range(40)]
    steps = {worker["id"]: worker["steps"] for worker in two_by_three.state()["workers"]}
    assert outputs(two_by_three, prompts, 12) == [greedy(tiny("gemma2"), prompt, 12) for prompt in prompts]
    idle = [w["id"] for w in two_by_three.state()["workers"] if w["steps"] == steps[w["id"]]]
    assert not idle, f"workers without a step: {idle}"


def test_seed_gives_two_texts(two_by_three: Cluster, tiny: Tiny) -> None:
    """C08: one seed, one text, on whichever pair, and that of one process; first tokens vary over seeds."""
    prompt = prompt_of(20)

    def run(seed: int, max_tokens: int) -> tuple[int, ...]:
        answer = two_by_three.client.generate(
            prompt, seed=seed, temperature=0.8, max_tokens=max_tokens, ignore_eos=True
        )
        return tuple(answer.token_ids)

    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    assert {run(1, 20) for _ in range(20)} == {tuple(sampled(tiny("gemma2"), prompt, params))}
    assert len({run(seed, 1) for seed in range(50)}) > 5


def test_client_ids_are_keys(pair: Cluster) -> None:
    """C39, C40: odd and equal request ids; each request gets its own answer, and its own id back."""
    prompts = [prompt_of(20, seed) for seed in range(6)]
    names = ["a/b#c d", "é" * 200, "x" * 256, "same", "same", ""]
    alone = outputs(pair, prompts, 6)

    def run(index: int) -> list[int]:
        answer = pair.client.generate(
            prompts[index], request_id=names[index], max_tokens=6, temperature=0.0, ignore_eos=True
        )
        return list(answer.token_ids)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, range(6))) == alone
