"""Both clients against a scripted router: what an application sees, and what the router sees of it."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from splitserve import AsyncClient, Client
from splitserve.client.types import Chunk, Generation, Sample, Timings, TokenLogprobs
from splitserve.service import errors
from tests.client.fake_router import ECHO_IDS, WORDS, FakeRouter


class Blocking:
    """The blocking client behind the asyncio client's calls, so that every test below runs against both."""

    def __init__(self, target: str, **kwargs: Any) -> None:
        self.client = Client(target, **kwargs)

    async def generate(self, prompt: Any, **options: Any) -> Generation:
        return await asyncio.to_thread(lambda: self.client.generate(prompt, **options))

    async def chat(self, messages: Any, **options: Any) -> Generation:
        return await asyncio.to_thread(lambda: self.client.chat(messages, **options))

    async def chunks(self, prompt: Any, seen: list[Chunk], **options: Any) -> Generation:
        def read() -> Generation:
            with self.client.stream(prompt, **options) as stream:
                seen.extend(stream)
                return stream.result()

        return await asyncio.to_thread(read)

    async def take_one(self, prompt: str) -> Chunk:
        def read() -> Chunk:
            with self.client.stream(prompt) as stream:
                return next(stream)

        return await asyncio.to_thread(read)

    async def model_info(self) -> Any:
        return await asyncio.to_thread(self.client.model_info)

    async def tokenize(self, prompt: Any) -> tuple[int, ...]:
        return await asyncio.to_thread(self.client.tokenize, prompt)

    async def detokenize(self, ids: Any, **options: Any) -> str:
        return await asyncio.to_thread(lambda: self.client.detokenize(ids, **options))

    async def close(self) -> None:
        self.client.close()


class Asyncio(AsyncClient):
    async def chunks(self, prompt: Any, seen: list[Chunk], **options: Any) -> Generation:
        async with self.stream(prompt, **options) as stream:
            async for chunk in stream:
                seen.append(chunk)  # noqa: PERF401, what came before an error has to be kept
            return await stream.result()

    async def take_one(self, prompt: str) -> Chunk:
        async with self.stream(prompt) as stream:
            return await anext(stream)


@pytest.fixture(params=[Blocking, Asyncio])
async def client(request: pytest.FixtureRequest, router: FakeRouter) -> AsyncIterator[Any]:
    made = request.param(router.target, timeout=60)
    yield made
    await made.close()


async def test_result_lost_some_of_what_the_router_said(client: Any) -> None:
    result = await client.generate("Where?", max_tokens=4)
    assert result == Generation(
        samples=(Sample("Washington, D.C.", (0, 1, 2, 3), "stop", "\n", 4),),
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=2,
        seed=2**63 + 1,
        attempts=2,
        request_id="echoed",
    )


async def test_samples_were_mixed_up(client: Any) -> None:
    """C65: messages of three samples arrive mixed; a sample that ends early takes nobody with it."""
    chunks: list[Chunk] = []
    result = await client.chunks("three", chunks, n=3)
    assert [(chunk.index, chunk.text) for chunk in chunks] == [(1, "b"), (0, "a"), (2, "c"), (2, "cc"), (0, "aa")]
    assert result.samples == (
        Sample("aaa", (0, 10), "length", None, 2),
        Sample("b", (1,), "stop", ".", 1),
        Sample("ccc", (2, 12), "length", None, 2),
    )
    assert (result.text, result.completion_tokens, result.prompt_tokens, result.attempts) == ("aaa", 5, 3, 3)


async def test_timings_were_lost_or_not_asked_for(client: Any) -> None:
    assert (await client.generate("timings")).timings is None
    told = (await client.generate("timings", timings=True)).timings
    assert told == Timings(0.5, 1, 2, 4, 8, 4096)
    assert told.total_s == 15.5


async def test_echo_was_lost_or_taken_for_output(client: Any) -> None:
    chunks: list[Chunk] = []
    result = await client.chunks("echo", chunks, echo=True)
    assert (result.prompt_text, result.prompt_token_ids) == ("echo", (5, 6))
    assert (result.text, result.token_ids) == ("a", (0,))
    assert chunks[0] == Chunk("", (), prompt_text="echo", prompt_token_ids=(5, 6))
    assert (await client.generate("echo")).prompt_token_ids == ()


