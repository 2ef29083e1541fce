"""Several samples of one request: lost together, they go on apart and at the same time; each ends once."""

import asyncio

import pytest

from router.flow import RequestFlow
from router.request import Event, FinishReason, TokenEvent
from router.worker import Role
from splitserve.service.errors import Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router, collect
from tests.router.driving import next_attempt, until
from tests.router.edge import Edge, running

END = FinishReason.LENGTH


class Reading:
    """A client that reads a flow in its own task."""

    def __init__(self, flow: RequestFlow) -> None:
        self.events: list[Event] = []
        self.flow = flow
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.flow:
                self.events.append(event)
        finally:
            await self.flow.aclose()

    def text(self, sample: int) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent) and event.sample == sample]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def begun(router: Router, num_decode: int = 2, n: int = 3) -> tuple[Reading, FakeWorker, FakeWorker, str]:
    """A request whose samples have their first tokens, 100 + index: (reading, decode, another decode, attempt id)."""
    (prefill,), decodes = router.pairs(1, num_decode)
    reading = Reading(router.submit(n=n))
    decode, prefill, attempt = await next_attempt([prefill], decodes)
    for sample in range(n):
        prefill.first(attempt, 0, 100 + sample, samples=(sample,))
        decode.token(attempt, 0, 100 + sample, sample=sample)
    await until(lambda: len(reading.events) == n)
    others = [other for other in decodes if other is not decode]
    return reading, decode, others[0] if others else decode, attempt


async def go_on(decode: FakeWorker, number: int) -> tuple[str, int, tuple[int, ...]]:
    """Grants the `number`-th reservation: (attempt, sample, its outputs)."""
    attempt, start = await decode.command("reserve", number)
    assert start is not None
    ((sample, outputs),) = start.outputs.items()
    decode.reserved(attempt)
    return attempt, sample, outputs


async def test_samples_of_a_dead_worker_go_on_one_after_another() -> None:
    """C65: all that are left run again at the same time, the finished one does not; one death is one failure."""
    router = Router(max_attempts=2)
    reading, decode, other, attempt = await begun(router)
    decode.token(attempt, 1, 7, END, sample=1)
    await until(lambda: len(reading.events) == 4)
    router.leave(decode)
    again = [await go_on(other, number) for number in range(2)]
    assert sorted((sample, outputs) for _, sample, outputs in again) == [(0, (100,)), (2, (102,))]
    for later, sample, _ in again:
        other.token(later, 1, 50 + sample, END, sample=sample)
    await reading.task
    assert [reading.text(sample) for sample in range(3)] == [[100, 50], [101, 7], [102, 52]]
    assert reading.flow.attempts == 3
    assert len(other.channel.of_kind("reserve")) == 2
    router.assert_idle()


async def test_each_death_counts_as_often_as_there_are_samples() -> None:
    """Two deaths are two failures, however many samples each of them interrupts; then it is enough."""
    router = Router(max_attempts=2, max_deaths=3)
    reading, decode, other, _ = await begun(router)
    router.leave(decode)
    for number in range(3):
        await go_on(other, number)
    router.join(Role.DECODE, "d9")
    router.leave(other)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await reading.task
    router.assert_idle()


async def test_failure_of_an_attempt_that_began_after_it_was_counted_is_not_counted() -> None:
    router = Router(max_attempts=2, max_deaths=9)
    reading, decode, _, attempt = await begun(router, num_decode=1, n=2)
    decode.ended(attempt, Reason.TIMEOUT)
    for number in (1, 2):
        again, _, _ = await go_on(decode, number)
        decode.ended(again, Reason.TIMEOUT)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await reading.task
    router.assert_idle()


async def test_client_that_leaves_leaves_samples_that_run_apart_behind() -> None:
    router = Router()
    reading, decode, other, _ = await begun(router)
    router.leave(decode)
    attempts = [(await go_on(other, number))[0] for number in range(2)]
    await other.command("reserve", 2)
    await reading.leave()
    router.assert_idle()
    assert set(attempts) <= set(other.channel.of_kind("release"))


async def test_samples_that_have_not_begun_are_computed_once_each() -> None:
    """Until the first token one transfer can carry the prompt for all, so the next attempt serves all of them, too."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit(n=3)))
    first, _ = await decode.command("reserve")
    decode.refused(first)
    second, start = await decode.command("reserve", 1)
    assert start is not None
    assert start.outputs == {0: (), 1: (), 2: ()}
    decode.reserved(second)
    await prefill.command("prefill")
    prefill.accepted(second)
    prefill.first(second, 0, 9, END, samples=(0, 1, 2))
    assert [event.sample for event in await task] == [0, 1, 2]
    router.assert_idle()


async def test_sample_gives_up_while_another_one_has_its_room() -> None:
    """After the death there is room for one sample at a time: the other waits for as long as that one runs."""
    router = Router(failover_timeout=0.1)
    reading, decode, _, _ = await begun(router, n=2)
    for fake in router.fakes:
        if fake.worker.role is Role.DECODE and fake is not decode:
            router.leave(fake)
    small = router.join(Role.DECODE, "small", max_num_seqs=1)
    router.leave(decode)
    first, sample, _ = await go_on(small, 0)
    await asyncio.sleep(0.35)
    assert not reading.task.done()
    small.token(first, 1, 7, END, sample=sample)
    second, other, _ = await go_on(small, 1)
    small.token(second, 1, 8, END, sample=other)
    await reading.task
    assert {sample, other} == {0, 1}
    router.assert_idle()


@pytest.mark.parametrize("where", ["together", "waiting", "apart"])
async def test_stopped_sample_is_run_again_or_holds_a_worker(where: str) -> None:
    """A stop string is the router's to find: the worker knows nothing of that end."""
    router = Router()
    reading, decode, other, attempt = await begun(router)
    if where == "together":
        reading.flow.stop(1)
        decode.token(attempt, 1, 7, sample=1)
    router.leave(decode)
    if where == "waiting":
        await until(lambda: len(other.channel.of_kind("reserve")) == 3)
        reading.flow.stop(1)
    again = {}
    for number in range(2 if where == "together" else 3):
        later, start = await other.command("reserve", number)
        assert start is not None
        again[next(iter(start.outputs))] = later
        other.reserved(later)
    if where == "apart":
        reading.flow.stop(1)
    if where != "together":
        assert again[1] in other.channel.of_kind("release")
    for sample in (0, 2):
        other.token(again[sample], 1, 7, END, sample=sample)
    await reading.task
    assert [reading.text(sample) for sample in range(3)] == [[100, 7], [101], [102, 7]]
    router.assert_idle()


