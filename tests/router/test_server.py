"""How a call could end wrongly at the public edge, over a real channel: no status, a false end, a task left behind."""

import asyncio
import gc
import threading

import grpc
import pytest

from router.request import FinishReason, GenerationRequest, TokenEvent
from router.stages import StageClock
from splitserve.service.errors import Internal, Overloaded, Unavailable
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, running, until
from tests.router.fakes import (
    ByteTokenizer,
    FakeDispatcher,
    FakeGeneration,
    Step,
    Wait,
    events,
    model_description,
    tokens,
)


async def collect(call: grpc.aio.UnaryStreamCall) -> tuple[str, list[int], list[pb.GenerateComplete]]:
    text, ids, completes = "", [], []
    async for message in call:
        match message.WhichOneof("response"):
            case "chunk":
                assert not completes, "a chunk came after the end"
                text += message.chunk.text
                ids += message.chunk.token_ids
            case "complete":
                completes.append(message.complete)
    return text, ids, completes


async def broken(call: grpc.aio.UnaryStreamCall) -> tuple[str, grpc.aio.AioRpcError]:
    """The text before the error that the call must end with; a `complete` before it is wrong."""
    text = ""
    try:
        async for message in call:
            assert message.WhichOneof("response") == "chunk"
            text += message.chunk.text
    except grpc.aio.AioRpcError as error:
        return text, error
    raise AssertionError("the call ended as if nothing had happened")


async def test_an_answer_is_whole_and_says_how_it_came_about() -> None:
    async with running(Edge(FakeDispatcher(lambda _: tokens("hello")))) as edge:
        call = edge.generate(text="abc", request_id="mine", sampling_params={"seed": 7})
        messages = [message async for message in call]
        assert {message.request_id for message in messages} == {"mine"}
        assert "".join(message.chunk.text for message in messages) == "hello"
        assert [id_ for message in messages for id_ in message.chunk.token_ids] == list(b"hello")
        complete = messages[-1].complete
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 5)
        assert (complete.seed, complete.attempts, complete.cached_tokens) == (7, 2, 3)
        assert complete.WhichOneof("matched_stop") is None
        assert edge.outcomes() == {"length": 1}
        assert edge.dispatcher.all_closed
        assert edge.sample("splitserve_time_to_first_token_seconds_count") == 1
        assert edge.sample("splitserve_inter_token_latency_seconds_count") == 4
        assert edge.sample("splitserve_e2e_request_latency_seconds_count") == 1
        assert edge.sample("splitserve_prompt_tokens_total") == 3
        assert edge.sample("splitserve_generation_tokens_total") == 5


async def test_a_stop_string_ends_the_work_and_hides_what_came_after_it() -> None:
    """C16, C18: the workers are told at once; tokens behind the match are neither shown nor counted."""
    never_taken = Wait()
    script: list[Step] = [*tokens("one, two", None), never_taken]
    async with running(Edge(FakeDispatcher(lambda _: script))) as edge:
        text, ids, [complete] = await collect(edge.generate(sampling_params={"stop": [", t", "two"]}))
        assert (text, bytes(ids)) == ("one", b"one, t")
        assert (complete.finish_reason, complete.matched_stop_string, complete.completion_tokens) == ("stop", ", t", 6)
        [generation] = edge.dispatcher.generations
        assert (generation.num_taken, generation.num_closed) == (6, 1)
        assert edge.outcomes() == {"stop": 1}


async def test_withheld_text_is_released_at_the_end_and_ids_are_never_withheld() -> None:
    """C16."""
    async with running(Edge(FakeDispatcher(lambda _: tokens("stoc")))) as edge:
        call = edge.generate(sampling_params={"stop": ["stop"]})
        messages = [message async for message in call]
        assert [message.chunk.text for message in messages[:4]] == ["", "", "", "stoc"]
        assert [list(message.chunk.token_ids) for message in messages[:4]] == [[id_] for id_ in b"stoc"]
        assert messages[4].complete.finish_reason == "length"


@pytest.mark.parametrize(("token_id", "params", "matched"), [(256, {}, None), (10, {"stop_token_ids": [10]}, 10)])
async def test_a_token_that_stops_is_not_text(token_id: int, params: dict[str, object], matched: int | None) -> None:
    script = [*tokens("a", None), TokenEvent(0, 1, token_id, FinishReason.STOP)]
    async with running(Edge(FakeDispatcher(lambda _: script))) as edge:
        text, ids, [complete] = await collect(edge.generate(sampling_params=params))
        assert (text, ids, complete.finish_reason) == ("a", [97, token_id], "stop")
        assert (complete.matched_stop_token_id if complete.HasField("matched_stop_token_id") else None) == matched


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (Unavailable("no worker is left"), "UNAVAILABLE", "failed"),
        (Internal("bad"), "INTERNAL", "failed"),
        (Overloaded("later"), "RESOURCE_EXHAUSTED", "failed"),
        (ZeroDivisionError("secret detail"), "INTERNAL", "failed"),
        (asyncio.CancelledError(), "UNAVAILABLE", "failed"),
        (TimeoutError("not the request's deadline"), "INTERNAL", "failed"),
    ],
)
async def test_a_failure_in_mid_stream_never_looks_like_an_end(error: BaseException, code: str, outcome: str) -> None:
    """C20, C28: also when something inside was cancelled, or failed in a way nobody thought of."""
    async with running(Edge(FakeDispatcher(lambda _: [*tokens("par", None), error]))) as edge:
        text, failure = await broken(edge.generate())
        assert (text, failure.code().name) == ("par", code)
        assert "secret" not in (failure.details() or "")
        assert edge.outcomes() == {outcome: 1}
        assert edge.dispatcher.all_closed


