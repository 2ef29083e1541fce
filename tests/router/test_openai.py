"""What a client of the OpenAI API would misread, lose or wait for in vain, over a real HTTP connection to fakes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.openai import exchange, replies
from router.request import FinishReason, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
from splitserve.models.detokenizer import DecodeStream
from splitserve.service.errors import Internal, Overloaded, Unavailable
from tests.router.edge import Edge, assemble, http, http_app, until
from tests.router.fakes import (
    TRANSFER_BYTES,
    ByteTokenizer,
    FakeDispatcher,
    Step,
    Wait,
    events,
    model_description,
    tokens,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
BODIES = {"chat": CHAT, "text": TEXT}


def of_events(body: str) -> list[Any]:
    """The events of a stream, each parsed; the last one may be `[DONE]`."""
    blocks = body.split("\n\n")
    assert blocks.pop() == "", "the last event is cut off"
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


async def ask(client: httpx.AsyncClient, kind: str, **options: object) -> Any:
    response = await client.post(PATHS[kind], json=BODIES[kind] | options)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, kind: str, **options: object) -> list[Any]:
    response = await client.post(PATHS[kind], json=BODIES[kind] | {"stream": True} | options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return of_events(response.text)


def text_of(chunk: Any, kind: str) -> str:
    [choice] = chunk["choices"]
    return str(choice["delta"].get("content", "") if kind == "chat" else choice["text"])


def post(options: dict[str, Any]) -> bytes:
    """A chat request as it comes over the wire."""
    body = json.dumps(options).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )


@pytest.mark.parametrize("kind", PATHS)
async def test_stream_and_reply_differ(kind: str) -> None:
    async with http(Edge(FakeDispatcher(lambda _: tokens("hello")))) as client:
        whole = await ask(client, kind)
        *chunks, done = await stream(client, kind)
        assert done == "[DONE]"
        choice = whole["choices"][0]
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == "hello"
        assert "".join(text_of(chunk, kind) for chunk in chunks) == "hello"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert "usage" not in json.dumps(chunks)
        num_prompt_tokens = whole["usage"]["prompt_tokens"]
        assert whole["usage"] == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": num_prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


async def test_role_comes_late_or_twice() -> None:
    """C59: the first chunk has the role, and no other."""
    async with http(Edge()) as client:
        *chunks, _ = await stream(client, "chat")
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


@pytest.mark.parametrize("kind", PATHS)
async def test_usage_is_in_the_wrong_chunk(kind: str) -> None:
    """C59: one chunk more, with no choices, if asked for; the others have null."""
    async with http(Edge()) as client:
        *chunks, last, done = await stream(client, kind, stream_options={"include_usage": True})
        assert (last["choices"], done) == ([], "[DONE]")
        assert last["usage"] == (await ask(client, kind))["usage"]
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("kind", PATHS)
async def test_timings_come_unasked_or_in_the_wrong_chunk(kind: str) -> None:
    """In the last chunk, which is the one with the usage if that was asked for."""
    async with http(Edge(FakeDispatcher(lambda _: tokens("hello")))) as client:
        assert "timings" not in json.dumps([await ask(client, kind), await stream(client, kind)])
        whole = (await ask(client, kind, timings=True))["timings"]
        seconds = {"tokenize_s", "queue_s", "prefill_s", "handoff_s", "decode_s"}
        assert whole.keys() == seconds | {"transfer_bytes", "cached_tokens", "attempts"}
        assert all(whole[name] >= 0 for name in seconds)
        assert (whole["transfer_bytes"], whole["cached_tokens"], whole["attempts"]) == (TRANSFER_BYTES, 3, 2)
        for options in ({}, {"stream_options": {"include_usage": True}}):
            *chunks, last, _ = await stream(client, kind, timings=True, **options)
            assert last["timings"].keys() == whole.keys()
            assert bool(last["choices"]) is not bool(options)
            assert "timings" not in json.dumps(chunks)


@pytest.mark.parametrize("kind", PATHS)
async def test_drawn_seed_is_kept_secret_or_is_another_prompts(kind: str) -> None:
    """With the end of each choice, in a stream or not: what was drawn can be asked for again."""

    def script(request: GenerationRequest) -> list[Step]:
        return [TokenEvent(sample, 0, 97, FinishReason.LENGTH) for sample in range(request.sampling.n)]

    edge = Edge(FakeDispatcher(script))
    options = {"prompt": ["a", "b"], "n": 2} if kind == "text" else {"n": 2}
    async with http(edge) as client:
        for is_stream in (False, True):
            replies = (
                (await stream(client, kind, **options))[:-1] if is_stream else [await ask(client, kind, **options)]
            )
            told = {c["index"]: c["seed"] for reply in replies for c in reply["choices"] if c["finish_reason"]}
            assert not any("seed" in c for reply in replies for c in reply["choices"] if not c["finish_reason"])
            num_prompts = len(options.get("prompt", "x"))
            seeds = [request.sampling.seed for request in edge.dispatcher.requests[-num_prompts:]]
            assert [told[index] for index in sorted(told)] == [seed for seed in seeds for _ in range(2)]
        assert (await ask(client, kind, seed=-1))["choices"][0]["seed"] == 2**64 - 1


@pytest.mark.parametrize("kind", PATHS)
async def test_prompt_is_billed_once_per_sample(kind: str) -> None:
    """C59: the output of each sample counts, the prompt counts once, in a stream or not."""

    def script(request: GenerationRequest) -> list[Step]:
        first = [TokenEvent(sample, 0, 97) for sample in range(request.sampling.n)]
        return [*first, *(TokenEvent(sample, 1, 98, FinishReason.LENGTH) for sample in (2, 0, 1))]

    async with http(Edge(FakeDispatcher(script))) as client:
        num_prompt_tokens = len("hi" if kind == "text" else "[user]hi")
        expected = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": num_prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert (await ask(client, kind, n=3))["usage"] == expected
        *_, last, _ = await stream(client, kind, n=3, stream_options={"include_usage": True})
        assert last["usage"] == expected


async def test_timings_of_several_prompts_leave_one_out() -> None:
    async with http(Edge(FakeDispatcher(lambda _: tokens("hello")))) as client:
        body = {"prompt": ["a", "b"], "timings": True}
        told = (await client.post(PATHS["text"], json=body)).json()["timings"]
        assert (told["transfer_bytes"], told["cached_tokens"], told["attempts"]) == (2 * TRANSFER_BYTES, 6, 4)
        *chunks, last, _ = await stream(client, "text", **body)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 1
        assert last["timings"]["transfer_bytes"] == 2 * TRANSFER_BYTES
        assert not any("timings" in chunk for chunk in chunks), "they are of one prompt only"


async def test_several_prompts_are_mixed_up() -> None:
    """C65: choices by prompt, each counted, and text that belongs together."""

    def script(request: GenerationRequest) -> list[Step]:
        return list(tokens(bytes(request.prompt_ids).decode().upper()))

    async with http(Edge(FakeDispatcher(script))) as client:
        reply = await ask(client, "text", prompt=["one", "three"], echo=True)
        assert [(each["index"], each["text"]) for each in reply["choices"]] == [(0, "oneONE"), (1, "threeTHREE")]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (8, 8)
        texts = ["", ""]
        for chunk in await stream(client, "text", prompt=[list(b"ab"), list(b"cd")], echo=True):
            if chunk != "[DONE]":
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["abAB", "cdCD"]


async def test_one_of_several_prompts_is_refused_alone() -> None:
    """C65: the whole request is, and what had begun for the others is let go."""
    edge = Edge(FakeDispatcher(lambda _: [Wait()]))
    async with http(edge) as client:
        response = await client.post(PATHS["text"], json={"prompt": ["a", "b" * 500, "c"]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        await edge.settled(3)
        assert edge.dispatcher.all_closed
        assert edge.outcomes() == {"rejected": 3}


async def test_prompts_that_fall_with_another_one_count_as_left_by_the_client() -> None:
    all_begun, begun = asyncio.Event(), []

    def script(request: GenerationRequest) -> list[Step]:
        begun.append(request)
        if len(begun) == 3:
            all_begun.set()
        falls = request.prompt_ids == (98,)
        return [*tokens("ab", None), *([Wait(all_begun), Unavailable("gone")] if falls else [Wait()])]

    edge = Edge(FakeDispatcher(script))
    async with http(edge) as client:
        response = await client.post(PATHS["text"], json={"prompt": ["a", "b", "c"]})
        assert (response.status_code, response.json()["error"]["message"]) == (503, "gone")
        await edge.settled(3)
        assert edge.outcomes() == {"failed": 3}
        assert edge.dispatcher.all_closed


class Wire:
    """The server's side of one exchange, in which the client reads what it likes to."""

    def __init__(self, *prompts: str, blocks_at: bytes = b"", **options: object) -> None:
        """It reads nothing from the last event on, or from the one that has `blocks_at`."""
        self._blocks_at = blocks_at
        self.is_blocked = False
        body = json.dumps({"prompt": list(prompts), "stream": True} | options).encode()
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        self.sent: list[Any] = []
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": PATHS["text"],
            "query_string": b"",
            "headers": headers,
        }

    async def receive(self) -> Any:
        if not self._incoming:
            await asyncio.Event().wait()
        return self._incoming.pop()

    async def send(self, message: Any) -> None:
        is_unread = self._blocks_at and self._blocks_at in message.get("body", b"")
        if is_unread or not message.get("more_body", True):
            self.is_blocked = True
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.sent.append(message)


