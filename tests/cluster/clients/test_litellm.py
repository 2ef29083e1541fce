"""litellm in front of real processes, as a library and as a proxy: it reads our answers, and passes on what it is told.

It has an environment of its own, which `make test-litellm` makes; without it these tests are skipped.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai as library
import pytest
from openai import OpenAI

from splitserve.models.tokenizer import Tokenizer
from tests.cluster.clients.conftest import client_of
from tests.cluster.clients.test_openai_client import FEW_LETTERS, MESSAGES, PROMPT
from tests.cluster.clients.told import assert_same, chat, completion, over_grpc
from tests.cluster.harness import Cluster, wait_for

BIN = Path(os.environ.get("LITELLM_BIN", Path(__file__).parents[3] / ".venv-litellm" / "bin"))
KEY = "sk-only-this-machine-has-it"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not (BIN / "litellm").exists(), reason="litellm is not here: `make test-litellm` installs it"),
]

DRAWN: dict[str, Any] = {"seed": 3, "temperature": 1, "max_tokens": 12, "logit_bias": FEW_LETTERS, "n": 2}


def environment(home: Path) -> dict[str, str]:
    """It is given nothing of this one's, reads no key, and asks nobody for prices."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }


def by_library(served: Cluster, home: Path, *calls: tuple[str, dict[str, Any]]) -> list[list[Any]]:
    asked = {
        "url": str(served.http.base_url).rstrip("/"),
        "calls": [{"kind": kind, "options": options} for kind, options in calls],
    }
    script = Path(__file__).with_name("litellm_calls.py")
    done = subprocess.run(
        [BIN / "python", "-I", script], input=json.dumps(asked), capture_output=True, text=True, timeout=100,
        env=environment(home),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_library_loses_or_changes_something(served: Cluster, openai: OpenAI, tmp_path: Path) -> None:
    """Chat and text, whole and in a stream, with usage and logprobs; refusals by the exceptions of their kind."""
    own = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **DRAWN}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, chunks, text, tools, unknown, too_long = by_library(
        served,
        tmp_path,
        ("chat", own),
        ("chat", {"messages": MESSAGES, **DRAWN, **usage, "extra_body": {"ignore_eos": True, "top_k": 5}}),
        ("text", {"prompt": PROMPT, "echo": True, "logprobs": 1, **DRAWN}),
        ("chat", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("chat", {"messages": MESSAGES, "model": "nope"}),
        ("chat", {"messages": [{"role": "user", "content": "x y " * 2000}]}),
    )
    expected = chat(openai, MESSAGES, is_stream=False, logprobs=True, top_logprobs=2, **DRAWN)
    [reply] = whole
    assert [each["message"]["content"] for each in reply["choices"]] == [each.text for each in expected.choices]
    assert [
        [entry["token"] for entry in each["logprobs"]["content"]] for each in reply["choices"]
    ] == [each.tokens for each in expected.choices]  # fmt: skip
    assert reply["usage"]["completion_tokens"] == expected.num_tokens
    expected = chat(openai, MESSAGES, is_stream=True, ignore_eos=True, top_k=5, **DRAWN)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for each in chunk["choices"]:
            texts[each["index"]] += each["delta"].get("content") or ""
    assert list(texts.values()) == [each.text for each in expected.choices]
    assert chunks[-1]["usage"]["completion_tokens"] == expected.num_tokens
    expected = completion(openai, PROMPT, is_stream=False, echo=True, logprobs=1, **DRAWN)
    assert [each["text"] for each in text[0]["choices"]] == [each.text for each in expected.choices]
    assert tools[:2] == ["BadRequestError", 400]
    assert "tools is not supported" in tools[2]
    assert unknown[:2] == ["NotFoundError", 404]
    assert too_long[1] == 400


@pytest.fixture(scope="module")
def proxy(_served: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a litellm proxy that has our router for its one provider."""
    home = tmp_path_factory.mktemp("litellm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    provider = {"api_base": f"{str(_served.http.base_url).rstrip('/')}/v1", "api_key": "none", "max_retries": 0}
    models = [
        {"model_name": "llama", "litellm_params": {"model": "openai/llama", **provider}},
        {"model_name": "other", "litellm_params": {"model": "openai/other", **provider}},
    ]
    # The file is YAML, of which JSON is a part.
    config = home / "config.yaml"
    config.write_text(
        json.dumps({"model_list": models, "router_settings": {"num_retries": 0, "disable_cooldowns": True}})
    )
    with (home / "log").open("w") as log:
        command = [BIN / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--telemetry", "False"], cwd=home, env=environment(home), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for("litellm's proxy", lambda: process.poll() is not None or is_up(url))
            assert process.poll() is None, (home / "log").read_text()[-3000:]
            yield url
        finally:
            process.terminate()
            process.wait(30)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness", timeout=5).is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def proxied(proxy: str) -> Iterator[OpenAI]:
    with client_of(proxy, KEY) as client:
        yield client


@pytest.mark.parametrize(("is_stream", "n"), [(False, 2), (True, 1)])
def test_proxy_loses_or_changes_something(
    is_stream: bool, n: int, served: Cluster, openai: OpenAI, proxied: OpenAI, tokenizer: Tokenizer
) -> None:
    """The same client with and without the proxy, and gRPC: one answer. Of several samples in a stream the proxy itself
    drops the roles of all but one."""
    options = DRAWN | {"n": n}
    for_grpc = options | {"logit_bias": {int(key): bias for key, bias in FEW_LETTERS.items()}}
    expected = over_grpc(served.client, tokenizer, MESSAGES, is_stream=is_stream, logprobs=2, **for_grpc)
    for client in (openai, proxied):
        assert_same(chat(client, MESSAGES, is_stream=is_stream, logprobs=True, top_logprobs=2, **options), expected)


def test_refusal_gets_lost_in_the_proxy(proxied: OpenAI) -> None:
    """C57, C61: the status and what it says, stream or not."""
    for is_stream in (False, True):
        with pytest.raises(library.BadRequestError, match="tools is not supported"):
            proxied.chat.completions.create(
                model="llama", messages=MESSAGES, stream=is_stream,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )  # fmt: skip
        with pytest.raises(library.NotFoundError):
            proxied.chat.completions.create(model="other", messages=MESSAGES, stream=is_stream)


def test_client_that_leaves_the_proxy_is_served_to_the_end(served: Cluster, proxied: OpenAI) -> None:
    """C26: the proxy closes what it has asked for, and the workers are free."""
    cancelled = served.counted("splitserve_requests_total", "outcome")["cancelled"]
    stream = proxied.chat.completions.create(
        model="llama", messages=MESSAGES, max_tokens=900, stream=True, n=4, extra_body={"ignore_eos": True}
    )
    for _ in range(5):
        next(stream)
    stream.close()
    wait_for("an end", lambda: not any(worker["attempts"] for worker in served.workers_of("decode")))
    assert served.counted("splitserve_requests_total", "outcome")["cancelled"] - cancelled == 1
