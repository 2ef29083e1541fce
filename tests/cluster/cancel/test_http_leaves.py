"""A client of the HTTP API closes its connection, with a stream or without: workers soon hold nothing."""

import json
import socket
from typing import Any

import pytest

from tests.cluster.cancel.books import held_blocks, num_steps, outcomes
from tests.cluster.fault_bench import FaultBench, stopped
from tests.cluster.harness import wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MAX_TOKENS = 1500  # in three prompts all that the pools hold


def ask(bench: FaultBench, **options: Any) -> socket.socket:
    """A connection on which a long text completion was asked for."""
    assert bench.cluster.http.base_url.port is not None
    connection = socket.create_connection(("127.0.0.1", bench.cluster.http.base_url.port), timeout=30)
    body = json.dumps({"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0} | options).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("is_stream", [True, False])
def test_connection_that_is_closed_leaves_workers_busy(is_stream: bool, num_prompts: int, bench: FaultBench) -> None:
    """C26: every prompt of the request is given up with it."""
    bench.make_ready()
    counted, tokens = outcomes(bench), bench.cluster.metric("splitserve_generation_tokens_total")
    prompts = [prompt_of(60, seed=7000 + number) for number in range(num_prompts)]
    [decode] = bench.cluster.of_role("decode")
    with ask(bench, prompt=prompts, stream=is_stream) as connection:
        wait_for(
            "some tokens",
            lambda: bench.cluster.metric("splitserve_generation_tokens_total") - tokens >= 5 * num_prompts,
        )
        if is_stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        with stopped(decode.engine_pid()):  # it has much left to do
            steps = num_steps(bench, "decode")
            connection.close()
            wait_for("the outcomes", lambda: outcomes(bench)["cancelled"] == counted["cancelled"] + num_prompts)
    bench.cluster.wait_drained()
    assert held_blocks(bench, "decode") == held_blocks(bench, "prefill") == 0
    assert num_steps(bench, "decode") - steps <= 2, "decode went on after the client had left"
    assert bench.cluster.metric("splitserve_generation_tokens_total") - tokens < num_prompts * MAX_TOKENS
    assert sum(outcomes(bench).values()) - sum(counted.values()) == num_prompts