async def run(edge: Edge, wire: Wire) -> None:
    validator = assemble(edge)
    try:
        await http_app(edge, validator)(wire.scope, wire.receive, wire.send)
    finally:
        validator.close()


async def test_last_event_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is said and counted, and the client does not read that it is."""
    monkeypatch.setattr(exchange, "_LAST_WORD_S", 0.1)
    edge = Edge(FakeDispatcher(lambda _: tokens("ab")), request_timeout_s=0.3)
    wire = Wire("a")
    async with asyncio.timeout(10):
        await run(edge, wire)
    assert edge.outcomes() == {"length": 1}
    assert wire.sent[-1]["body"] != b"", "the exchange has ended before its end"


async def test_end_of_the_router_waits_for_a_last_event() -> None:
    edge = Edge(FakeDispatcher(lambda _: tokens("ab")))
    running = asyncio.create_task(run(edge, Wire("a")))
    await until(lambda: edge.outcomes() == {"length": 1})
    waiting = asyncio.create_task(edge.serving.calls.until_none())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "what is not read yet would be cut off"
    edge.serving.calls.end_all(Unavailable("draining"))
    async with asyncio.timeout(10):
        await asyncio.gather(running, waiting)


async def test_stream_of_several_prompts_begins_in_the_middle() -> None:
    """Their first events come at once, while the head of the answer is still on its way."""
    edge = Edge(FakeDispatcher(lambda _: tokens("ab")), request_timeout_s=1.0)
    wire = Wire("a", "b", "c")
    running = asyncio.create_task(run(edge, wire))
    await until(lambda: len(wire.sent) > 6)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [message["type"] for message in wire.sent].index("http.response.start") == 0
    assert sum(message["type"] == "http.response.start" for message in wire.sent) == 1


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    ("options", "status", "param", "code"),
    [
        ({"model": "nope"}, 404, "model", "model_not_found"),
        ({"temperature": 1000}, 400, "temperature", "invalid_request"),
        ({"temperature": "1"}, 400, "temperature", "invalid_request"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "invalid_request"),
        ({"max_tokens": 2**40}, 400, "max_tokens", "invalid_request"),
        ({"max_tokens": 101}, 400, "max_tokens", "max_tokens_too_large"),
        ({"n": "2"}, 400, "n", "invalid_request"),
        ({"stop": ["a", 1]}, 400, "stop", "invalid_request"),
        ({"seed": 2**64}, 400, "seed", "invalid_request"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_request"),
        ({"logit_bias": {"1": "x"}}, 400, "logit_bias", "invalid_request"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias", "invalid_request"),
        ({"stop_token_ids": [999]}, 400, "stop_token_ids", "invalid_request"),
        ({"frobnicate": 1}, 400, "frobnicate", "invalid_request"),
        ({"tools": [{}]}, 400, "tools", "not_supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not_supported"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_request"),
    ],
)
async def test_refusal_is_vague(kind: str, options: dict[str, Any], status: int, param: str, code: str) -> None:
    """C57, C61: the status is the error's own, stream or not, and the body names what is at fault."""
    edge = Edge()
    async with http(edge) as client:
        for is_stream in (False, True):
            if is_stream and "stream_options" in options:
                continue
            response = await client.post(PATHS[kind], json=BODIES[kind] | options | {"stream": is_stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
            assert error["type"] == "invalid_request_error"
            assert edge.dispatcher.requests == []


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("chat", {}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "foo", "content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ("chat", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ("chat", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ("chat", CHAT | {"max_completion_tokens": 1000}, "max_completion_tokens"),
        ("text", {}, "prompt"),
        ("text", {"prompt": ""}, "prompt"),
        ("text", {"prompt": []}, "prompt"),
        ("text", {"prompt": [[]]}, "prompt"),
        ("text", {"prompt": ["a", 1]}, "prompt"),
        ("text", {"prompt": [300]}, "prompt"),
        ("text", {"prompt": [2**70]}, "prompt"),
        ("text", TEXT | {"best_of": 2}, "best_of"),
        ("text", TEXT | {"suffix": "x"}, "suffix"),
        ("text", TEXT | {"logprobs": 21}, "logprobs"),
    ],
)
async def test_bad_request_is_half_applied(kind: str, body: dict[str, Any], param: str) -> None:
    """C61."""
    edge = Edge()
    async with http(edge) as client:
        response = await client.post(PATHS[kind], json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert edge.dispatcher.requests == []


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"null", b"", b'{"prompt": "\xff"}', b'{"prompt": "a", "temperature": NaN}']
)
async def test_body_that_is_no_request_is_our_fault(content: bytes) -> None:
    async with http(Edge()) as client:
        response = await client.post(PATHS["text"], content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("says_its_size", [True, False])
async def test_body_without_end_is_read(says_its_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C53, C55: refused before it is parsed, whether or not it says how large it is."""
    monkeypatch.setattr("router.http.MAX_MESSAGE_BYTES", 1000)

    async def pieces() -> Any:
        for _ in range(11):  # no more than is read: what is left unread may reset the connection before its answer
            yield b" " * 100

    async with http(Edge()) as client:
        content = b" " * 10_000 if says_its_size else pieces()
        response = await client.post(PATHS["text"], content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


LONE = "a\ud800"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATHS["text"], {"prompt": LONE}, "prompt"),
        (PATHS["text"], {"prompt": ["a", LONE]}, "prompt"),
        (PATHS["text"], TEXT | {"stop": LONE}, "stop"),
        (PATHS["text"], TEXT | {"stop": ["b", LONE]}, "stop"),
        (PATHS["text"], TEXT | {"model": LONE}, "model"),
        (PATHS["text"], TEXT | {"request_id": LONE}, "request_id"),
        (PATHS["text"], TEXT | {"user": LONE}, "user"),
        (PATHS["text"], TEXT | {"suffix": LONE}, "suffix"),
        (PATHS["chat"], {"messages": [{"role": "user", "content": LONE}]}, "messages.0.content"),
        (PATHS["chat"], {"messages": [{"role": LONE, "content": "hi"}]}, "messages.0.role"),
        (PATHS["chat"], CHAT | {"response_format": {"type": LONE}}, "response_format.type"),
        ("/tokenize", {"prompt": LONE}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": LONE}, "model"),
        ("/detokenize", {"tokens": [1], "model": LONE}, "model"),
    ],
)
async def test_half_a_surrogate_pair_is_our_fault(path: str, body: dict[str, Any], param: str) -> None:
    """C57: JSON can hold what is no text."""
    async with http(Edge()) as client:
        response = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_unicode")
        assert "U+D800" in error["message"]


async def test_error_that_repeats_what_is_no_text_breaks_the_answer() -> None:
    async with http(Edge()) as client:
        body = json.dumps(CHAT | {LONE: 1})
        response = await client.post(PATHS["chat"], content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "bias",
    ['{"000000000000000000019999999999": 1}', f'{{"5": 1{"0" * 400}}}', '{"05": 1}', '{"--5": 1}', '{"²": 1}'],
)
async def test_number_that_fits_nowhere_is_our_fault(bias: str) -> None:
    """C61."""
    async with http(Edge()) as client:
        body = f'{{"prompt": "a", "logit_bias": {bias}}}'
        response = await client.post(PATHS["text"], content=body, headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "logit_bias")
        assert "literal" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "number"),
    [
        (PATHS["text"], {"prompt": [[5]] * 100_000}, "prompt", "100000"),
        (PATHS["text"], {"prompt": ["a"] * 257}, "prompt", "256"),
        (PATHS["text"], {"prompt": [5] * 2_000_001}, "prompt", "2000001"),
        (PATHS["text"], {"prompt": [[5] * 1_000_001] * 2}, "prompt", "2000002"),
        (PATHS["text"], TEXT | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        (PATHS["chat"], {"messages": CHAT["messages"] * 10_001}, "messages", "10000"),
        ("/detokenize", {"tokens": [1] * 2_000_001}, "tokens", "2000000"),
    ],
)
async def test_long_list_holds_up_the_router(path: str, body: dict[str, Any], param: str, number: str) -> None:
    """C53: it is refused with the number, before anything is done for each of its elements."""
    edge = Edge()
    async with http(edge) as client:
        response = await client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert number in error["message"]
        assert edge.outcomes() == {}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_refusal_names_an_option_that_was_not_sent(options: dict[str, Any], param: str) -> None:
    async with http(Edge()) as client:
        response = await client.post(PATHS["chat"], json=CHAT | options)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param} ")


async def test_answer_that_is_sent_back_is_refused() -> None:
    """As OpenAI's own client writes a message out, with everything that it lacks."""
    answer = {"role": "assistant", "content": "hello"}
    lacks = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "annotations"))
    async with http(Edge()) as client:
        for more in (lacks, lacks | {"tool_calls": [], "annotations": []}):
            assert await ask(client, "chat", messages=[*CHAT["messages"], answer | more, *CHAT["messages"]])
        body = {"messages": [*CHAT["messages"], answer | {"tool_calls": [{}]}]}
        assert (await client.post(PATHS["chat"], json=body)).json()["error"]["param"] == "messages.1.tool_calls"


