"""Three prefill and three decode workers: every pair carries blocks, and none carries another's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

REQUESTS = 300
MAX_TOKENS = 6


def test_wrong_link_is_used(tiny: Callable[[str], Path]) -> None:
    """C80, C33: 300 concurrent requests over nine pairs while one worker of each role is killed and replaced."""
    directory = tiny("llama")
    # Both workers that are killed may have the same request: it is not the cause.
    flags = {"routing": "round_robin", "max_attempts": 5, "max_deaths": 3}
    cluster = Cluster(directory, prefill=3, decode=3, router_flags=flags)
    try:

        def ask(index: int) -> list[int]:
            answer = cluster.client.generate(
                prompt_of(10 + index % 60, index), max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
            )
            return list(answer.token_ids)

        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = [pool.submit(ask, index) for index in range(REQUESTS)]
            wait_for("a third of the answers", lambda: sum(a.done() for a in answers) > REQUESTS // 3)
            for role in ("prefill", "decode"):
                cluster.of_role(role)[0].kill()
                cluster.add(role)
            outputs = [answer.result() for answer in answers]
        assert outputs == [greedy(directory, prompt_of(10 + i % 60, i), MAX_TOKENS) for i in range(REQUESTS)]
        cluster.wait_ready(6)
        cluster.wait_drained()
        assert cluster.metric("splitserve_requests_total", outcome="length") == REQUESTS
        assert cluster.metric("splitserve_requests_total") == REQUESTS
    finally:
        cluster.close()