@pytest.mark.parametrize(("num", "reason"), [(4, "TRUNCATED_STREAM"), (2, "ODD_SAMPLE")])
async def test_answer_with_other_samples_than_asked_for_was_taken_as_whole(client: Any, num: int, reason: str) -> None:
    with pytest.raises(errors.Internal) as caught:
        await client.generate("three", n=num)
    assert caught.value.reason == reason


async def test_logprob_was_lost_or_changed(client: Any) -> None:
    """C10: absent is not zero, minus infinity is a number, and every chunk has its own."""
    chunks: list[Chunk] = []
    result = await client.chunks("logprobs", chunks)
    assert result.prompt_logprobs == (
        TokenLogprobs(5, None, {}),
        TokenLogprobs(6, -2.5, {0: -0.5}),
        TokenLogprobs(7, -math.inf, {}),
    )
    assert result.logprobs == (
        TokenLogprobs(1, -0.25, {1: -0.25, 9: -4.0}),
        TokenLogprobs(2, 0.0, {2: 0.0, 9: -4.0}),
    )
    assert [(len(c.token_ids), len(c.logprobs), len(c.prompt_logprobs)) for c in chunks] == [
        (0, 0, 2),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 0),
    ]
    assert list(result.logprobs[0].top) == [1, 9]


async def test_stop_token_zero_was_taken_for_no_stop(client: Any) -> None:
    assert (await client.generate("stop token")).matched_stop == 0


async def test_chunks_differ_from_the_result(client: Any) -> None:
    seen: list[Chunk] = []
    result = await client.chunks("Where?", seen)
    assert [chunk.text for chunk in seen] == list(WORDS)
    assert sum((chunk.token_ids for chunk in seen), ()) == result.token_ids


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Where?", "text"),
        ([1, 2, 3], "token_ids"),
        ([], "token_ids"),
        ([{"role": "user", "content": "Where?"}], "chat"),
    ],
)
async def test_prompt_travelled_as_another_kind(client: Any, router: FakeRouter, prompt: Any, kind: str) -> None:
    await client.generate(prompt)
    assert router.requests[0].WhichOneof("prompt") == kind


async def test_options_were_dropped_on_the_way(client: Any, router: FakeRouter) -> None:
    await client.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}],
        model="m",
        request_id="mine",
        priority=-3,
        metadata={"traceparent": "00-1"},
        timeout=9,
        temperature=0.0,
        top_k=0,
        stop=["\n", "END"],
        stop_token_ids=[0],
        seed=0,
        logit_bias={5: -100.0},
        logprobs=0,
        prompt_logprobs=3,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=-0.5,
        top_p=None,
    )
    request, params = router.requests[0], router.requests[0].sampling_params
    assert [message.role for message in request.chat.messages] == ["system", "user"]
    assert (request.model, request.request_id, request.priority) == ("m", "mine", -3)
    assert params.HasField("temperature")
    assert params.HasField("top_k")
    assert params.HasField("seed")
    assert not params.HasField("top_p")
    assert params.HasField("logprobs")
    assert (params.logprobs, params.prompt_logprobs, params.frequency_penalty) == (0, 3, -0.5)
    assert params.HasField("repetition_penalty")
    assert params.HasField("presence_penalty")
    assert not params.HasField("max_tokens")
    assert (list(params.stop), list(params.stop_token_ids), dict(params.logit_bias)) == (
        ["\n", "END"],
        [0],
        {5: -100.0},
    )
    assert router.metadata[0]["traceparent"] == "00-1"
    assert 0 < router.remaining_s[0] < 10  # gRPC rounds up; the client's own deadline is 60


async def test_a_call_without_timeout_had_no_deadline(client: Any, router: FakeRouter) -> None:
    await client.generate("Where?")
    assert 0 < router.remaining_s[0] < 61  # gRPC rounds up


async def test_refusal_reached_the_caller_without_its_details(client: Any) -> None:
    with pytest.raises(errors.Overloaded) as caught:
        await client.generate("refuse")
    assert caught.value.message == "queue holds 64 of 64 requests"
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 1.5)