async def test_body_that_is_not_said_to_be_json_is_refused_vaguely() -> None:
    async with http(Edge()) as client:
        response = await client.post(PATHS["text"], content=json.dumps(TEXT))
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
        body = f'{{"prompt": "a", "seed": 1{"0" * 5000}}}'
        response = await client.post(PATHS["text"], content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_message")


async def test_options_are_lost_on_the_way() -> None:
    """C58: what the client asked for is what the cluster is given."""
    edge = Edge()
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "prompt_logprobs": 4,
    }
    async with http(edge) as client:
        own = {"seed": -1, "stop": "x", "stop_token_ids": [5], "logit_bias": {"7": 3, "3": -1.5}, "user": "u"}
        await ask(client, "chat", **given, **own, logprobs=True, top_logprobs=3, priority=5, request_id="mine")
        [request] = edge.dispatcher.requests
        assert {name: getattr(request.sampling, name) for name in given} == given
        sampling = request.sampling
        assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (2**64 - 1, ("x",), (5,))
        assert (sampling.logit_bias, sampling.logprobs) == (((3, -1.5), (7, 3.0)), 3)
        assert (request.priority, request.request_id) == (5, "mine")
        await ask(client, "text", logprobs=0, echo=True)
        assert (edge.dispatcher.requests[1].sampling.logprobs, edge.dispatcher.requests[1].sampling.max_tokens) == (
            0,
            16,
        )
        assert edge.dispatcher.requests[1].sampling.prompt_logprobs == 0


