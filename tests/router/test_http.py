"""What an operator's tools would misread on the router's HTTP port."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from router.http import create_app
from router.metrics import Outcome, RouterMetrics
from router.stages import Stage
from splitserve.service.http_server import HttpServer, serve_http
from splitserve.service.metrics import WorkerMetrics, new_registry, render


class State:
    """What the callbacks read."""

    def __init__(self) -> None:
        self.reason: str | None = "no decode worker has joined"
        self.registry = CollectorRegistry()

    def cluster(self) -> Mapping[str, Any]:
        if self.reason == "broken":
            raise ZeroDivisionError("secret detail")
        return {"model": "tiny", "ready": self.reason is None}


@asynccontextmanager
async def serving(state: State) -> AsyncIterator[tuple[httpx.AsyncClient, HttpServer]]:
    app = create_app(
        api=APIRouter(), not_ready_reason=lambda: state.reason, cluster=state.cluster, registry=state.registry
    )
    server = await serve_http(app, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
            yield client, server
    finally:
        await server.stop()


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_readiness_follows_the_cluster_and_liveness_does_not() -> None:
    state = State()
    async with serving(state) as (client, _):
        assert (await client.get("/health/live")).status_code == 200
        not_ready = await client.get("/health/ready")
        assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")
        assert not_ready.json()["error"]["message"] == "no decode worker has joined"
        state.reason = None
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        assert (await client.get("/cluster")).json() == {"model": "tiny", "ready": True}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 404, "not_found"),
        ("POST", "/v1/completions", 404, "not_found"),
        ("POST", "/cluster", 405, "method_not_allowed"),
    ],
)
async def test_a_wrong_path_or_method_answers_in_openais_shape(method: str, path: str, status: int, code: str) -> None:
    """C61."""
    async with serving(State()) as (client, _):
        response = await client.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert error.keys() == {"message", "type", "param", "code"}
        assert path in error["message"]


async def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_ends_nothing() -> None:
    state = State()
    state.reason = "broken"
    async with serving(state) as (client, _):
        response = await client.get("/cluster")
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in response.text
        assert (await client.get("/health/live")).status_code == 200


async def test_every_documented_metric_is_on_the_page() -> None:
    state = State()
    metrics = RouterMetrics(state.registry, "tiny")
    load = {"running": 3.0, "waiting": 2.0}
    metrics.watch_load(
        running=lambda: load["running"],
        waiting=lambda: load["waiting"],
        kv_cache_usage=lambda: 0.25,
        token_pause=lambda: 0.125,
    )
    metrics.count_attempt("first")
    metrics.observe_stage(Stage.HANDOFF, 0.01)
    record = metrics.begin()
    record.admit(7)
    record.token(0)
    record.token(0)
    record.end(Outcome.STOP)
    model = ("model", "tiny")
    async with serving(state) as (client, _):
        page = samples((await client.get("/metrics")).text)
        expected = {
            "splitserve_time_to_first_token_seconds_count": 1,
            "splitserve_inter_token_latency_seconds_count": 1,
            "splitserve_e2e_request_latency_seconds_count": 1,
            "splitserve_num_requests_running": 3,
            "splitserve_num_requests_waiting": 2,
            "splitserve_kv_cache_usage_perc": 0.25,
            "splitserve_prompt_tokens_total": 7,
            "splitserve_generation_tokens_total": 2,
            "splitserve_request_tokenize_time_seconds_count": 1,
            "splitserve_request_queue_time_seconds_count": 0,
            "splitserve_request_prefill_time_seconds_count": 0,
            "splitserve_request_handoff_time_seconds_count": 1,
            "splitserve_request_decode_time_seconds_count": 0,
        }
        assert {name: page[name, frozenset({model})] for name in expected} == expected
        assert page["splitserve_attempts_total", frozenset({("reason", "first"), model})] == 1
        outcomes = {
            o.value: page["splitserve_requests_total", frozenset({("outcome", o.value), model})] for o in Outcome
        }
        assert outcomes == {"stop": 1, "length": 0, "cancelled": 0, "deadline": 0, "rejected": 0, "failed": 0}
        load["running"] = 0
        page = samples((await client.get("/metrics")).text)
        assert page["splitserve_num_requests_running", frozenset({model})] == 0


def test_a_request_that_ends_twice_is_found_out() -> None:
    record = RouterMetrics(CollectorRegistry(), "tiny").begin()
    record.end(Outcome.STOP)
    with pytest.raises(AssertionError, match="ended as stop and again as failed"):
        record.end(Outcome.FAILED)


def test_a_worker_shows_its_load_and_its_transfers() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "tiny")
    metrics.set_load(running=2, waiting=1, blocks_taken=3, blocks_total=4)
    metrics.count_prompt_tokens(5)
    metrics.count_generation_tokens(6)
    metrics.count_cache_lookup(num_tokens=40, num_cached_tokens=32)
    metrics.count_cache_lookup(num_tokens=7, num_cached_tokens=0)
    metrics.count_transfer(transport="ipc", side="source", num_bytes=1000, seconds=0.5)
    metrics.count_transfer_failure(transport="tcp", side="sink", reason="timeout")
    page = samples(render(registry).decode())
    model = ("model", "tiny")
    source = frozenset({model, ("transport", "ipc"), ("side", "source")})
    assert page["splitserve_kv_cache_usage_perc", frozenset({model})] == 0.75
    assert page["splitserve_num_requests_running", frozenset({model})] == 2
    assert page["splitserve_prompt_tokens_total", frozenset({model})] == 5
    assert page["splitserve_generation_tokens_total", frozenset({model})] == 6
    assert page["splitserve_prefix_cache_queries_total", frozenset({model})] == 47
    assert page["splitserve_prefix_cache_hits_total", frozenset({model})] == 32
    assert page["splitserve_kv_transfer_bytes_total", source] == 1000
    assert page["splitserve_kv_transfer_seconds_sum", source] == 0.5
    failed = frozenset({model, ("transport", "tcp"), ("side", "sink"), ("reason", "timeout")})
    assert page["splitserve_kv_transfer_failures_total", failed] == 1
    assert page["process_resident_memory_bytes", frozenset()] > 0


async def test_idle_connection_is_closed_as_it_is_used_again() -> None:
    """C68: clients' pools keep connections for up to 90 s, and a request on one that is just being closed fails."""
    async with serving(State()) as (_, server):
        assert server._server.config.timeout_keep_alive > 90


async def test_the_server_leaves_signals_alone_and_gives_its_port_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    tasks = len(asyncio.all_tasks())
    async with serving(State()) as (client, server):
        await client.get("/health/live")
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        port = server.port
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get("/health/live")
    assert len(asyncio.all_tasks()) == tasks
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with serving(State()) as (_, server):
        with pytest.raises(OSError, match=f"127.0.0.1:{server.port}"):
            await serve_http(lambda: None, "127.0.0.1", server.port)
