"""Three prefill and three decode workers: every pair carries blocks, and none carries another's."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from splitserve.client.types import Generation
from tests.cluster.fault_bench import OUTCOMES, FaultBench
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.moved import Books, assert_moved_by, by_pair, id_of
from tests.cluster.test_exact import B, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.gloo_first]

REQUESTS = 300
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
DROPPED = "splitserve_kv_messages_dropped_total"


def prompts_of(wave: int, count: int = REQUESTS) -> list[list[int]]:
    """All different, from 1 to 251 tokens; half of them begin like others do, with whole blocks or with a part of
    one."""
    beginnings = [[], prompt_of(3 * B, seed=wave), [], prompt_of(3 * B + 7, seed=wave)]
    return [
        beginnings[index % 4] + prompt_of(200 if index % 20 == 0 else 1 + index % 60, seed=1000 * wave + index)
        for index in range(count)
    ]


def serve(
    bench: FaultBench, prompts: list[list[int]], disturb: Callable[[list[Future[Generation]]], None] = lambda _: None
) -> None:
    """All at once; each is answered, and as if it were alone."""
    cluster = bench.cluster
    before = cluster.counted(*OUTCOMES)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(cluster.client.generate, prompt, **OPTIONS) for prompt in prompts]
        disturb(answers)
        for prompt, answer in zip(prompts, answers, strict=True):
            bench.reference.check(prompt, answer.result(), OPTIONS)
    cluster.wait_drained()
    assert cluster.counted(*OUTCOMES) - before == {"length": len(prompts)}


def all_pairs(cluster: Cluster) -> set[tuple[str, str]]:
    sources, sinks = (list(map(id_of, cluster.of_role(role))) for role in ("prefill", "decode"))
    return set(itertools.product(sources, sinks))


def test_wrong_link_is_used(bench: FaultBench) -> None:
    """C80: 300 concurrent requests over nine pairs. What a source has sent to a sink, that sink has of it, and what the
    pairs have moved together is what the workers count."""
    cluster = bench.cluster
    cluster.heal()
    books, before = Books(cluster.workers), cluster.kv_bytes()
    dropped = [worker.metric(DROPPED) for worker in cluster.workers]
    serve(bench, prompts_of(1))
    moved = by_pair(books.settled())
    assert {pair for pair, num_bytes in moved.items() if num_bytes} == all_pairs(cluster)
    if books.is_undisturbed():  # else there are also bytes that were sent or received in vain
        counted = [now - was for now, was in zip(cluster.kv_bytes(), before, strict=True)]
        assert counted == [moved.total(), moved.total()]
        assert [worker.metric(DROPPED) for worker in cluster.workers] == dropped
    assert_moved_by(cluster, bench.transport)


def test_restarted_workers_links_stay_behind(bench: FaultBench) -> None:
    """C33: one worker of each role is killed and replaced in the midst of 300 requests. None fails, the books of those
    that were there throughout agree, and the newcomers' pairs carry blocks without a restart of anybody else."""
    cluster = bench.cluster
    cluster.heal()
    books, dead = Books(cluster.workers), []

    def restart(answers: list[Future[Generation]]) -> None:
        wait_for("a third of the answers", lambda: sum(answer.done() for answer in answers) > REQUESTS // 3)
        for role in ("prefill", "decode"):
            victim = cluster.of_role(role)[0]
            victim.kill()
            dead.append(id_of(victim))
            books.follow(cluster.add(role))

    serve(bench, prompts_of(2), restart)
    assert books.settled(besides=dead)
    cluster.heal()
    since = Books(cluster.workers)
    serve(bench, prompts_of(3, count=90))
    assert set(by_pair(since.settled())) == all_pairs(cluster)
    assert_moved_by(cluster, bench.transport)
