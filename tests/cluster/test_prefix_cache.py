"""Through real processes: a prompt that was here before is computed and sent only as far as it is new."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from splitserve.client.types import Generation
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import BLOCK_NBYTES, B, prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]


def ask(cluster: Cluster, prompt: list[int], max_tokens: int = 4) -> Generation:
    return cluster.client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def lookups(cluster: Cluster) -> list[tuple[float, float]]:
    """Tokens looked up and found, by worker."""
    found = []
    for worker in cluster.workers:
        page = httpx.get(f"http://127.0.0.1:{worker.event('ready')['http_port']}/metrics").text
        values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if "{" in line}
        name = "splitserve_prefix_cache"
        found.append((values[f"{name}_queries_total"], values[f"{name}_hits_total"]))
    return found


def test_cached_tokens_are_computed_sent_or_told_wrong(either_pair: Cluster, tiny: Tiny) -> None:
    """The same prompt twice, then a longer one that begins like it, then one that is cached to its end."""
    text = prompt_of(8 * B, 77)
    for length, cached, num_sent in (
        (4 * B + 3, 0, 5),
        (4 * B + 3, 4 * B, 1),
        (6 * B + 5, 4 * B, 3),
        (6 * B, 6 * B - 1, 0),
    ):
        either_pair.wait_drained()
        sent, before = either_pair.kv_bytes()[0], lookups(either_pair)
        answer = ask(either_pair, text[:length])
        assert list(answer.token_ids) == greedy(tiny("llama"), text[:length], 4)
        assert (answer.prompt_tokens, answer.cached_tokens) == (length, cached)
        either_pair.wait_drained()
        assert either_pair.kv_bytes()[0] - sent == num_sent * BLOCK_NBYTES
        changes = [(now[0] - was[0], now[1] - was[1]) for now, was in zip(lookups(either_pair), before, strict=True)]
        on_decode = (-(-length // B) - num_sent) * B
        assert sorted(changes) == sorted([(length, cached), (length, on_decode)])
    pool = either_pair.state()["pool"]
    assert pool["cached"] > 0
    assert pool["free"] + pool["cached"] == pool["total"]


def test_prompt_that_is_all_cached_never_ends(either_pair: Cluster, tiny: Tiny) -> None:
    """C46: nothing to compute but one token and nothing to send; twenty at once."""
    prompt = prompt_of(4 * B, 78)
    expected = greedy(tiny("llama"), prompt, 3)
    ask(either_pair, prompt)
    either_pair.wait_drained()
    sent = either_pair.kv_bytes()[0]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(either_pair, prompt, 3), range(20)))
    assert [list(answer.token_ids) for answer in answers] == [expected] * 20
    assert {answer.cached_tokens for answer in answers} == {4 * B - 1}
    either_pair.wait_drained()
    assert either_pair.kv_bytes()[0] == sent
