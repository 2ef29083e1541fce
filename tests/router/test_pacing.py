"""Overload: when tokens wait for each other, and that none is late, lost or misplaced for it."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from router.pacing import Pacer
from router.request import FinishReason, TokenEvent, TokenLogprobs
from splitserve.service.reasons import Reason
from splitserve.v1 import inference_pb2 as pb
from tests.router.cluster_fakes import FakeWorker, Router, collect, ids
from tests.router.driving import hand_off, next_attempt
from tests.router.edge import Edge, running, until
from tests.router.fakes import FakeDispatcher

LENGTH = FinishReason.LENGTH


async def decoding(router: Router) -> tuple["asyncio.Task[list[TokenEvent]]", FakeWorker, str]:
    """A request whose first token has been taken from decode."""
    (prefill,), (decode, _) = router.pairs(1, 2)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    await asyncio.sleep(0.01)
    return task, decode, attempt


async def test_tokens_that_come_together_are_shown_apart() -> None:
    router = Router()
    task, decode, attempt = await decoding(router)
    for position in range(1, 4):
        decode.token(attempt, position, 100 + position)
    await asyncio.sleep(0.01)
    decode.token(attempt, 4, 104, LENGTH)
    events = await task
    assert ids(events) == [100, 101, 102, 103, 104]
    assert [event.is_followed for event in events] == [False, True, True, False, False]


@pytest.mark.parametrize("is_overloaded", [True, False])
async def test_overload_shows_every_token_by_itself(is_overloaded: bool) -> None:
    router = Router()
    task, decode, attempt = await decoding(router)
    router.pacer.pause_s = 0.2 if is_overloaded else 0.0
    decode.token(attempt, 1, 101)
    for position in range(2, 6):
        await asyncio.sleep(0.01)
        decode.token(attempt, position, 100 + position, LENGTH if position == 5 else None)
    events = await task
    assert ids(events) == [100, 101, 102, 103, 104, 105]
    assert any(event.is_followed for event in events) == is_overloaded


async def test_death_takes_the_tokens_that_wait_with_it() -> None:
    """They are the client's: the next attempt goes on behind them."""
    router = Router()
    task, decode, attempt = await decoding(router)
    router.pacer.pause_s = 0.05
    decode.token(attempt, 1, 101)
    decode.token(attempt, 2, 102)
    decode.ended(attempt, Reason.PREEMPTED)
    prefills = [fake for fake in router.fakes if fake.worker.worker_id.startswith("p")]
    decodes = [fake for fake in router.fakes if fake not in prefills]
    other, prefill, second = await next_attempt(prefills, decodes, attempt)
    [start] = [start for kind, name, start in other.channel.commands if (kind, name) == ("reserve", second)]
    assert start is not None
    assert start.outputs == {0: (100, 101, 102)}
    prefill.first(second, 3, 103, LENGTH)
    assert ids(await task) == [100, 101, 102, 103]
    router.assert_idle()


async def test_client_that_leaves_during_the_pause_holds_workers() -> None:
    router = Router()
    task, decode, attempt = await decoding(router)
    router.pacer.pause_s = 60.0
    decode.token(attempt, 1, 101)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert decode.channel.of_kind("release") == [attempt]
    router.assert_idle()


async def chunks_of(script: Sequence[TokenEvent], **sampling: object) -> list[pb.GenerateResponse]:
    async with running(Edge(FakeDispatcher(lambda _: list(script)))) as edge:
        return [response async for response in edge.generate(sampling_params=sampling)]


async def test_chunk_of_several_tokens_leaves_something_out() -> None:
    def event(position: int, character: str, finish: FinishReason | None, is_followed: bool) -> TokenEvent:
        entry = TokenLogprobs(ord(character), -0.5 * position, ())
        return TokenEvent(0, position, ord(character), finish, entry, is_followed)

    script = [
        event(0, "a", None, False),
        event(1, "b", None, True),
        event(2, "c", None, True),
        event(3, "d", LENGTH, False),
    ]
    first, second, end = await chunks_of(script, logprobs=0)
    assert (first.chunk.text, list(first.chunk.token_ids)) == ("a", [97])
    assert (second.chunk.text, list(second.chunk.token_ids)) == ("bcd", [98, 99, 100])
    assert [(entry.token_id, entry.logprob) for entry in second.chunk.logprobs] == [(98, -0.5), (99, -1.0), (100, -1.5)]
    assert (end.complete.completion_tokens, end.complete.finish_reason) == (4, "length")


async def test_chunk_of_several_tokens_goes_on_behind_a_stop_string() -> None:
    script = [TokenEvent(0, position, ord(char), None, None, True) for position, char in enumerate("abcd")]
    chunk, end = await chunks_of(script, stop=["c"])
    assert (chunk.chunk.text, list(chunk.chunk.token_ids)) == ("ab", [97, 98, 99])
    assert end.complete.finish_reason == "stop"


async def test_samples_that_come_together_are_mixed_up() -> None:
    script = [
        TokenEvent(sample, position, ord(text[position]), LENGTH if position == 1 else None, None, is_followed)
        for position, sample, text, is_followed in [
            (0, 0, "ab", True),
            (0, 1, "AB", True),
            (1, 0, "ab", True),
            (1, 1, "AB", False),
        ]
    ]
    responses = await chunks_of(script, n=2)
    for sample, text in enumerate(["ab", "AB"]):
        own = [response for response in responses if response.index == sample]
        assert "".join(response.chunk.text for response in own) == text
        assert own[-1].complete.completion_tokens == 2


def test_pause_follows_the_load() -> None:
    pacer = Pacer()
    for _ in range(20):
        pacer.note(busy=0.5, late_s=0.01)
    assert pacer.pause_s == 0.0
    pacer.note(busy=0.95, late_s=0.0)
    assert pacer.pause_s > 0
    for _ in range(20):
        pacer.note(busy=0.5, late_s=0.3)
    longest = pacer.pause_s
    assert 0.1 <= longest <= 0.5
    pacer.note(busy=0.8, late_s=0.0)
    assert pacer.pause_s == longest, "it neither grows nor shrinks where it is right"
    for _ in range(20):
        pacer.note(busy=0.3, late_s=0.0)
    assert pacer.pause_s == 0.0


async def test_busy_loop_is_not_noticed() -> None:
    pacer = Pacer()
    watch = asyncio.create_task(pacer.watch())

    async def work() -> None:
        while True:
            time.sleep(0.2)  # noqa: ASYNC251
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    try:
        await until(lambda: pacer.pause_s > 0)
        working.cancel()
        await until(lambda: pacer.pause_s == 0)
    finally:
        working.cancel()
        watch.cancel()
        await asyncio.gather(watch, working, return_exceptions=True)
