"""The router's own end: every call is told so in-band, counted once as what it is, and leaves nothing behind."""

import asyncio
import threading

import grpc
import pytest

from router.request import GenerationRequest
from router.stages import StageClock
from splitserve.service.errors import Unavailable
from splitserve.service.grpc_errors import from_rpc_error
from tests.router.edge import Edge, running, until
from tests.router.fakes import ByteTokenizer, FakeDispatcher, FakeGeneration, Wait, events, model_description, tokens
from tests.router.test_server import broken

ENDING = Unavailable("this router is shutting down", reason="DRAINING", retry_after_s=1.0)


def assert_told(failure: grpc.aio.AioRpcError) -> None:
    error = from_rpc_error(failure)
    assert failure.code() is grpc.StatusCode.UNAVAILABLE
    assert (error.reason, error.retry_after_s) == ("DRAINING", 1.0)


def start(edge: Edge) -> tuple["asyncio.Task[tuple[str, grpc.aio.AioRpcError]]", int]:
    num_tasks = len(asyncio.all_tasks())
    return asyncio.create_task(broken(edge.generate())), num_tasks


class NeverTaken(FakeDispatcher):
    """Every request stays in the queue."""

    def submit(self, request: GenerationRequest, stages: StageClock) -> FakeGeneration:
        generation = super().submit(request, stages)
        generation.attempts = 0
        return generation


@pytest.mark.parametrize(
    ("dispatcher", "text", "outcome"),
    [
        (FakeDispatcher(lambda _: [*tokens("par", None), Wait()]), "par", "failed"),
        (FakeDispatcher(lambda _: [Wait()]), "", "failed"),
        (NeverTaken(lambda _: [Wait()]), "", "rejected"),
    ],
    ids=["decoding", "prefilling", "queued"],
)
async def test_shutdown_looks_like_a_cut_connection(dispatcher: FakeDispatcher, text: str, outcome: str) -> None:
    async with running(Edge(dispatcher)) as edge:
        call, num_tasks = start(edge)
        await until(lambda: bool(dispatcher.generations))
        await until(lambda: dispatcher.generations[0].num_taken == len(text))
        edge.serving.calls.end_all(ENDING)
        arrived, failure = await call
        assert_told(failure)
        assert arrived == text
        assert edge.outcomes() == {outcome: 1}
        assert dispatcher.all_closed
        await edge.serving.calls.until_none()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


async def test_shutdown_waits_for_text_to_be_tokenized() -> None:
    started, go_on = threading.Event(), threading.Event()

    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            started.set()
            go_on.wait()
            return super().encode(text)

    async with running(Edge(encoder=SlowTokenizer())) as edge:
        try:
            call, _ = start(edge)
            await until(started.is_set)
            edge.serving.calls.end_all(ENDING)
            _, failure = await call
        finally:
            go_on.set()
        assert_told(failure)
        assert edge.outcomes() == {"rejected": 1}
        assert edge.dispatcher.generations == []


async def test_shutdown_waits_for_a_client_that_does_not_read() -> None:
    """The handler is inside a write that can never end."""
    dispatcher = FakeDispatcher(lambda _: events([97] * 50_000, None))
    async with running(Edge(dispatcher, model_description(max_model_len=60_000))) as edge:
        call = edge.generate(request_id="x" * 256, timeout=None)
        num_taken = -1

        def is_stuck() -> bool:
            nonlocal num_taken
            before, num_taken = num_taken, sum(generation.num_taken for generation in dispatcher.generations)
            return 0 < before == num_taken

        await until(is_stuck)
        edge.serving.calls.end_all(ENDING)
        await edge.settled()
        assert dispatcher.all_closed
        assert edge.outcomes() == {"failed": 1}
        _, failure = await broken(call)
        assert_told(failure)


async def test_client_that_left_is_counted_as_failed_by_a_shutdown() -> None:
    async with running(Edge(FakeDispatcher(lambda _: [*tokens("a", None), Wait()]))) as edge:
        call = edge.generate()
        await anext(aiter(call))
        call.cancel()
        await edge.settled()
        edge.serving.calls.end_all(ENDING)
        await edge.serving.calls.until_none()
        assert edge.outcomes() == {"cancelled": 1}


async def test_drain_ends_before_the_streams_do() -> None:
    release = asyncio.Event()

    def script(_: object) -> list[object]:
        return [*tokens("a", None), Wait(release), *tokens("xb")[1:]]

    async with running(Edge(FakeDispatcher(script))) as edge:  # type: ignore[arg-type]
        call = edge.generate()
        await anext(aiter(call))
        ended = asyncio.create_task(edge.serving.calls.until_none())
        await asyncio.sleep(0.05)
        assert not ended.done()
        release.set()
        await ended
        assert [message async for message in call][-1].complete.finish_reason == "length"
