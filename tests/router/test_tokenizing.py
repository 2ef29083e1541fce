"""How text could pile up before the request queue, whose bounds it has not reached yet."""

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest

from router.tokenizing import TokenizerThreads, TokenizingLimits
from splitserve.service.errors import InvalidRequest, Overloaded
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2 as pb
from tests.router.edge import Edge, running, until
from tests.router.fakes import ByteTokenizer


class Gate:
    """Text that is tokenized only when the test says so. `started` lists what has a thread."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.started: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.started.append(text)
        assert self.opened.wait(60)
        return [65]


@pytest.fixture
def gate() -> Iterator[Gate]:
    closed = Gate()
    yield closed
    closed.opened.set()


def start(threads: TokenizerThreads, gate: Gate, name: str, num_bytes: int = 1) -> "asyncio.Task[list[int]]":
    return asyncio.create_task(threads.run(lambda: gate.encode(name), num_bytes))


async def test_requests_above_the_limit_wait_for_ever_longer(gate: Gate) -> None:
    threads = TokenizerThreads(TokenizingLimits(max_requests=3), num_threads=1)
    admitted = [start(threads, gate, name) for name in "abc"]
    await until(lambda: gate.started == ["a"])
    with pytest.raises(Overloaded, match="text of 3 requests is being tokenized, the limit is 3") as refused:
        await start(threads, gate, "d")
    assert (refused.value.reason, refused.value.retry_after_s) == ("QUEUE_FULL", 1.0)
    gate.opened.set()
    assert await asyncio.gather(*admitted) == [[65]] * 3
    assert await start(threads, gate, "e") == [65]
    assert gate.started == ["a", "b", "c", "e"]
    threads.close()


async def test_bytes_above_the_limit_wait(gate: Gate) -> None:
    threads = TokenizerThreads(TokenizingLimits(max_bytes=100), num_threads=1)
    # One alone always fits: otherwise nobody could ever serve it.
    big = start(threads, gate, "big", 1000)
    await until(lambda: gate.started == ["big"])
    with pytest.raises(Overloaded, match="1000 bytes of text are being tokenized: 7 more would pass 100"):
        await start(threads, gate, "small", 7)
    gate.opened.set()
    assert await big == [65]
    assert await asyncio.gather(start(threads, gate, "x", 50), start(threads, gate, "y", 50)) == [[65], [65]]
    threads.close()


async def test_a_caller_that_left_keeps_its_place_or_frees_a_busy_thread(gate: Gate) -> None:
    """Who waits is forgotten at once; a thread cannot be interrupted, so its text counts until it is done."""
    threads = TokenizerThreads(TokenizingLimits(max_requests=2), num_threads=1)
    busy, waiting = start(threads, gate, "busy"), start(threads, gate, "waiting")
    await until(lambda: gate.started == ["busy"])
    for task in (busy, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    next_one = start(threads, gate, "next")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="text of 2 requests"):
        await start(threads, gate, "too many")
    gate.opened.set()
    assert await next_one == [65]
    assert gate.started == ["busy", "next"]
    threads.close()


async def test_text_that_is_refused_keeps_its_place() -> None:
    threads = TokenizerThreads(TokenizingLimits(max_requests=1), num_threads=1)

    def refuse() -> list[int]:
        raise InvalidRequest("no")

    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await threads.run(refuse, 1)
    assert await threads.run(lambda: [65], 1) == [65]
    threads.close()


async def test_the_edge_lets_text_in_without_end(gate: Gate) -> None:
    class Gated(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return gate.encode(text)

    async with running(Edge(encoder=Gated(), tokenizing=TokenizingLimits(max_requests=2))) as edge:
        generate, tokenize = edge.generate(), edge.stub.Tokenize(pb.TokenizeRequest(text="hi"))
        await until(lambda: len(gate.started) == 2)
        for refusal in (await edge.refusal(), await refused_tokenize(edge)):
            error = from_rpc_error(refusal)
            assert isinstance(error, Overloaded)
            assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 1.0)
        assert edge.outcomes() == {"rejected": 1}
        # What needs no tokenizing is served all the while.
        assert [message async for message in edge.generate(token_ids=[65])][-1].HasField("complete")
        gate.opened.set()
        assert [message async for message in generate][-1].HasField("complete")
        assert list((await tokenize).token_ids) == [65]


async def refused_tokenize(edge: Edge) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.stub.Tokenize(pb.TokenizeRequest(text="hi"))
    return refused.value