@pytest.mark.parametrize(
    "script",
    [tokens("ab", None), [TokenEvent(0, 0, 97), TokenEvent(0, 2, 97)], [TokenEvent(0, 0, 97), TokenEvent(0, 0, 97)]],
    ids=["cut off", "lost token", "doubled token"],
)
async def test_output_that_is_not_whole_is_a_failure(script: list[Step]) -> None:
    async with running(Edge(FakeDispatcher(lambda _: script))) as edge:
        _, failure = await broken(edge.generate())
        assert failure.code() is grpc.StatusCode.INTERNAL
        assert edge.outcomes() == {"failed": 1}


@pytest.mark.parametrize(
    ("error", "code"),
    [(Overloaded("queue is full", retry_after_s=2.5), "RESOURCE_EXHAUSTED"), (Unavailable("no pair"), "UNAVAILABLE")],
)
async def test_a_refusal_by_the_cluster_reaches_the_caller_as_rejected(error: Exception, code: str) -> None:
    def refuse(_: GenerationRequest) -> list[Step]:
        raise error

    async with running(Edge(FakeDispatcher(refuse))) as edge:
        refusal = await edge.refusal()
        assert refusal.code().name == code
        assert from_rpc_error(refusal).retry_after_s == getattr(error, "retry_after_s", None)
        assert edge.outcomes() == {"rejected": 1}


async def test_a_request_that_no_worker_ever_took_was_rejected_and_did_not_fail() -> None:
    class NeverTaken(FakeDispatcher):
        def submit(self, request: GenerationRequest, stages: StageClock) -> FakeGeneration:
            generation = super().submit(request, stages)
            generation.attempts = 0
            return generation

    async with running(Edge(NeverTaken(lambda _: [Unavailable("no pair of workers came")]))) as edge:
        assert (await edge.refusal()).code() is grpc.StatusCode.UNAVAILABLE
        assert edge.outcomes() == {"rejected": 1}
        assert edge.dispatcher.all_closed


async def test_a_client_that_leaves_frees_the_workers() -> None:
    """C28."""
    async with running(Edge(FakeDispatcher(lambda _: [*tokens("abc", None), Wait()]))) as edge:
        call = edge.generate()
        for _ in range(3):
            await anext(aiter(call))
        call.cancel()
        await edge.settled()
        assert edge.dispatcher.all_closed
        assert edge.outcomes() == {"cancelled": 1}


async def test_a_client_that_leaves_without_having_read_frees_the_workers() -> None:
    """C28: the handler is then inside a write that can never end."""
    polls: list[int] = []

    def is_stuck() -> bool:
        polls.append(sum(generation.num_taken for generation in edge.dispatcher.generations))
        return len(polls) > 20 and 0 < polls[-1] == polls[-20]

    async with running(
        Edge(FakeDispatcher(lambda _: events([97] * 50_000)), model_description(max_model_len=60_000))
    ) as edge:
        call = edge.generate(request_id="x" * 256)
        await until(is_stuck)
        assert edge.outcomes() == {}
        call.cancel()
        await edge.settled()
        assert edge.dispatcher.all_closed
        assert edge.outcomes() == {"cancelled": 1}


async def test_a_client_that_leaves_during_tokenizing_starts_nothing() -> None:
    """The text is refused or finished with nobody to tell; no worker hears of it."""
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return super().encode(text)

    async with running(Edge(encoder=SlowTokenizer())) as edge:
        call = edge.generate()
        await started.wait()
        call.cancel()
        await edge.settled()
        go_on.set()
        assert edge.outcomes() == {"cancelled": 1}
        assert edge.dispatcher.generations == []


async def test_a_deadline_ends_the_call_and_the_work() -> None:
    async with running(Edge(FakeDispatcher(lambda _: [*tokens("abc", None), Wait()]))) as edge:
        text, failure = await broken(edge.generate(timeout=1.0))
        assert (text, failure.code()) == ("abc", grpc.StatusCode.DEADLINE_EXCEEDED)
        await edge.settled()
        assert edge.dispatcher.all_closed
        assert edge.outcomes() == {"deadline": 1}
        [request] = edge.dispatcher.requests
        assert request.deadline is not None