@pytest.mark.parametrize(
    ("prompt", "error", "reason"),
    [
        ("fail midway", errors.Unavailable, "ATTEMPTS_EXHAUSTED"),
        ("truncate", errors.Internal, "TRUNCATED_STREAM"),
        ("crash", errors.Internal, "UNKNOWN"),
    ],
)
async def test_half_an_answer_was_taken_as_whole(client: Any, prompt: str, error: Any, reason: str) -> None:
    seen: list[Chunk] = []
    with pytest.raises(error) as caught:
        await client.chunks(prompt, seen)
    assert [chunk.text for chunk in seen] == ["half an "]
    assert caught.value.reason == reason


async def test_leaving_a_stream_left_its_request_running(client: Any, router: FakeRouter) -> None:
    assert (await client.take_one("forever")).text == "first "
    assert await asyncio.to_thread(router.cancelled.wait, 60)


async def test_deadline_ended_in_another_error(client: Any, router: FakeRouter) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        await client.generate("silent", timeout=0.2)
    assert await asyncio.to_thread(router.cancelled.wait, 60)


async def test_lookups_failed(client: Any) -> None:
    info = await client.model_info()
    assert (info.model, info.max_prompt_tokens, info.eos_token_ids, info.ready) == ("fake", 32, (2,), True)
    assert await client.tokenize("Where?") == ECHO_IDS
    with pytest.raises(errors.InvalidRequest) as caught:
        await client.tokenize("refuse")
    assert caught.value.field == "prompt"
    assert await client.detokenize([7, 2**40], model="m") == f"[7, {2**40}] of m"
    with pytest.raises(errors.InvalidRequest) as caught:
        await client.detokenize([-1])
    assert caught.value.field == "token_ids"
    with pytest.raises(errors.InvalidRequest, match="token_ids cannot be sent"):
        await client.detokenize([2**64])


@pytest.mark.parametrize("kind", [Blocking, Asyncio])
async def test_dead_router_looked_like_something_else(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    client = kind(f"127.0.0.1:{port}")
    with pytest.raises(errors.Unavailable) as caught:
        await client.generate("Where?")
    assert caught.value.reason == "UNREACHABLE"
    await client.close()


@pytest.mark.parametrize("kind", [Blocking, Asyncio])
async def test_too_large_a_message_asked_for_a_retry(kind: Any) -> None:
    with FakeRouter(max_message_bytes=1000) as router:
        client = kind(router.target)
        with pytest.raises(errors.InvalidRequest) as caught:
            await client.generate("x" * 2000)
        assert caught.value.reason == "MESSAGE_TOO_LARGE"
        await client.close()


async def test_cancelled_task_left_its_request_running(router: FakeRouter) -> None:
    async with AsyncClient(router.target) as client:
        task = asyncio.create_task(client.generate("silent"))
        assert await asyncio.to_thread(router.streaming.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, 60)


async def test_closing_a_stream_cancelled_the_task_that_read_it(router: FakeRouter) -> None:
    async with AsyncClient(router.target) as client:
        stream = client.stream("silent")
        reader = asyncio.create_task(stream.result())
        assert await asyncio.to_thread(router.streaming.wait, 60)
        await stream.aclose()
        with pytest.raises(errors.Cancelled):
            await reader


def test_closing_from_another_thread_left_the_reader_waiting(router: FakeRouter) -> None:
    import threading

    with Client(router.target) as client:
        stream = client.stream("silent")
        closer = threading.Thread(target=lambda: (router.streaming.wait(60), stream.close()))
        closer.start()
        with pytest.raises(errors.Cancelled):
            stream.result()
        closer.join()


def test_an_ended_stream_forgot_its_error(router: FakeRouter) -> None:
    with Client(router.target) as client, client.stream("fail midway") as stream:
        for _ in range(2):
            with pytest.raises(errors.Unavailable):
                stream.result()


def test_target_of_the_environment_was_ignored(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TARGET", router.target)
    with Client() as client:
        assert client.model_info().model == "fake"


def test_proxy_of_the_environment_was_asked_for_loopback(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Client(router.target) as client:
        assert client.model_info().model == "fake"
