"""What is long about one request, over both edges, and how it would hold up or fill the router for all others."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import malformed, prompt_codec
from router.openai import bodies, requests
from router.request import FinishReason, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, http, running
from tests.router.fakes import ByteTokenizer, FakeDispatcher, Step, model_description

JSON = {"content-type": "application/json"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


class Watched(ByteTokenizer):
    """Knows on which threads tokens were named, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[bool] = []  # whether on the event loop

    def token_bytes(self, token_id: int) -> bytes:
        self.named.append(threading.current_thread() is threading.main_thread())
        return super().token_bytes(token_id)


def scored(request: GenerationRequest) -> list[Step]:
    """Each prompt token with one likeliest, and one output token of each sample with none, if asked for."""
    own = None if request.sampling.logprobs is None else TokenLogprobs(97, -1.0, ())
    told = () if request.sampling.prompt_logprobs is None else request.prompt_ids
    entries = tuple(TokenLogprobs(97, -1.0, ((98, -0.5),)) for _ in told)
    return [
        *([PromptLogprobs(entries)] if entries else []),
        *(TokenEvent(sample, 0, 97, FinishReason.LENGTH, own) for sample in range(request.sampling.n)),
    ]


def edge_of(tokenizer: ByteTokenizer) -> Edge:
    return Edge(FakeDispatcher(scored), model_description(max_model_len=200_000), tokenizer=tokenizer)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [10, 1000])
