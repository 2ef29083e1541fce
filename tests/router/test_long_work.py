"""What is long about one request, over both edges, and how it would hold up or fill the router for all others."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router import prompt_codec
from router.openai import answers, bodies, exchange, requests
from router.openai.answers import Asked, ChatAnswer, CompletionAnswer
from router.openai.token_texts import TokenTexts
from router.pieces import Delta, Piece, PromptEcho
from router.request import FinishReason, GenerationRequest, PromptLogprobs, TokenEvent, TokenLogprobs
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


WORD = "y" * 1000


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (TEXT_PATH, {"prompt": "x" * 20_000, "echo": True, "n": 4}),
        (TEXT_PATH, {"prompt": "x" * 70_000, "echo": True, "stream": True}),
        (TEXT_PATH, {"prompt": ["x"] * 100, "n": 3}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}]}),
    ],
    ids=["echoes", "echo in a stream", "choices", "chat"],
)
@pytest.mark.parametrize("is_long", [False, True])
async def test_long_text_is_written_on_the_event_loop(
    path: str, options: dict[str, Any], is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C53: also where nobody asks for logprobs."""
    on_loop: list[bool] = []

    def script(request: GenerationRequest) -> list[Step]:
        token_id, last = (257, 69) if path == CHAT_PATH else (97, 0)
        return [
            TokenEvent(sample, position, token_id, FinishReason.LENGTH if position == last else None)
            for sample in range(request.sampling.n)
            for position in range(last + 1)
        ]

    def watch(name: str) -> None:
        made = getattr(answers.replies, name)

        def watched(*args: Any) -> Any:
            on_loop.append(threading.current_thread() is threading.main_thread())
            return made(*args)

        monkeypatch.setattr(answers.replies, name, watched)

    if not is_long:
        options = options | {"n": 2, "prompt": "x"} if path == TEXT_PATH else options
        monkeypatch.setattr(answers, "_MAX_CHARS_ON_LOOP", 1_000_000)
    edge = Edge(FakeDispatcher(script), model_description(max_model_len=200_000), tokenizer=ByteTokenizer(WORD))
    async with http(edge) as client:
        watch("Completion")
        watch("ChatCompletion")
        assert (await client.post(path, json=options)).status_code == 200
    assert on_loop[0] is not is_long


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
def test_stream_keeps_the_logprobs_of_its_prompts(path: str) -> None:
    """They are told with the choices' first words; nothing needs them after the last of these."""

    class Entry(TokenLogprobs):
        """Can be watched."""

    asked = Asked(
        id="a", model="m", num_prompts=1, n=2, has_logprobs=True, has_prompt_logprobs=True, is_stream=True,
        includes_usage=False,
    )  # fmt: skip
    answer = (CompletionAnswer if path == TEXT_PATH else ChatAnswer)(asked, TokenTexts(ByteTokenizer()))
    told: list[str] = []

    def take(piece: Piece) -> None:
        told.extend(str(event.make()) for event in answer.take(0, piece))

    if path == TEXT_PATH:
        take(PromptEcho("a", (97,)))
    entry = Entry(97, None, ())
    watched = weakref.ref(entry)
    take(PromptLogprobs((entry,)))
    del entry
    take(Delta(0, (98,), "b", ()))
    assert watched() is not None
    take(Delta(1, (99,), "c", ()))
    assert watched() is None
    take(Delta(0, (100,), "d", ()))
    assert ["prompt_logprobs=[None]" in event for event in told] == [True, False, False, False, False]


async def test_logprobs_of_one_request_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all prompts, and those of an output that is no stream; no worker hears of what is too much."""
    monkeypatch.setattr(exchange, "MAX_LOGPROBS", 100)
    edge = edge_of(ByteTokenizer())
    ten = "x" * 10
    own = {"prompt": "x", "n": 2, "logprobs": 4}
    async with http(edge) as client:
        for options, num_logprobs in (
            ({"prompt": [ten, ten], "prompt_logprobs": 4}, None),
            ({"prompt": [ten, ten, ten], "prompt_logprobs": 4}, 150),
            ({"prompt": ten, "prompt_logprobs": 10, "stream": True}, 110),
            (own | {"max_tokens": 10}, None),
            (own | {"max_tokens": 11}, 110),
            (own | {"max_tokens": 11, "stream": True}, None),
            (own | {"max_tokens": 10, "echo": True}, 105),
        ):
            num_before = len(edge.dispatcher.requests)
            response = await client.post(TEXT_PATH, json=options)
            assert response.status_code == (200 if num_logprobs is None else 400), (options, response.text)
            if num_logprobs is not None:
                assert f"up to {num_logprobs} logprobs" in response.json()["error"]["message"]
                assert isinstance(options["prompt"], list) or len(edge.dispatcher.requests) == num_before


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
