"""Three prefill and three decode workers: every pair carries blocks, and none carries another's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.fault_bench import OUTCOMES, FaultBench
from tests.cluster.harness import wait_for
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

REQUESTS = 300
MAX_TOKENS = 6


def test_wrong_link_is_used(bench: FaultBench, tiny: Callable[[str], Path]) -> None:
    """C80, C33: 300 concurrent requests over nine pairs while one worker of each role is killed and replaced."""
    cluster = bench.cluster
    cluster.heal()

    def ask(index: int) -> list[int]:
        answer = cluster.client.generate(
            prompt_of(10 + index % 60, index), max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
        )
        return list(answer.token_ids)

    before = cluster.counted(*OUTCOMES)
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [pool.submit(ask, index) for index in range(REQUESTS)]
        wait_for("a third of the answers", lambda: sum(a.done() for a in answers) > REQUESTS // 3)
        for role in ("prefill", "decode"):
            cluster.of_role(role)[0].kill()
            cluster.add(role)
        outputs = [answer.result() for answer in answers]
    assert outputs == [greedy(tiny("llama"), prompt_of(10 + i % 60, i), MAX_TOKENS) for i in range(REQUESTS)]
    cluster.wait_drained()
    assert cluster.counted(*OUTCOMES) - before == {"length": REQUESTS}