async def test_null_is_not_absent() -> None:
    edge = Edge()
    names = [
        "temperature",
        "stop",
        "seed",
        "logit_bias",
        "n",
        "max_tokens",
        "stream",
        "stream_options",
        "top_p",
        "tools",
    ]
    async with http(edge) as client:
        await ask(client, "chat", **dict.fromkeys(names))
        await ask(client, "chat")
        with_null, without = (request.sampling for request in edge.dispatcher.requests)
        assert with_null.max_tokens == without.max_tokens
        assert (with_null.temperature, with_null.n) == (1.0, 1)
        await ask(client, "text", **dict.fromkeys(names))
        assert edge.dispatcher.requests[-1].sampling.max_tokens == 16


@pytest.mark.parametrize("kind", PATHS)
async def test_whole_reply_is_made_of_chunks_that_nobody_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reply is built, and no event on the way to it."""
    built: list[str] = []
    for name in ("ChatChunk", "Completion"):
        made = getattr(replies, name)

        def make(*args: Any, _made: Any = made, _name: str = name, **kwargs: Any) -> Any:
            built.append(_name)
            return _made(*args, **kwargs)

        monkeypatch.setattr(replies, name, make)
    async with http(Edge(FakeDispatcher(lambda _: tokens("hello")))) as client:
        await ask(client, kind, timings=True)
        assert built == ([] if kind == "chat" else ["Completion"])


LOGPROBS = [
    TokenEvent(0, 0, 0xE2, None, TokenLogprobs(0xE2, -0.5, ((0xE2, -0.5), (97, -float("inf"))))),
    TokenEvent(0, 1, 0x82, None, TokenLogprobs(0x82, -0.25, ((97, -0.1), (0x82, -0.25)))),
    TokenEvent(0, 2, 0xAC, None, TokenLogprobs(0xAC, -1.0, ())),
    TokenEvent(0, 3, 97, FinishReason.LENGTH, TokenLogprobs(97, -float("inf"), ())),
]


async def test_logprob_breaks_the_json_or_belongs_to_another_token() -> None:
    """C10, C63: minus infinity is a floor; a token that is a part of a character has its bytes."""
    async with http(Edge(FakeDispatcher(lambda _: list(LOGPROBS)))) as client:
        whole = await ask(client, "chat", logprobs=True, top_logprobs=2)
        content = whole["choices"][0]["logprobs"]["content"]
        assert whole["choices"][0]["message"]["content"] == "€a"
        assert [entry["token"] for entry in content] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "a"]
        assert [entry["bytes"] for entry in content] == [[0xE2], [0x82], [0xAC], [97]]
        assert [entry["logprob"] for entry in content] == [-0.5, -0.25, -1.0, -9999.0]
        assert content[0]["top_logprobs"][1] == {"token": "a", "logprob": -9999.0, "bytes": [97]}
        chunks = (await stream(client, "chat", logprobs=True, top_logprobs=2))[:-1]
        entries = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert entries == content
        assert "".join(text_of(chunk, "chat") for chunk in chunks) == "€a"


async def test_echoed_logprobs_are_out_of_step() -> None:
    """Tokens, logprobs and offsets of prompt and output are lists of one length over one text."""
    prompt = PromptLogprobs((TokenLogprobs(104, None, ()), TokenLogprobs(105, -2.0, ((105, -2.0),))))
    script: list[Step] = [prompt, *LOGPROBS]
    async with http(Edge(FakeDispatcher(lambda _: list(script)))) as client:
        [choice] = (await ask(client, "text", logprobs=1, echo=True))["choices"]
        assert choice["text"] == "hi€a"
        assert choice["logprobs"]["tokens"][:2] == ["h", "i"]
        assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5, -0.25, -1.0, -9999.0]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 3]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"i": -2.0}]
        joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        chunks = (await stream(client, "text", logprobs=1, echo=True))[:-1]
        for chunk in chunks:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                joined[name] += values
        assert joined == choice["logprobs"]
        assert "".join(text_of(chunk, "text") for chunk in chunks) == "hi€a"


@pytest.mark.parametrize("kind", PATHS)
async def test_prompt_logprobs_vanish(kind: str) -> None:
    """C10: vLLM's option, in the reply and in the first chunk."""
    prompt = PromptLogprobs((TokenLogprobs(104, None, ()), TokenLogprobs(105, -2.0, ((97, -0.5), (105, -2.0)))))
    table = [None, {"105": {"logprob": -2.0, "decoded_token": "i"}, "97": {"logprob": -0.5, "decoded_token": "a"}}]
    async with http(Edge(FakeDispatcher(lambda _: [prompt, *tokens("ok")]))) as client:
        whole = await ask(client, kind, prompt_logprobs=2)
        first, *others = (await stream(client, kind, prompt_logprobs=2))[:-1]
        if kind == "text":
            whole, first = whole["choices"][0], first["choices"][0]
        assert whole["prompt_logprobs"] == first["prompt_logprobs"] == table
        assert "prompt_logprobs" not in json.dumps(others)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(("error", "status"), [(Unavailable("gone", retry_after_s=2), 503), (Internal("bad"), 500)])
