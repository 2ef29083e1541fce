"""What OpenAI's own client makes of refusals and failures of real processes, and that nothing is left behind."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai as library
import pytest
from openai import OpenAI

from splitserve.service.errors import Overloaded, Unavailable
from tests.cluster.clients.test_openai_client import MESSAGES
from tests.cluster.clients.told import completion, split_options
from tests.cluster.fault_bench import signal_all
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = pytest.mark.cluster

LONG: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"best_of": 2}, "best_of", "not_supported"),
        ({"suffix": "x"}, "suffix", "not_supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not_supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not_supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not_supported"),
        ({"max_tokens": 1024}, "max_tokens", "max_tokens_too_large"),
        ({"logprobs": 21}, "logprobs", "invalid_request"),
        ({"temperature": "warm"}, "temperature", "invalid_request"),
        ({"frobnicate": True}, "frobnicate", "invalid_request"),
    ],
)
def test_unsupported_option_is_half_applied(options: dict[str, Any], param: str, code: str, openai: OpenAI) -> None:
    """C57, C61: refused by name before a stream begins, whichever of the two endpoints knows the option."""
    is_chat = "best_of" not in options and "suffix" not in options and "logprobs" not in options
    create: Any = openai.chat.completions.create if is_chat else openai.completions.create
    given = {"messages": MESSAGES} if is_chat else {"prompt": "hi"}
    for is_stream in (False, True):
        with pytest.raises(library.BadRequestError) as caught:
            create(stream=is_stream, **split_options(create, {"model": "llama", **given, **options}))
        error = caught.value
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        assert param in error.message


def test_missing_things_are_found(openai: OpenAI) -> None:
    """C61: the model, as an option and as a path, and a path that is none."""
    for ask in (
        lambda: openai.completions.create(model="nope", prompt="hi"),
        lambda: openai.chat.completions.create(model="nope", messages=MESSAGES, stream=True),
        lambda: openai.models.retrieve("org/nope"),
    ):
        with pytest.raises(library.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"
    with pytest.raises(library.NotFoundError) as caught:
        openai.embeddings.create(model="llama", input="hi")
    assert caught.value.code == "not_found"


def test_true_numbers_are_kept_back(openai: OpenAI) -> None:
    """C44, C61: how long the prompt is and what is left of the context; one token less is served."""
    prompt = prompt_of(1000)
    assert completion(openai, prompt, is_stream=False, max_tokens=24, ignore_eos=True).num_tokens == 24
    with pytest.raises(library.BadRequestError, match=r"1000.*1024|1024.*1000"):
        openai.completions.create(model="llama", prompt=prompt, max_tokens=25)
    with pytest.raises(library.BadRequestError, match="1024"):
        openai.completions.create(model="llama", prompt=prompt_of(1024), max_tokens=1)


def test_one_prompt_too_long_leaves_the_others_running(served: Cluster, openai: OpenAI) -> None:
    """C65."""
    with served.undisturbed():
        with pytest.raises(library.BadRequestError) as caught:
            openai.completions.create(
                model="llama", prompt=[prompt_of(9), prompt_of(1024), prompt_of(10)], n=2, stream=True, **LONG
            )
        assert caught.value.param == "prompt"


def test_stream_comes_when_it_is_complete(served: Cluster, openai: OpenAI) -> None:
    """C21: what lets decode begin is held back, and prefill's token is here all the same."""
    [prefill] = served.of_role("prefill")
    prefill.set_plan({"kind": "hold", "message": "Finish"})
    try:
        stream = openai.completions.create(
            model="llama", prompt=prompt_of(30), max_tokens=3, logprobs=0, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        assert len(first.choices[0].logprobs.tokens) == 1
    finally:
        prefill.set_plan()
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in stream if chunk.choices[0].logprobs) == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_is_served_to_the_end(is_stream: bool, served: Cluster, openai: OpenAI) -> None:
    """C26, C65: of two prompts with two samples each; in a stream after a few tokens, else by the client's patience."""
    cancelled = served.counted("splitserve_requests_total", "outcome")["cancelled"]
    [decode] = served.of_role("decode")
    prompts = [prompt_of(20), prompt_of(21)]
    if is_stream:
        with openai.completions.create(model="llama", prompt=prompts, n=2, stream=True, **LONG) as stream:
            for _ in range(10):
                next(stream)
    else:
        engine = decode.engine_pid()
        signal_all(signal.SIGSTOP, engine)
        try:
            with pytest.raises(library.APITimeoutError):
                openai.completions.create(model="llama", prompt=prompts, n=2, timeout=1.0, **LONG)
        finally:
            signal_all(signal.SIGCONT, engine)
    wait_for(
        "two cancelled requests",
        lambda: served.counted("splitserve_requests_total", "outcome")["cancelled"] - cancelled == 2,
    )
    served.wait_drained()


def test_full_queue_is_a_failure_of_the_server(served: Cluster, openai: OpenAI) -> None:
    """C57: 429 with its pause, over gRPC too; what had room is answered when it goes on."""
    [prefill] = served.of_role("prefill")
    engine = prefill.engine_pid()
    signal_all(signal.SIGSTOP, engine)
    try:
        with ThreadPoolExecutor(40) as pool:
            asked = [
                pool.submit(completion, openai, prompt_of(1000, seed), is_stream=seed % 2 == 0, max_tokens=2)
                for seed in range(40)
            ]
            wait_for("a refusal", lambda: any(each.done() for each in asked))
            with pytest.raises(Overloaded):
                served.client.generate(prompt_of(1000, 41), max_tokens=2)
            signal_all(signal.SIGCONT, engine)
            errors = [error for each in asked if (error := each.exception()) is not None]
    finally:
        signal_all(signal.SIGCONT, engine)
    assert 0 < len(errors) < 40
    for error in errors:
        assert isinstance(error, library.RateLimitError)
        assert (error.code, error.type) == ("queue_full", "rate_limit_error")
        assert int(error.response.headers["retry-after"]) >= 1


def test_lost_worker_ends_an_answer_as_if_it_were_whole(served: Cluster, openai: OpenAI) -> None:
    """C20, C57: with one attempt only, so that nobody goes on. In a stream an error and no end; without one a status.

    With no decode worker left the next request is refused at once, and a probe says why.
    """
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(openai.completions.create, model="llama", prompt=prompt_of(31), **LONG)
        stream = openai.chat.completions.create(model="llama", messages=MESSAGES, stream=True, **LONG)
        seen = [next(stream) for _ in range(20)]
        wait_for("both", lambda: sum(worker["attempts"] for worker in served.workers_of("decode")) == 2)
        served.of_role("decode")[0].kill()
        with pytest.raises(library.APIError) as caught:
            seen += stream
        error = whole.exception()
    assert all(choice.finish_reason is None for chunk in seen for choice in chunk.choices)
    assert caught.value.code == "attempts_exhausted"
    assert isinstance(error, library.InternalServerError)
    assert (error.status_code, error.code) == (503, "attempts_exhausted")
    for _ in range(2):
        with pytest.raises(library.InternalServerError) as refused:
            openai.completions.create(model="llama", prompt="hi", stream=True)
        assert (refused.value.status_code, refused.value.code) == (503, "no_workers")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    with pytest.raises(Unavailable):
        served.client.generate("hi", max_tokens=1)
    ready = served.http.get("/health/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    assert json.loads(ready.text)["error"]["message"]
    served.heal()
    assert completion(openai, "hi", is_stream=False, max_tokens=2, ignore_eos=True).num_tokens == 2
