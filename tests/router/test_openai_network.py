"""The OpenAI API between a network that cuts what it carries anywhere, and workers that are lost on the way."""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from router.request import FinishReason
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import Router
from tests.router.driving import hand_off
from tests.router.edge import Edge, http
from tests.router.fakes import FakeDispatcher, tokens

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hé"}]},
    "text": {"prompt": "hé"},
}
TEXT = "naïve 👩‍👩‍👧‍👦 ก็ 日本"  # a token for each byte


class CutNetwork(httpx.AsyncHTTPTransport):
    """What comes back comes in pieces of so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        whole = await response.aread()
        return httpx.Response(response.status_code, headers=response.headers, content=in_pieces(whole, self.size))


async def in_pieces(whole: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(whole), size):
        yield whole[start : start + size]
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("kind", PATHS)
async def test_event_cut_by_the_network_is_lost(kind: str, size: int) -> None:
    """C21: OpenAI's own client, through characters of several tokens and of several bytes."""
    async with http(Edge(FakeDispatcher(lambda _: tokens(TEXT)))) as plain:
        async with httpx.AsyncClient(transport=CutNetwork(size)) as network:
            openai = AsyncOpenAI(base_url=f"{plain.base_url}/v1", api_key="none", http_client=network, max_retries=0)
            create: Any = openai.chat.completions.create if kind == "chat" else openai.completions.create
            chunks = [chunk async for chunk in await create(model="tiny", stream=True, **BODIES[kind])]
        choices = [chunk.choices[0] for chunk in chunks]
        texts = [(choice.delta.content if kind == "chat" else choice.text) or "" for choice in choices]
        assert "".join(texts) == TEXT
        assert choices[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", PATHS)
async def test_half_a_character_is_an_event(kind: str) -> None:
    """C13, C21: a client that reads a byte at a time never waits in the middle of an event for another token."""
    async with http(Edge(FakeDispatcher(lambda _: tokens(TEXT)))) as client:
        body = BODIES[kind] | {"stream": True}
        events: list[str] = []
        async with client.stream("POST", PATHS[kind], json=body) as response:
            decoder, event = codecs.getincrementaldecoder("utf-8")("strict"), ""
            async for piece in response.aiter_bytes(1):
                event += decoder.decode(piece)
                if event.endswith("\n\n"):
                    assert decoder.getstate() == (b"", 0)
                    events.append(event)
                    event = ""
        assert (event, events.pop()) == ("", "data: [DONE]\n\n")
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        texts = [choice["delta"].get("content", "") if kind == "chat" else choice["text"] for choice in choices]
        assert "".join(texts) == TEXT
        assert all("\ufffd" not in text for text in texts)


@pytest.mark.parametrize("size", [1, 7])
async def test_body_cut_by_the_network_is_another(size: int) -> None:
    edge = Edge()
    body = json.dumps(BODIES["text"], ensure_ascii=False).encode()
    assert b"\xc3" in body
    async with http(edge) as client:
        headers = {"content-type": "application/json"}
        response = await client.post(PATHS["text"], content=in_pieces(body, size), headers=headers)
        assert response.status_code == 200
        assert bytes(edge.dispatcher.requests[0].prompt_ids).decode() == "hé"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", PATHS)
async def test_failover_is_billed(kind: str, is_stream: bool) -> None:
    """C59: the prompt was computed twice, and output went on from tokens that were there; each counts once."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    dispatcher: Any = router.dispatcher
    body = BODIES[kind] | {"stream": is_stream, "max_tokens": 4, "timings": True}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    async with http(Edge(dispatcher)) as client:
        asking = asyncio.create_task(client.post(PATHS[kind], json=body))
        attempt = await hand_off(prefill, decode)
        prefill.first(attempt, 0, 97)
        decode.token(attempt, 0, 97)
        decode.token(attempt, 1, 98)
        decode.ended(attempt, Reason.PREEMPTED)
        second = await hand_off(prefill, decode, 1)
        prefill.first(second, 2, 99)
        decode.token(second, 2, 99)
        decode.token(second, 3, 100, FinishReason.LENGTH)
        text = (await asking).text
        reply = json.loads(text.split("\n\n")[-3].removeprefix("data: ")) if is_stream else json.loads(text)
        num_prompt_tokens = len(("[user]hé" if kind == "chat" else "hé").encode())
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (num_prompt_tokens, 4)
        assert reply["usage"]["total_tokens"] == num_prompt_tokens + 4
        assert reply["timings"]["attempts"] == 2