async def test_failure_in_mid_stream_looks_like_an_end(kind: str, error: Exception, status: int) -> None:
    """C20, C57: an event with the error and then the end of the connection, no reason to finish and no [DONE]."""
    edge = Edge(FakeDispatcher(lambda _: [*tokens("par", None), error]))
    async with http(edge) as client:
        *chunks, last = await stream(client, kind)
        assert "".join(text_of(chunk, kind) for chunk in chunks) == "par"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert last["error"]["message"] == str(error)
        whole = await client.post(PATHS[kind], json=BODIES[kind])
        assert (whole.status_code, whole.json()) == (status, last)
        assert edge.outcomes() == {"failed": 2}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_refusal_before_the_first_token_is_a_success(is_stream: bool) -> None:
    """C57: 429 with its pause, before any header of a stream."""

    def refuse(_: GenerationRequest) -> list[Step]:
        raise Overloaded("the queue is full", reason="QUEUE_FULL", retry_after_s=3)

    edge = Edge(FakeDispatcher(refuse))
    async with http(edge) as client:
        response = await client.post(PATHS["chat"], json=CHAT | {"stream": is_stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"] == {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        assert edge.outcomes() == {"rejected": 1}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_is_served_to_the_end(is_stream: bool) -> None:
    """C26: also where nothing was to be sent before the end."""
    edge = Edge(FakeDispatcher(lambda _: [*tokens("abc", None), Wait()]))
    async with http(edge) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(PATHS["chat"], json=CHAT | {"stream": is_stream}, timeout=0.5)
        await edge.settled()
        assert edge.outcomes() == {"cancelled": 1}
        assert edge.dispatcher.all_closed


async def test_client_that_does_not_read_holds_up_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """C26: it is ended by the router's own limit, like any other, and its task with it, though it is still there and
    could be told why."""
    monkeypatch.setattr(exchange, "_LAST_WORD_S", exchange._LAST_WORD_S / 20)
    many = events([97] * 50_000, None)
    model = model_description(max_model_len=60_000)
    edge = Edge(FakeDispatcher(lambda _: list(many)), model, request_timeout_s=0.5)
    async with http(edge, unread_timeout_s=600.0):
        before = len(asyncio.all_tasks())
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, limit=1)
        writer.write(post(CHAT | {"stream": True, "request_id": "x" * 256}))
        await edge.settled()
        assert edge.outcomes() == {"deadline": 1}
        assert 0 < edge.dispatcher.generations[0].num_taken < 50_000
        async with asyncio.timeout(30):
            await until(lambda: len(asyncio.all_tasks()) <= before)
        assert edge.dispatcher.all_closed
        writer.close()
        del reader


async def write_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def test_client_that_reads_no_more_keeps_its_connection() -> None:
    """Its request has ended by the router's limit, and what waits for it is never taken."""
    many = events([97] * 50_000, None)
    edge = Edge(FakeDispatcher(lambda _: list(many)), model_description(max_model_len=60_000), request_timeout_s=0.5)
    async with http(edge, unread_timeout_s=1.0):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, limit=1)
        writer.write(post(CHAT | {"stream": True, "request_id": "x" * 256}))
        await edge.settled()
        async with asyncio.timeout(30):
            with pytest.raises(ConnectionError):
                await write_for_ever(writer)
        del reader


