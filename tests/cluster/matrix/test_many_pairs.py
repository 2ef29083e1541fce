"""Three prefill and three decode workers: every pair carries blocks, and none carries another's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.fault_bench import OUTCOMES, FaultBench
from tests.cluster.harness import wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = pytest.mark.cluster

REQUESTS = 300
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def test_wrong_link_is_used(bench: FaultBench) -> None:
    """C80, C33: 300 concurrent requests over nine pairs while one worker of each role is killed and replaced."""
    cluster = bench.cluster
    cluster.heal()

    prompts = [prompt_of(10 + index % 60, index) for index in range(REQUESTS)]
    before = cluster.counted(*OUTCOMES)
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [pool.submit(cluster.client.generate, prompt, **OPTIONS) for prompt in prompts]
        wait_for("a third of the answers", lambda: sum(a.done() for a in answers) > REQUESTS // 3)
        for role in ("prefill", "decode"):
            cluster.of_role(role)[0].kill()
            cluster.add(role)
        for prompt, answer in zip(prompts, answers, strict=True):
            bench.reference.check(prompt, answer.result(), OPTIONS)
    cluster.wait_drained()
    assert cluster.counted(*OUTCOMES) - before == {"length": REQUESTS}