async def test_preempted_sample_ends_its_siblings() -> None:
    """They go on where they are, and it goes on by itself; what it had is not made again."""
    router = Router(max_attempts=1)
    reading, decode, _, attempt = await begun(router)
    decode.ended(attempt, Reason.PREEMPTED, 2)
    decode.token(attempt, 1, 7, sample=0)
    decode.token(attempt, 1, 9, sample=2)  # said by a mistake: it is over here
    again, start = await asyncio.wait_for(reserved_again(router, attempt), 5)
    assert start == {2: (102,)}
    who = next(fake for fake in router.fakes if again in fake.channel.of_kind("reserve"))
    who.reserved(again)
    who.token(again, 1, 8, END, sample=2)
    for sample in (0, 1):
        decode.token(attempt, 2 - sample, 5, END, sample=sample)
    await reading.task
    assert [reading.text(sample) for sample in range(3)] == [[100, 7, 5], [101, 5], [102, 8]]
    assert attempt not in decode.channel.of_kind("release")
    router.assert_idle()


async def reserved_again(router: Router, known: str) -> tuple[str, dict[int, tuple[int, ...]]]:
    while True:
        for fake in router.fakes:
            for kind, attempt, start in fake.channel.commands:
                if kind == "reserve" and attempt != known and start is not None:
                    return attempt, dict(start.outputs)
        await asyncio.sleep(0.001)


async def test_end_of_all_samples_left_is_taken_for_that_of_some() -> None:
    """The router has stopped the other one itself: nobody would be left to go on."""
    router = Router(max_attempts=1)
    reading, decode, other, attempt = await begun(router, n=2)
    reading.flow.stop(1)
    assert decode.channel.released_samples == [(attempt, 1)]
    decode.ended(attempt, Reason.PREEMPTED, 0)
    again, start = await asyncio.wait_for(reserved_again(router, attempt), 5)
    assert start == {0: (100,)}
    who = next(fake for fake in router.fakes if again in fake.channel.of_kind("reserve"))
    who.reserved(again)
    who.token(again, 1, 8, END)
    await reading.task
    assert attempt in decode.channel.of_kind("release")
    assert other is not decode
    router.assert_idle()


async def test_sample_stopped_before_decode_has_the_blocks_runs_to_its_end() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    reading = Reading(router.submit(n=2))
    decode, prefill, attempt = await next_attempt([prefill], [decode])
    prefill.first(attempt, 0, 100, samples=(0, 1))
    await until(lambda: len(reading.events) == 2)
    reading.flow.stop(1)
    assert decode.channel.released_samples == []
    decode.token(attempt, 0, 100)
    await until(lambda: decode.channel.released_samples == [(attempt, 1)])
    decode.token(attempt, 1, 7, END)
    await reading.task
    router.assert_idle()


async def test_edge_keeps_a_stopped_sample_running_or_ends_it_for_all() -> None:
    """Each sample has its own text, stop string and `complete`; what the workers say of it afterwards is not shown."""
    said = [(0, "a"), (1, "x"), (2, "c"), (0, "b"), (1, "yz"), (2, "d")]
    events = [
        TokenEvent(sample, position // 3, ord(char), END if position // 3 == 1 and sample != 1 else None)
        for position, (sample, text) in enumerate(said)
        for char in text
    ]
    async with running(Edge()) as edge:
        edge.dispatcher.script = lambda _: events
        params = {"n": 3, "stop": ["xy"]}
        messages = [message async for message in edge.generate(sampling_params=params)]
        texts, ends = ["", "", ""], {}
        for message in messages:
            assert message.index not in ends
            if message.HasField("complete"):
                ends[message.index] = message.complete
            else:
                texts[message.index] += message.chunk.text
        assert texts == ["ab", "", "cd"]
        assert [ends[index].finish_reason for index in range(3)] == ["length", "stop", "length"]
        assert [ends[index].completion_tokens for index in range(3)] == [2, 2, 2]
        assert {end.prompt_tokens for end in ends.values()} == {2}
        assert edge.dispatcher.generations[0].stopped == [1]
        assert edge.sample("splitserve_prompt_tokens_total") == 2
        assert edge.sample("splitserve_generation_tokens_total") == 6
        assert edge.outcomes() == {"length": 1}
