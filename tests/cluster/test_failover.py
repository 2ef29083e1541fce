"""A worker or its link dies under a running request: the stream goes on elsewhere and its text is exact."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, Process, wait_for
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
MAX_TOKENS = 300


def stream_through(
    cluster: Cluster, prompt: list[int], disturb: Callable[[], Any], after: int, **sampling: Any
) -> tuple[list[int], int]:
    """Streams, calls `disturb` once `after` tokens have come, and gives (ids, attempts)."""
    ids: list[int] = []
    disturbed = False
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": MAX_TOKENS} | sampling
    with cluster.client.stream(prompt, **options) as stream:
        for chunk in stream:
            ids += chunk.token_ids
            if not disturbed and len(ids) >= after:
                disturbed = True
                disturb()
        result = stream.result()
    assert disturbed
    return ids, result.attempts


def renewals(cluster: Cluster) -> float:
    return cluster.metric("splitserve_ticket_renewals_total")


def num_handed_over(cluster: Cluster) -> float:
    """How often a ticket has left the router for a prefill worker: until then a reservation may still be on its way."""
    return cluster.metric("splitserve_request_queue_time_seconds_count")


def busy(cluster: Cluster, role: str) -> Process:
    """The one worker of this role that has an attempt."""
    worker_id = wait_for("a busy worker", lambda: [w["id"] for w in cluster.workers_of(role) if w["attempts"]])[0]
    return cluster.process_of(worker_id)


def test_killed_decode_worker_ends_the_stream(two_by_three: Cluster, tiny: Tiny) -> None:
    prompt = prompt_of(60, seed=1)
    ids, attempts = stream_through(two_by_three, prompt, lambda: busy(two_by_three, "decode").kill(), after=20)
    assert ids == greedy(tiny("gemma2"), prompt, MAX_TOKENS)
    assert attempts == 2


def test_killed_engine_is_not_missed(two_by_three: Cluster, tiny: Tiny) -> None:
    """The front lives on without its engine for no longer than it takes to say so."""
    prompt = prompt_of(60, seed=2)

    def kill_engine() -> None:
        process = busy(two_by_three, "decode")
        process.is_killed = True
        os.kill(process.engine_pid(), signal.SIGKILL)

    ids, attempts = stream_through(two_by_three, prompt, kill_engine, after=20)
    assert ids == greedy(tiny("gemma2"), prompt, MAX_TOKENS)
    assert attempts == 2


def test_frozen_decode_worker_freezes_the_stream(two_by_three: Cluster, tiny: Tiny) -> None:
    """Front and engine stop without dying; the heartbeat finds out, and when they wake they do no harm."""
    prompt = prompt_of(60, seed=3)
    frozen: list[int] = []

    def freeze() -> None:
        process = busy(two_by_three, "decode")
        frozen.extend([process.engine_pid(), process.pid])
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    ids, attempts = stream_through(two_by_three, prompt, freeze, after=20)
    assert ids == greedy(tiny("gemma2"), prompt, MAX_TOKENS)
    assert attempts == 2
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    wait_for("the frozen worker to join again", lambda: len(two_by_three.state()["workers"]) == 5)
    two_by_three.wait_ready(5)


@pytest.mark.parametrize("num_lives", [1, pytest.param(50, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])])
def test_worker_that_is_back_at_once_is_ignored(num_lives: int, pair: Cluster, tiny: Tiny) -> None:
    """C78: the only decode worker is killed under load and started again with all its settings, its HTTP port too: the
    streams go on there."""
    prompts = [prompt_of(40, seed) for seed in range(3)]
    expected = [greedy(tiny("llama"), prompt, MAX_TOKENS) for prompt in prompts]
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": MAX_TOKENS}
    for _ in range(num_lives):
        worker = pair.of_role("decode")[0]
        port = worker.event("ready")["http_port"]

        def restart(worker: Process = worker, port: int = port) -> None:
            worker.kill()
            pair.add("decode", http_port=port).is_plain = True

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(pair.client.generate, prompt, **options) for prompt in prompts[1:]]
            wait_for("both others", lambda: pair.workers_of("decode")[0]["attempts"] == 2)
            ids, attempts = stream_through(pair, prompts[0], restart, after=20)
            assert [ids, *(list(other.result().token_ids) for other in others)] == expected
        assert attempts == 2
        pair.wait_ready(2)


def test_killed_prefill_worker_is_waited_for(two_by_three: Cluster, tiny: Tiny) -> None:
    """One of the two dies between requests: the next ones notice nothing."""
    two_by_three.of_role("prefill")[0].kill()
    for seed in range(4):
        prompt = prompt_of(60, seed)
        answer = two_by_three.client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == greedy(tiny("gemma2"), prompt, 8)


def test_killed_prefill_worker_costs_the_reservation(two_by_three: Cluster, tiny: Tiny) -> None:
    """It dies with the prompt in its hands: the other one gets the ticket that decode gives out anew."""
    prompt, before, tickets = prompt_of(60, seed=5), renewals(two_by_three), num_handed_over(two_by_three)
    engines = {process.pid: process.engine_pid() for process in two_by_three.of_role("prefill")}
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        options = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        running = pool.submit(lambda: two_by_three.client.generate(prompt, **options))
        wait_for("the ticket to be handed over", lambda: num_handed_over(two_by_three) > tickets)
        victim = busy(two_by_three, "prefill")
        victim.kill()
        engines.pop(victim.pid)
        for pid in engines.values():
            os.kill(pid, signal.SIGCONT)
        answer = running.result(timeout=60)
    assert list(answer.token_ids) == greedy(tiny("gemma2"), prompt, 20)
    assert answer.attempts == 1
    assert renewals(two_by_three) - before == 1


def test_damaged_link_reaches_the_client(pair: Cluster, tiny: Tiny, tmp_path: Path) -> None:
    """C31, C32: the one prefill worker that there is has a bad link: it gets the next ticket as well."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"rules": []}')
    pair.of_role("prefill")[0].kill()
    prefill = pair.add("prefill", fault_plan=plan, transfer_timeout="1s")
    prefill.plan = plan
    for kind, message in (("drop", "Finish"), ("cut", "Blocks")):
        pair.wait_ready(2)
        prefill.set_plan({"kind": kind, "message": message})
        prompt, before = prompt_of(100, seed=len(kind)), renewals(pair)
        answer = pair.client.generate(prompt, max_tokens=10, temperature=0.0, ignore_eos=True)
        assert list(answer.token_ids) == greedy(tiny("llama"), prompt, 10)
        assert answer.attempts == 1
        assert renewals(pair) - before == 1, f"{kind} {message}"
        pair.wait_drained()