async def test_end_of_the_router_looks_like_a_cut_connection() -> None:
    edge = Edge(FakeDispatcher(lambda _: [*tokens("par", None), Wait()]))
    async with http(edge) as client:
        asking = asyncio.create_task(stream(client, "chat"))
        await until(lambda: bool(edge.dispatcher.generations) and edge.dispatcher.generations[0].num_taken == 3)
        edge.serving.calls.end_all(Unavailable("draining", reason="DRAINING", retry_after_s=1.0))
        *_, last = await asking
        assert last["error"]["code"] == "draining"
        assert edge.outcomes() == {"failed": 1}


async def test_models_and_tokens() -> None:
    async with http(Edge()) as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["revision"], model["max_model_len"]) == ("tiny", "model", "r1", 100)
        assert (await client.get("/v1/models/tiny")).json() == model
        assert (await client.get("/v1/models/org/other")).json()["error"]["code"] == "model_not_found"
        tokenized = (await client.post("/tokenize", json={"prompt": "hé"})).json()
        assert tokenized == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 100}
        assert (await client.post("/detokenize", json={"tokens": tokenized["tokens"]})).json() == {"prompt": "hé"}
        chat = (await client.post("/tokenize", json=CHAT)).json()
        assert bytes(chat["tokens"]) == b"[user]hi"
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"messages": [{"role": "foo", "content": "x"}]}, "messages"),
            ("/detokenize", {"tokens": [1] * 101}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [2**70]}, "tokens.0"),
        ):
            response = await client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), path