async def test_long_reply_is_made_on_the_event_loop(num_tokens: int, is_stream: bool) -> None:
    """C53: and a prompt's tokens are named once, not for each sample. A short reply is not worth a thread."""
    for path, options in (
        (TEXT_PATH, {"prompt": "x" * num_tokens, "echo": True, "logprobs": 1}),
        (TEXT_PATH, {"prompt": "x" * num_tokens, "prompt_logprobs": 1}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x" * num_tokens}], "prompt_logprobs": 1}),
    ):
        tokenizer = Watched()
        async with http(edge_of(tokenizer)) as client:
            response = await client.post(path, json=options | {"n": 4, "stream": is_stream})
            assert response.status_code == 200
        num_named = 2 * (num_tokens + (len("[user]") if path == CHAT_PATH else 0))
        num_of_output = 4 if "logprobs" in options else 0
        assert len(tokenizer.named) == num_named + num_of_output
        num_on_loop = len(tokenizer.named) if num_tokens < 64 else num_of_output if is_stream else 0
        assert sum(tokenizer.named) == num_on_loop


@pytest.mark.parametrize("num_chars", [10, 100_000])
async def test_long_body_is_read_on_the_event_loop(num_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C53: and its messages, over gRPC too."""
    on_loop: list[bool] = []

    def watch(module: Any, name: str) -> None:
        called = getattr(module, name)

        def watched(*args: Any) -> Any:
            on_loop.append(threading.current_thread() is threading.main_thread())
            return called(*args)

        monkeypatch.setattr(module, name, watched)

    watch(requests, "lone_surrogate")
    watch(prompt_codec, "_read_chat")
    async with http(edge_of(ByteTokenizer())) as client:
        response = await client.post(TEXT_PATH, json={"prompt": "x" * num_chars})
        assert response.status_code == 200, response.text
    assert on_loop == [num_chars == 10]
    on_loop.clear()
    async with running(edge_of(ByteTokenizer())) as edge:
        async for _ in edge.generate(chat=[("user", "")] * (num_chars // 100 or 1)):
            pass
    assert on_loop == [num_chars == 10]


async def test_body_of_more_values_than_anyone_needs_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """C53: the JSON reader would let nobody else run until it has them all."""
    monkeypatch.setattr(bodies, "MAX_SIGNS", 60_000)
    async with http(Edge()) as client:
        for values, num_signs in (([""] * 30_000, 29_999 + 2 * 30_001), ([None] * 60_000, 59_999 + 2)):
            response = await client.post(TEXT_PATH, json={"prompt": values})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_message")
            assert str(num_signs) in response.json()["error"]["message"]


@asynccontextmanager
async def half_sent(edge: Edge, num_bytes: int) -> AsyncIterator[asyncio.StreamReader]:
    """A body of which so much has been sent, and no more comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    head = f"POST {TEXT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {num_bytes + 1}\r\n\r\n".encode() + b" " * num_bytes)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def test_bodies_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """C53: above the limit of all together the next one is refused for a while, and room comes back."""
    monkeypatch.setattr(bodies, "MAX_BYTES_AT_ONCE", 2000)
    monkeypatch.setattr(bodies, "_MAX_SMALL_BYTES", 150)
    edge = Edge()

    async def status(client: httpx.AsyncClient, num_bytes: int = 500) -> int:
        content = b'{"prompt": "hi"}'.ljust(num_bytes)
        return (await client.post(TEXT_PATH, content=content, headers=JSON)).status_code

    async with http(edge) as client:
        async with half_sent(edge, 1600):
            statuses: list[int] = []
            while 429 not in statuses:  # from when the first one's bytes have come
                statuses.append(await status(client))
            refused = await client.post(TEXT_PATH, content=b" " * 500, headers=JSON)
            assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("queue_full", "1")
            assert await status(client, 300) == 200
            async with half_sent(edge, 300):
                while await status(client, 300) != 429:
                    pass
                assert await status(client, 150) == 200, "small ones are kept out by large ones"
        while await status(client) != 200:
            pass
        for _ in range(5):
            assert (await client.post(TEXT_PATH, content=b"{".ljust(1500), headers=JSON)).status_code == 400
        assert await status(client, 2000) == 200, "what was refused keeps its room"


@pytest.mark.parametrize(("least_bytes_per_s", "status"), [(1e9, 504), (1, 400)])
async def test_body_that_trickles_keeps_its_room_without_end(
    least_bytes_per_s: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C53: a byte now and then is no silence. One that comes fast enough may take its time."""
    monkeypatch.setattr(bodies, "_RECEIVING_S", 0.1)
    monkeypatch.setattr(bodies, "_LEAST_BYTES_PER_S", least_bytes_per_s)
    head = f"POST {TEXT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    edge = Edge()
    async with http(edge), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(f"{head}content-length: 1000\r\n\r\n".encode() + b" " * 100)
        answer = asyncio.create_task(reader.readline())
        for sent in range(100, 1000):
            if answer.done():
                break
            if sent == 120 and status == 400:  # 0.2 s later: all of the rest
                writer.write(b" " * (1000 - sent))
                break
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert (await answer).startswith(f"HTTP/1.1 {status}".encode())
        writer.close()


async def test_body_that_stops_coming_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SILENCE_S", 0.1)
    edge = Edge()
    async with http(edge), half_sent(edge, 100) as reader, asyncio.timeout(20):
        assert (await reader.readline()).startswith(b"HTTP/1.1 504")


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


async def raw_call(edge: Edge, data: bytes) -> grpc.aio.AioRpcError | None:
    """What a message of these bytes is answered with."""
    call = edge.channel.unary_stream("/splitserve.v1.InferenceService/Generate")(data)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


# A field that breaks off, and sampling parameters that do.
@pytest.mark.parametrize("tail", [b"", b"\x0a", b"\x32\x01\x0a"], ids=["whole", "cut off", "broken part"])
@pytest.mark.parametrize(
    "parts",
    [
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 90_000)),
        pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(stop=[""] * 90_000)),
    ],
    ids=["messages", "stop strings"],
)
async def test_message_of_millions_of_parts_fills_the_memory(parts: pb.GenerateRequest, tail: bytes) -> None:
    """C53, C55: it is refused before it is read, others are served as before, and long ids are one part."""
    async with running(edge_of(ByteTokenizer())) as edge:
        error = await raw_call(edge, parts.SerializeToString() + tail)
        assert error is not None
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert "40000 fields" in (error.details() or "")
        long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[97] * 199_000), sampling_params=pb.SamplingParams(n=2))
        assert await raw_call(edge, long.SerializeToString()) is None


@pytest.mark.parametrize(
    "data", [b"\xff" * 300_000, b"\x2a" + varint(299_990) + b"\x0a\x7f", b"\x2b" * 300_000, b"\x2a" * 300_000]
)
async def test_message_that_is_none_breaks_the_router(data: bytes) -> None:
    async with running(Edge()) as edge:
        error = await raw_call(edge, data)
        assert error is not None
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert await raw_call(edge, pb.GenerateRequest(text="a").SerializeToString()) is None


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5), st.integers(0, 40))
def test_fields_are_counted_wrongly(numbers: list[int], num_messages: int) -> None:
    message = pb.GenerateRequest(
        request_id="x" * 200,
        priority=-1,
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="é" * 99)] * num_messages),
        sampling_params=pb.SamplingParams(temperature=0.5, logit_bias=dict.fromkeys(range(3), 1.0), seed=7),
    )
    message.sampling_params.stop_token_ids.extend(number - 2**63 for number in numbers)
    num_fields = 4 + 3 * num_messages + 2 + 3 * 3 + bool(numbers)
    data, kind = message.SerializeToString(), pb.GenerateRequest.DESCRIPTOR
    for most, is_more in ((num_fields, False), (num_fields - 1, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(malformed, "MAX_FIELDS", most)
            assert malformed.has_too_many_fields(data, kind) is is_more