async def test_a_client_that_neither_reads_nor_leaves_is_ended_by_the_routers_own_limit() -> None:
    """The handler is then inside a write that can never end, and the client set no deadline."""
    model = model_description(max_model_len=60_000)
    dispatcher = FakeDispatcher(lambda _: events([97] * 50_000, None))
    async with running(Edge(dispatcher, model, request_timeout_s=1.0)) as edge:
        before = len(asyncio.all_tasks())
        call = edge.generate(request_id="x" * 256, timeout=None)
        await edge.settled()
        assert 0 < dispatcher.generations[0].num_taken < 50_000
        assert edge.dispatcher.all_closed
        assert edge.outcomes() == {"deadline": 1}
        # Whoever reads at last learns that it was cut off.
        _, failure = await broken(call)
        assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_text_that_takes_too_long_to_tokenize_is_ended_by_the_routers_own_limit() -> None:
    go_on = threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            go_on.wait()
            return super().encode(text)

    async with running(Edge(encoder=SlowTokenizer(), request_timeout_s=0.3)) as edge:
        try:
            refusal = await edge.refusal(timeout=None)
        finally:
            go_on.set()
        assert refusal.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert edge.outcomes() == {"deadline": 1}
        assert edge.dispatcher.generations == []


@pytest.mark.parametrize(("timeout", "request_timeout_s"), [(None, 50.0), (900, 50.0), (50, 900.0)])
async def test_the_shorter_of_both_limits_counts_from_arrival(timeout: float | None, request_timeout_s: float) -> None:
    async with running(Edge(request_timeout_s=request_timeout_s)) as edge:
        arrival = asyncio.get_running_loop().time()
        await collect(edge.generate(timeout=timeout))
        [request] = edge.dispatcher.requests
        assert request.deadline is not None
        # gRPC rounds deadlines, and the call took its time: far less than what the limits differ by.
        assert request.deadline == pytest.approx(arrival + 50, abs=40)


async def test_200_cancelled_calls_leave_nothing_behind_and_hurt_no_other() -> None:
    """C28."""
    release = asyncio.Event()

    def script(request: GenerationRequest) -> list[Step]:
        if request.request_id == "healthy":
            return [*tokens("ab", None), Wait(release), *[TokenEvent(0, 2, 99, FinishReason.LENGTH)]]
        return [*tokens("abc", None), Wait()]

    async with running(Edge(FakeDispatcher(script))) as edge:
        await collect(edge.generate(request_id="healthy", sampling_params={"stop": ["b"]}))
        before = len(asyncio.all_tasks())
        healthy = [asyncio.create_task(collect(edge.generate(request_id="healthy"))) for _ in range(5)]
        calls = [edge.generate(request_id="same") for _ in range(200)]
        for call in calls:
            await anext(aiter(call))
        for call in calls:
            call.cancel()
        del calls, call
        await until(lambda: edge.outcomes().get("cancelled") == 200)
        release.set()
        assert [text for text, _, _ in await asyncio.gather(*healthy)] == ["abc"] * 5
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert edge.outcomes() == {"stop": 1, "cancelled": 200, "length": 5}
        assert edge.dispatcher.all_closed


async def test_two_requests_with_one_id_are_both_answered() -> None:
    """C39: the client's id is echoed, never a key."""
    both = asyncio.Event()
    seen: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> list[Step]:
        seen.append(request)
        if len(seen) == 2:
            both.set()
        return [Wait(both), *events(request.prompt_ids)]

    async with running(Edge(FakeDispatcher(script))) as edge:
        answers = await asyncio.gather(
            collect(edge.generate(text="first", request_id="x")), collect(edge.generate(text="second", request_id="x"))
        )
        assert [text for text, _, _ in answers] == ["first", "second"]


async def test_a_message_of_6_mb_is_served_and_one_above_the_limit_hurts_no_other_call() -> None:
    """C55."""
    release = asyncio.Event()
    script = [*tokens("a", None), Wait(release), TokenEvent(0, 1, 98, FinishReason.LENGTH)]

    class OneTokenPerKilobyte(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [65] * (len(text) // 1000 + 1)

    model = model_description(max_model_len=600_000)
    async with running(Edge(FakeDispatcher(lambda _: script), model, encoder=OneTokenPerKilobyte())) as edge:
        other = edge.generate()
        await anext(aiter(other))
        big_ids = edge.generate(token_ids=[65] * 500_000)
        await anext(aiter(big_ids))
        big_text = edge.generate(text="x" * 6_000_000)
        await anext(aiter(big_text))
        refusal = await edge.refusal(text="x" * (64 * 1024 * 1024 + 1))
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "67108864" in (refusal.details() or "")
        release.set()
        assert [(await collect(call))[0] for call in (other, big_ids, big_text)] == ["b", "b", "b"]
        assert [len(request.prompt_ids) for request in edge.dispatcher.requests] == [1, 500_000, 6_001]


async def test_traceparent_travels_and_nonsense_does_not() -> None:
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with running(Edge()) as edge:
        await collect(edge.generate(metadata=[("traceparent", good)]))
        await collect(edge.generate(metadata=[("traceparent", "x" * 900)]))
        assert [request.traceparent for request in edge.dispatcher.requests] == [good, ""]