async def test_developer_and_parts_are_unknown() -> None:
    """The newer name of the system role, and text that comes in parts."""
    edge = Edge()
    async with http(edge) as client:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await ask(client, "chat", messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts}])
        assert bytes(edge.dispatcher.requests[0].prompt_ids) == b"[system]d[user]ab"


async def test_document_lacks_a_path_or_a_schema() -> None:
    async with http(Edge()) as client:
        document = (await client.get("/openapi.json")).json()
        assert {*PATHS.values(), "/v1/models", "/tokenize", "/detokenize"} <= document["paths"].keys()
        assert "503" in document["paths"]["/health/ready"]["get"]["responses"]
        named = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
        missing = {name.split('"')[0] for name in named} - document["components"]["schemas"].keys()
        assert missing == set()


def beyond(schema: Any) -> tuple[list[float], list[float]]:
    """What a number's schema lets through at its ends, and what not, by a hair."""
    is_integer = "integer" in {each.get("type") for each in schema["anyOf"]}
    number, hair = (int, 1) if is_integer else (float, 1e-6)
    good = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    bad = [schema[bound] + sign * hair for bound, sign in (("minimum", -1), ("maximum", 1)) if bound in schema]
    if "exclusiveMinimum" in schema:
        good.append(schema["exclusiveMinimum"] + hair)
        bad.append(schema["exclusiveMinimum"])
    return list(map(number, good)), list(map(number, bad))


