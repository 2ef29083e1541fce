"""What a client of streams takes for a token, and what it does not take for an answer."""

import json
from typing import Any

import pytest

from splitserve.bench.load.openai_client import Answer, Api, connect
from splitserve.service.errors import Unavailable
from tests.bench.load.scripted import scripted

DONE = b"data: [DONE]\n\n"
USAGE = {"completion_tokens": 7, "prompt_tokens": 5}


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text_event(text: str) -> bytes:
    return event(choices=[{"text": text}])


async def test_piece_is_cut_by_the_network_and_counts_twice_or_never() -> None:
    whole = b": comment\n\n" + text_event("a") + text_event("ü") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"

    async with scripted(lambda _: [whole[i : i + 3] for i in range(0, len(whole), 3)]) as url, connect(url) as client:
        seen: list[int] = []
        answer = await client.complete("", 7, lambda answer: seen.append(len(answer.arrivals)))
    assert len(answer.arrivals) == 2
    assert seen == [1, 2]
    assert answer.sent < answer.arrivals[0] <= answer.arrivals[1]
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.counted_tokens) == (7, 5, 7)


async def test_event_without_text_counts_as_a_token() -> None:
    def reply(_: dict[str, Any]) -> list[bytes]:
        return [
            event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
            event(choices=[{"delta": {"content": "x"}}]),
            event(choices=[{"delta": {}, "finish_reason": "length"}]),
        ]

    async with scripted(reply) as url, connect(url, api="chat") as client:
        answer = await client.complete("hello", 3)
    assert len(answer.arrivals) == 1
    assert answer.counted_tokens == 1


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_request_lacks_what_was_asked_for(api: Api) -> None:
    bodies: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> list[bytes]:
        bodies.append(body)
        return [text_event("x"), DONE]

    async with scripted(reply) as url, connect(f"{url}/v1/", api=api, extra={"ignore_eos": True, "top_k": 1}) as client:
        assert client.model == "first"
        await client.complete("hello", 3)
    [body] = bodies
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"], body["top_k"]) == (
        *("first", 3, True),
        *(True, 1),
    )
    assert body.get("prompt") == ("hello" if api == "completions" else None)
    assert body.get("messages") == (None if api == "completions" else [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("pieces", "status", "told"),
    [
        ([b"no such thing"], 400, "400.*no such thing"),
        ([text_event("a"), event(error={"message": "lost"})], 200, "lost"),
        ([b"data: {\n\n"], 200, "no JSON"),
        ([DONE], 200, "without any text"),
        ([text_event("a"), text_event("b")], 200, "ended before"),
        ([b"data: [1]\n\n"], 200, "no object"),
    ],
    ids=["status", "in-band", "garbage", "empty", "cut off", "list"],
)
async def test_failure_is_taken_for_an_answer(pieces: list[bytes], status: int, told: str) -> None:
    async with scripted(lambda _: pieces, status=status) as url, connect(url) as client:
        with pytest.raises(Unavailable, match=told):
            await client.complete("", 1)


async def test_nobody_listens_and_nobody_says_so() -> None:
    with pytest.raises(Unavailable, match="names no model"):
        async with connect("http://127.0.0.1:9"):
            pass


def test_time_to_first_token_counts_from_another_moment() -> None:
    assert Answer(10.0, [10.5, 11.0]).ttft_s == 0.5
