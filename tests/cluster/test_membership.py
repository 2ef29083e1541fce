"""Workers that come late, do not fit, or leave: who gets work, who is refused, and what readiness says meanwhile."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from splitserve.service.errors import Unavailable
from tests.cluster.fault_bench import stopped
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]


def test_pools_that_differ_exchange_blocks(pair: Cluster) -> None:
    """C05: another block size is refused at the handshake, field and both values named; the fitting pair goes on."""
    odd = pair.add("decode", block_size=32)

    def refusal() -> str | None:
        details = [link["detail"] for worker in pair.workers_of("prefill") for link in worker["links"].values()]
        return next((detail for detail in details if "block_size" in detail), None)

    detail = wait_for("the refusal", refusal)
    assert "16" in detail
    assert "32" in detail
    states = {worker["pid"]: worker["state"] for worker in pair.workers_of("decode")}
    assert states[odd.pid] == "unreachable"
    assert sorted(states.values()) == ["ready", "unreachable"]
    for seed in range(6):
        assert len(pair.client.generate(prompt_of(20, seed), max_tokens=2, ignore_eos=True).token_ids) == 2
    assert next(w["steps"] for w in pair.workers_of("decode") if w["pid"] == odd.pid) == 0


@pytest.fixture(scope="module")
def growing(tiny: Tiny) -> Iterator[Cluster]:
    """At first a router alone; its decode workers take one sequence each, and may stand still for long."""
    patience = {"stall_timeout": "600s"}
    decode_flags = patience | {"max_num_seqs": 1}
    cluster = Cluster(tiny("llama"), prefill=0, decode=0, router_flags=patience, decode_flags=decode_flags)
    yield cluster
    cluster.close()


def test_cluster_without_a_pair_is_ready(growing: Cluster) -> None:
    """C05, C36, C69: not ready and an immediate refusal, until blocks can flow; then the first request succeeds."""
    cluster = growing
    ready = cluster.http.get("/health/ready")
    assert ready.status_code == 503
    with pytest.raises(Unavailable, match="no prefill and no decode worker") as refusal:
        cluster.client.generate("hello", max_tokens=1)
    assert refusal.value.retry_after_s is not None
    odd = cluster.add("decode", dtype="bfloat16")
    cluster.add("prefill")
    wait_for("two workers", lambda: len(cluster.state()["workers"]) == 2)
    wait_for("the mismatch", lambda: "dtype" in cluster.http.get("/health/ready").text)
    with pytest.raises(Unavailable, match="dtype"):
        cluster.client.generate("hello", max_tokens=1)
    cluster.add("decode")
    wait_for("readiness", lambda: cluster.http.get("/health/ready").status_code == 200)
    assert cluster.client.model_info().ready
    assert len(cluster.client.generate("hello", max_tokens=1, ignore_eos=True).token_ids) == 1
    odd.kill()


def test_late_worker_gets_nothing_from_the_queue(growing: Cluster) -> None:
    """A full decode worker and ten requests in the queue; another one joins by itself and gets the next one."""
    cluster = growing
    for role in ("prefill", "decode"):
        if not cluster.of_role(role):
            cluster.add(role)
    cluster.wait_ready(2)
    [full] = cluster.of_role("decode")
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}

    def has_newcomer_work() -> bool:
        return any(worker["attempts"] for worker in cluster.workers_of("decode") if worker["pid"] != full.pid)

    with cluster.client.stream(prompt_of(20), **options) as stream, ThreadPoolExecutor(10) as pool:
        next(stream)
        with stopped(full.engine_pid()):
            answers = [pool.submit(cluster.client.generate, prompt_of(20, seed), **options) for seed in range(1, 11)]
            wait_for("ten queued requests", lambda: cluster.state()["queue"]["requests"] == 10)
            assert cluster.state()["queue"]["prompt_tokens"] == 200
            cluster.add("decode")
            wait_for("the second worker to have an attempt", has_newcomer_work)
            assert cluster.state()["queue"]["requests"] > 0
        assert {len(answer.result().token_ids) for answer in answers} == {300}
        assert len(stream.result().token_ids) == 300
    cluster.wait_drained()


def test_loss_of_the_only_prefill_worker_stops_everything_or_goes_unnoticed(pair: Cluster, tiny: Tiny) -> None:
    """C36, under load: what decodes goes on as the same attempt, new requests are refused at once, those that it had or
    that were queued for it wait, and a new worker is all it takes."""
    options: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt_of(90, seed) for seed in range(6)]
    with ExitStack() as streams, ThreadPoolExecutor(3) as pool:
        running = [streams.enter_context(pair.client.stream(prompt, **options)) for prompt in prompts[:3]]
        # The second token is decode's.
        ids = [[i for chunk in itertools.islice(stream, 2) for i in chunk.token_ids] for stream in running]
        lost = pair.of_role("prefill")[0]
        os.kill(lost.engine_pid(), signal.SIGSTOP)
        waiting = [pool.submit(pair.client.generate, prompt, **options | {"max_tokens": 8}) for prompt in prompts[3:]]
        wait_for("requests", lambda: pair.workers_of("prefill")[0]["attempts"] + pair.state()["queue"]["requests"] == 3)
        lost.kill()
        wait_for("the loss", lambda: not pair.workers_of("prefill"))
        with pytest.raises(Unavailable, match=r"no prefill worker has joined \(--without-prefill refuse\)") as refusal:
            pair.client.generate(prompt_of(20), **options)
        assert refusal.value.retry_after_s is not None
        ids = [
            [*begun, *(i for chunk in stream for i in chunk.token_ids)]
            for begun, stream in zip(ids, running, strict=True)
        ]
        assert [stream.result().attempts for stream in running] == [1, 1, 1]
        assert pair.state()["queue"]["requests"] == 3
        pair.add("prefill")
        pair.wait_ready(2)
        answers = [list(future.result().token_ids) for future in waiting]
    assert ids == [greedy(tiny("llama"), prompt, 400) for prompt in prompts[:3]]
    assert answers == [greedy(tiny("llama"), prompt, 8) for prompt in prompts[3:]]


def test_worker_of_another_model_joins(pair: Cluster, tiny: Tiny) -> None:
    """C69: it is refused, and the router's log and its own name the field in which they differ. One that calls itself
    by the same name is known by its files."""
    strangers = [
        (pair.add("decode", model=tiny("gemma2")), "model: this router serves 'llama', the worker 'gemma2'"),
        (pair.add("decode", model=tiny("gemma2"), served_model_name="llama"), "revision: this router serves "),
    ]
    for stranger, refusal in strangers:
        stranger.is_killed = True
        for process in (pair.router, stranger):
            wait_for(f"{refusal!r}", lambda p=process, r=refusal: any(r in line for line in p.lines))
    assert len(pair.state()["workers"]) == 2


def test_start_with_a_wrong_setting_is_retried_for_ever(pair: Cluster, tiny: Tiny, tmp_path: Path) -> None:
    """Exit status 78 and the reason in the log: no model, one not served, a pool without a block, no plan."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": tmp_path}, "is not a model directory"),
        ({"model": tiny("bloom")}, "bloom"),
        ({"kv_cache_memory": "1KiB"}, "hold no block"),
        ({"fault_plan": tmp_path / "none.json"}, "fault plan"),
    ]
    started = [(pair.add("decode", **flags), reason) for flags, reason in wrong]
    for process, reason in started:
        process.is_killed = True
        assert process.popen.wait(60) == 78
        wait_for(f"the reason {reason!r}", lambda p=process, r=reason: any(r in line for line in p.lines), 10)