async def test_document_names_other_ranges_than_are_refused() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [TokenEvent(sample, 0, 97, FinishReason.LENGTH) for sample in range(request.sampling.n)]

    body = TEXT | {"echo": True}  # with which max_tokens may be 0
    async with http(Edge(FakeDispatcher(script))) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        options = schemas["CompletionRequest"]["properties"]
        ranged = {name: beyond(schema) for name, schema in options.items() if "anyOf" in schema}
        ranged = {name: (good, bad) for name, (good, bad) in ranged.items() if good}
        assert {"temperature", "top_p", "top_k", "n", "max_tokens", "logprobs", "min_p"} <= ranged.keys()
        for name, (good, bad) in ranged.items():
            for value in good:
                response = await client.post(PATHS["text"], json=body | {name: value})
                assert response.status_code == 200, (name, value, response.text)
            for value in bad:
                response = await client.post(PATHS["text"], json=body | {name: value})
                assert (response.status_code, response.json()["error"]["param"]) == (400, name), (value, response.text)


async def test_client_that_reads_slowly_holds_workers_of_a_sample_that_has_ended() -> None:
    """C18: a stop string ends it here, and the worker is told before the client is."""
    edge = Edge(FakeDispatcher(lambda _: [*tokens("abc", None), Wait()]))
    wire = Wire("x", stop="c", blocks_at=b'"finish_reason":"stop"')
    running = asyncio.create_task(run(edge, wire))
    await until(lambda: wire.is_blocked)
    assert edge.dispatcher.generations[0].stopped == [0]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class DropsASpace(ByteTokenizer):
    """As SentencePiece's do: the first space of a text is no part of it."""

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        whole = super().decode_stream(skip_special_tokens)

        class Stream:
            is_first = True

            def step(self, token_id: int) -> str | None:
                text = whole.step(token_id)
                if text and self.is_first:
                    self.is_first = False
                    return text.removeprefix(" ")
                return text

            def flush(self) -> str | None:
                return whole.flush()

        return Stream()


@pytest.mark.parametrize(("kind", "text"), [("chat", "hello"), ("text", " hello")])
async def test_completion_loses_the_space_before_it(kind: str, text: str) -> None:
    """C19: it goes on from the prompt's text, where the answer to a chat is a text of its own."""
    async with http(Edge(FakeDispatcher(lambda _: tokens(" hello")), tokenizer=DropsASpace())) as client:
        choice = (await ask(client, kind))["choices"][0]
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == text
