"""`curl` against real processes: what is on the wire, byte for byte, and what a client leaves that is killed."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitserve.service.limits import GRPC_MESSAGE_OPTIONS, MAX_MESSAGE_BYTES
from splitserve.v1 import inference_pb2 as pb
from splitserve.v1 import inference_pb2_grpc as pb_grpc
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here"),
]

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True, "seed": 1}


def command(served: Cluster, path: str, *args: str) -> list[str]:
    return ["curl", "--silent", "--show-error", "--no-buffer", *args, f"{str(served.http.base_url).rstrip('/')}{path}"]


def as_json(body: Any) -> list[str]:
    return ["--header", "content-type: application/json", "--data", json.dumps(body)]


def curl(served: Cluster, path: str, *args: str) -> tuple[int, str, str]:
    """Status, headers and body."""
    done = subprocess.run(command(served, path, "--include", *args), capture_output=True, check=True, timeout=120)
    head, _, body = done.stdout.decode().partition("\r\n\r\n")
    if " 100 Continue" in head:
        head, _, body = body.partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


def test_events_are_no_server_sent_events(served: Cluster) -> None:
    """C21: each is a line of data and an empty one, in UTF-8, and the last is [DONE]; nothing may keep them back."""
    status, head, body = curl(served, "/v1/chat/completions", *as_json(CHAT | {"stream": True}))
    assert status == 200
    assert "content-type: text/event-stream" in head
    assert "cache-control: no-cache" in head
    assert "content-length" not in head
    *events, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(re.fullmatch(r"data: \{.*\}", event) for event in events)
    text = "".join(json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events)
    status, head, body = curl(served, "/v1/chat/completions", *as_json(CHAT))
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, text)
    assert "content-type: application/json" in head


@pytest.mark.parametrize(
    ("path", "args", "status", "code"),
    [
        ("/v1/completions", ["--data", "{"], 400, "malformed_message"),
        ("/v1/completions", ["--data", '{"prompt": "a", "temperature": NaN}'], 400, "invalid_request"),
        ("/v1/completions", ["--data", '{"prompt": "a", "logit_bias": {"999999": 1}}'], 400, "invalid_request"),
        ("/v1/completions", ["--data", '{"prompt": [[9223372036854775808]]}'], 400, "invalid_request"),
        ("/v1/completions", ["--data", '{"prompt": "a", "model": "nope", "stream": true}'], 404, "model_not_found"),
        ("/v1/chat/completions", ["--data", '{"messages": [{"role": "a", "content": null}]}'], 400, "invalid_request"),
        ("/v1/completions", [], 405, "method_not_allowed"),
        ("/v2/completions", [], 404, "not_found"),
    ],
)  # fmt: skip
def test_error_has_another_shape(path: str, args: list[str], status: int, code: str, served: Cluster) -> None:
    """C57, C61, C62: one shape for every error, and the workers do not hear of it."""
    steps = [worker["steps"] for worker in served.state()["workers"]]
    found, head, body = curl(served, path, "--header", "content-type: application/json", *args)
    error = json.loads(body)["error"]
    assert (found, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "param", "code"}
    assert "content-type: application/json" in head
    assert [worker["steps"] for worker in served.state()["workers"]] == steps


@pytest.mark.parametrize("is_stream", [False, True])
def test_killed_curl_is_served_to_the_end(is_stream: bool, served: Cluster) -> None:
    """C26: also when it has stopped to read before, and where nothing was to be sent before the end."""
    cancelled = served.counted("splitserve_requests_total", "outcome")["cancelled"]
    body = {"prompt": prompt_of(20), "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "n": 4, "stream": is_stream}
    with subprocess.Popen(command(served, "/v1/completions", *as_json(body)), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if is_stream:
            assert process.stdout.readline().startswith(b"data: {")
        else:
            wait_for("work", lambda: any(worker["attempts"] for worker in served.workers_of("decode")))
        process.send_signal(signal.SIGSTOP)
        process.kill()
    wait_for(
        "a cancelled request",
        lambda: served.counted("splitserve_requests_total", "outcome")["cancelled"] - cancelled == 1,
    )
    served.wait_drained()


def test_limit_of_size_differs_between_the_edges_or_ends_a_connection(served: Cluster, tmp_path: Path) -> None:
    """C53, C55: below it the prompt is refused by its length, above it the message by its size; others go on."""
    for num_bytes, status, code in (
        (25_000_000, 400, "context_length_exceeded"),
        (MAX_MESSAGE_BYTES + 1, 413, "request_too_large"),
    ):
        path = tmp_path / "body.json"
        path.write_text('{"prompt": "' + "x" * (num_bytes - 14) + '"}')
        found, _, body = curl(
            served, "/v1/completions", "--header", "content-type: application/json", "--data-binary", f"@{path}"
        )
        assert (found, json.loads(body)["error"]["code"]) == (status, code)
    # The client sends what it may not, and its channel is as good as before.
    unlimited = [(name, -1) for name, _ in GRPC_MESSAGE_OPTIONS]
    with grpc.insecure_channel(served.target, options=unlimited) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        sampling = pb.SamplingParams(max_tokens=1)
        for num_bytes, code in (
            (6_000_000, grpc.StatusCode.INVALID_ARGUMENT),
            (MAX_MESSAGE_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(text="x" * num_bytes, sampling_params=sampling), timeout=60))
            assert caught.value.code() == code
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 500_000), sampling_params=sampling)
        with pytest.raises(grpc.RpcError, match="500000 tokens"):
            list(stub.Generate(ids, timeout=60))
        assert list(stub.Generate(pb.GenerateRequest(text="x", sampling_params=sampling), timeout=60))


def test_probes_and_figures_need_a_body_or_a_key(served: Cluster) -> None:
    assert curl(served, "/health/live")[0] == curl(served, "/health/ready")[0] == 200
    assert "splitserve_requests_total{" in curl(served, "/metrics")[2]
    assert json.loads(curl(served, "/cluster")[2])["ready"] is True
    status, _, body = curl(served, "/v1/models", "--header", "authorization: Bearer whatever")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "llama")
