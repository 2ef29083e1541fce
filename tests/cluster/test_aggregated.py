"""A cluster without prefill workers: decode workers compute prompts themselves, until there is somebody else for it."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve import Client
from splitserve.engine.sampling_params import SamplingParams
from tests.cluster.fault_bench import stopped
from tests.cluster.harness import Cluster, Process, wait_for
from tests.cluster.test_exact import B, prompt_of
from tests.cluster.up import COMMAND
from tests.cluster.up import up as start_up
from tests.reference import greedy, sampled

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
THRESHOLD = 20


@pytest.fixture(scope="module")
def _aggregated(tiny: Tiny) -> Iterator[Cluster]:
    flags = {"without_prefill": "local", "split_threshold": THRESHOLD}
    cluster = Cluster(tiny("llama"), prefill=0, decode=2, router_flags=flags, max_num_batched_tokens=48)
    yield cluster
    cluster.close()


@pytest.fixture
def aggregated(_aggregated: Cluster) -> Iterator[Cluster]:
    """A router and two decode workers with a tiny Llama in float32, steps of 48 tokens."""
    _aggregated.heal()
    yield _aggregated
    _aggregated.wait_drained()


def num_local(cluster: Cluster) -> float:
    return cluster.metric("splitserve_local_prefills_total")


def test_text_differs_from_one_process(aggregated: Cluster, tiny: Tiny) -> None:
    """All at once, so that prompts are computed beside what runs; nothing travels, and every prompt is counted."""
    assert aggregated.http.get("/health/ready").status_code == 200
    assert {worker["state"] for worker in aggregated.state()["workers"]} == {"ready"}
    prompts = [prompt_of(length, seed=length) for length in (1, B, B + 1, 3 * B, 100, 100 + B, 300)]
    before = num_local(aggregated)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(lambda p: aggregated.client.generate(p, max_tokens=60, timings=True, **OPTIONS), prompts)
        )
    assert [list(answer.token_ids) for answer in answers] == [greedy(tiny("llama"), prompt, 60) for prompt in prompts]
    for answer in answers:
        assert answer.timings is not None
        assert (answer.timings.handoff_s, answer.timings.transfer_bytes, answer.attempts) == (0.0, 0, 1)
        assert answer.timings.prefill_s > 0
    assert aggregated.kv_bytes() == (0, 0)
    assert num_local(aggregated) - before == len(prompts)
    computed = sum(worker.metric("splitserve_prompt_tokens_total") for worker in aggregated.of_role("decode"))
    assert computed == sum(map(len, prompts))


def test_samples_or_logprobs_differ_from_those_of_a_pair(aggregated: Cluster, pair: Cluster, tiny: Tiny) -> None:
    prompt, n = prompt_of(2 * B + 3, seed=77), 3
    options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 5, "temperature": 0.9, "top_p": 0.95}
    told = {"logprobs": 2, "prompt_logprobs": 1, "n": n}
    here, there = (cluster.client.generate(prompt, **options, **told) for cluster in (aggregated, pair))
    assert here.samples == there.samples
    assert here.prompt_logprobs == there.prompt_logprobs
    params = SamplingParams(**options)
    assert [list(sample.token_ids) for sample in here.samples] == [
        sampled(tiny("llama"), prompt, params, sample_index=index) for index in range(n)
    ]


def computing(cluster: Cluster, prompt: list[int], pool: ThreadPoolExecutor, role: str) -> tuple[Process, Any]:
    """A request that stands still with the engine that computes its prompt."""
    engines = {process.pid: process.engine_pid() for process in cluster.of_role(role)}
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)
    answer = pool.submit(lambda: cluster.client.generate(prompt, max_tokens=20, **OPTIONS))
    busy = wait_for("the attempt", lambda: [w["id"] for w in cluster.workers_of(role) if w["attempts"]])[0]
    victim = cluster.process_of(busy)
    for process in cluster.of_role(role):
        if process is not victim:
            os.kill(engines[process.pid], signal.SIGCONT)
    return victim, answer


def test_cancelled_prompt_is_computed_to_its_end(aggregated: Cluster) -> None:
    """The client leaves while the worker stands still in it; then nothing of it is left, and hardly a step was made."""
    steps = sum(worker["steps"] for worker in aggregated.workers_of("decode"))
    with stopped(*(process.engine_pid() for process in aggregated.of_role("decode"))):
        with aggregated.client.stream(prompt_of(900, seed=4), max_tokens=20, **OPTIONS):
            wait_for("the attempt", lambda: any(w["attempts"] for w in aggregated.workers_of("decode")))
        wait_for("its end", lambda: not any(w["attempts"] for w in aggregated.workers_of("decode")))
    aggregated.wait_drained()
    assert sum(worker["steps"] for worker in aggregated.workers_of("decode")) - steps < 900 // 48


def test_prefill_workers_that_come_and_go_are_not_noticed(aggregated: Cluster, tiny: Tiny) -> None:
    """C36: short prompts stay where they are decoded, long ones go to whoever is there for them; when the last one dies
    with a prompt in its hands, a decode worker computes that, and all that come after."""
    cluster, long, short = aggregated, prompt_of(90, seed=5), prompt_of(THRESHOLD, seed=6)

    def generate(prompt: list[int]) -> None:
        assert list(cluster.client.generate(prompt, max_tokens=8, **OPTIONS).token_ids) == greedy(
            tiny("llama"), prompt, 8
        )

    prefill = cluster.add("prefill")
    cluster.wait_ready(3)
    before = num_local(cluster)
    generate(short)
    assert (num_local(cluster) - before, cluster.kv_bytes()) == (1, (0, 0))
    generate(long)
    wait_for("the blocks", lambda: cluster.kv_bytes()[1] > 0)
    assert num_local(cluster) - before == 1
    again = prompt_of(120, seed=7)
    with ThreadPoolExecutor(1) as pool:
        victim, answer = computing(cluster, again, pool, "prefill")
        assert victim is prefill
        victim.kill()
        assert list(answer.result(60).token_ids) == greedy(tiny("llama"), again, 20)
    assert answer.result().attempts == 2
    assert cluster.http.get("/health/ready").status_code == 200
    generate(prompt_of(90, seed=8))
    assert num_local(cluster) - before == 3
    told = [event["event"] for event in cluster.router.events if "compute prompts" in event.get("event", "")]
    assert [text.split(":")[0] for text in told[-2:]] == [
        "prefill workers compute prompts",
        "no prefill worker can reach a decode worker",
    ]


def test_death_of_who_computes_a_prompt_reaches_the_client(aggregated: Cluster, tiny: Tiny) -> None:
    prompt = prompt_of(200, seed=3)
    with ThreadPoolExecutor(1) as pool:
        victim, answer = computing(aggregated, prompt, pool, "decode")
        victim.kill()
        assert list(answer.result(60).token_ids) == greedy(tiny("llama"), prompt, 20)
    assert answer.result().attempts == 2


def test_up_without_prefill_workers_never_gets_ready(tiny: Tiny, tmp_path: Path) -> None:
    with start_up(tmp_path / "log", "--model", str(tiny("llama")), "--prefill", "0", "--dtype", "float32") as up:
        state = httpx.get(f"{up.url}/cluster", timeout=5).json()
        assert [(worker["role"], worker["state"]) for worker in state["workers"]] == [("decode", "ready")]
        prompt = prompt_of(40)
        with Client(up.target) as client:
            info = client.model_info()
            assert info.ready
            assert info.max_prompt_tokens == info.max_model_len - 1
            assert list(client.generate(prompt, max_tokens=8, **OPTIONS).token_ids) == greedy(tiny("llama"), prompt, 8)
        shown = subprocess.run(
            [*COMMAND, "status", "--url", up.url], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "aggregated" in shown
        assert "prefill" not in shown
