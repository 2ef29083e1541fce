"""Who may get work: room that is promised twice, and workers that are silent, suspect or stuck."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from router.worker import LoadReport, Role
from splitserve.service.errors import InvalidRequest
from tests.router.cluster_fakes import FakeWorker, Router, collect


@contextlib.asynccontextmanager
async def running(router: Router, *num_prompts: int) -> AsyncIterator[list["asyncio.Task[object]"]]:
    """Requests of these lengths in this order, each given the time to be placed; all end with the body."""
    tasks: list[asyncio.Task[object]] = []
    try:
        for num_prompt in num_prompts:
            tasks.append(asyncio.create_task(collect(router.submit(num_prompt=num_prompt))))
            await settle()
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    router.assert_idle()


async def settle() -> None:
    """Lets every task that can move do so; nothing here waits for anything but tasks."""
    for _ in range(10):
        await asyncio.sleep(0)


def reserved_on(decode: FakeWorker) -> int:
    return len(decode.channel.of_kind("reserve"))


# Promised room


@pytest.mark.parametrize(
    ("prefill", "decode", "num_prompt"),
    [
        ({}, {"num_blocks": 3}, 20),  # 2 blocks each
        ({}, {"max_num_seqs": 1}, 20),
        ({"num_blocks": 3}, {}, 20),
        ({"max_num_batched_tokens": 16}, {}, 20),  # 32 tokens may wait
    ],
    ids=["decode-blocks", "decode-seqs", "prefill-blocks", "prefill-tokens"],
)
async def test_room_is_given_to_two_requests(prefill: dict[str, int], decode: dict[str, int], num_prompt: int) -> None:
    """No report in between: the second placement sees what the first one took."""
    router = Router()
    router.join(Role.PREFILL, "p", **prefill)
    worker = router.join(Role.DECODE, "d", **decode)
    async with running(router, num_prompt, num_prompt) as (first, _):
        assert reserved_on(worker) == 1
        assert len(router.dispatcher.queue) == 1
        first.cancel()
        await settle()
        assert reserved_on(worker) == 2
        assert len(router.dispatcher.queue) == 0


async def test_idle_worker_is_passed_over_for_the_promised_one() -> None:
    """Loads as reported are equal all the time, and turns would bring the third request to the first worker again."""
    router = Router()
    router.join(Role.PREFILL, "p", max_num_batched_tokens=1000)
    first, second = (router.join(Role.DECODE, f"d{index}") for index in range(2))
    async with running(router, 500, 20, 20):
        assert (reserved_on(first), reserved_on(second)) == (1, 2)


async def test_promise_is_kept_after_the_worker_has_answered() -> None:
    """From the answer on the worker's own report shows the room: it must not count twice."""
    router = Router()
    router.join(Role.PREFILL, "p")
    worker = router.join(Role.DECODE, "d", num_blocks=4)
    async with running(router, 20, 20, 20):
        assert reserved_on(worker) == 2
        attempt, _ = await worker.command("reserve")
        worker.worker.load = LoadReport(blocks_free=2, blocks_reserved=2, num_waiting=1)
        worker.reserved(attempt)
        assert worker.worker.decode_view().available_blocks == 0
        second, _ = await worker.command("reserve", 1)
        worker.refused(second)
        await settle()
        assert worker.worker.decode_view().available_blocks == 2


async def test_views_leave_out_a_promise() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    prefill.worker.load = LoadReport(
        blocks_free=50, blocks_cached=10, blocks_in_use=40, waiting_tokens=57, tokens_ahead=7
    )
    decode.worker.load = LoadReport(blocks_free=50, blocks_cached=10, blocks_in_use=40, num_running=2, num_waiting=1)
    async with running(router, 20, 40):
        sources, sinks = prefill.worker.prefill_view(), decode.worker.decode_view()
        assert (sources.available_blocks, sources.waiting_tokens) == (60 - 2 - 3, 57 + 20 + 40)
        assert sources.tokens_ahead == 7 + 20 + 32
        assert (sinks.available_blocks, sinks.num_seqs, sinks.max_num_seqs) == (60 - 2 - 3, 3 + 2, 8)
    sources, sinks = prefill.worker.prefill_view(), decode.worker.decode_view()
    assert (sources.available_blocks, sources.waiting_tokens, sources.tokens_ahead) == (60, 57, 7)
    assert (sinks.available_blocks, sinks.num_seqs) == (60, 3)


async def test_blocks_that_can_be_evicted_are_shown_as_used() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    prefill.worker.load = LoadReport(blocks_cached=100)
    decode.worker.load = LoadReport(blocks_free=10, blocks_cached=40, blocks_in_use=30, blocks_reserved=20)
    assert router.membership.kv_cache_usage() == 0.25


# Silence and stalls


@contextlib.asynccontextmanager
async def watched(router: Router) -> AsyncIterator[None]:
    """The body runs after at least one sweep."""
    watch = asyncio.create_task(router.membership.watch())
    await settle()
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def be_silent(fake: FakeWorker, seconds: float) -> None:
    fake.worker.last_heard = asyncio.get_running_loop().time() - seconds


@pytest.mark.parametrize("role", list(Role))
async def test_stalled_worker_is_kept(role: Role) -> None:
    """It shows signs of life and its step does not end: dead above the limit, and not before."""
    router = Router(stall_timeout=10.0)
    prefills, decodes = router.pairs(2, 2)
    stalled, slow = prefills if role is Role.PREFILL else decodes
    stalled.worker.load = replace(stalled.worker.load, step_age_s=10.5)
    slow.worker.load = replace(slow.worker.load, step_age_s=9.5)
    async with watched(router):
        assert stalled.worker.is_lost
        assert stalled.worker not in list(router.membership)
        assert stalled.channel.of_kind("close")
        assert not slow.worker.is_lost
        assert len(list(router.membership)) == 3


async def test_attempt_on_a_stalled_worker_is_not_told() -> None:
    router = Router(stall_timeout=10.0)
    _, (decode, other) = router.pairs(1, 2)
    async with running(router, 20):
        stalled, fresh = (decode, other) if reserved_on(decode) else (other, decode)
        assert reserved_on(fresh) == 0
        stalled.worker.load = replace(stalled.worker.load, step_age_s=11.0)
        async with watched(router):
            attempt, _ = await fresh.command("reserve")
            assert attempt not in stalled.channel.of_kind("reserve")


async def test_silent_worker_is_kept_or_a_quiet_one_removed() -> None:
    router = Router(suspect_timeout=100.0, heartbeat_timeout=1000.0)
    _, (silent, quiet) = router.pairs(1, 2)
    be_silent(silent, 1001.0)
    be_silent(quiet, 900.0)
    async with watched(router):
        assert silent.worker.is_lost
        assert not quiet.worker.is_lost


@pytest.mark.parametrize("role", list(Role))
async def test_suspect_worker_gets_new_work(role: Role) -> None:
    """Silent for longer than a missed heartbeat, not yet dead: alone it gets nothing, beside others neither."""
    router = Router(suspect_timeout=100.0, heartbeat_timeout=1000.0)
    (prefill,), (decode,) = router.pairs()
    be_silent(prefill if role is Role.PREFILL else decode, 200.0)
    async with running(router, 20, 20):
        assert reserved_on(decode) == 0
        assert len(router.dispatcher.queue) == 2
        router.join(role, "fresh")
        await settle()
        assert len(router.dispatcher.queue) == 0
        assert [worker.worker_id for worker in router.membership.candidates(role)] == ["fresh"]
        if role is Role.DECODE:
            assert reserved_on(decode) == 0


async def test_worker_stays_suspect_after_it_was_heard_again() -> None:
    router = Router(suspect_timeout=100.0, heartbeat_timeout=1000.0)
    _, (decode,) = router.pairs()
    be_silent(decode, 200.0)
    async with running(router, 20):
        assert reserved_on(decode) == 0
        be_silent(decode, 0.0)
        router.membership.changed()
        await settle()
        assert reserved_on(decode) == 1


async def test_refusing_prefill_worker_hands_over_to_a_suspect_one() -> None:
    router = Router(suspect_timeout=100.0, heartbeat_timeout=1000.0)
    (first, second), (decode,) = router.pairs(2, 1)
    be_silent(second, 200.0)
    async with running(router, 20):
        attempt, _ = await decode.command("reserve")
        decode.reserved(attempt)
        await first.command("prefill")
        first.refused(attempt)
        await settle()
        assert second.channel.of_kind("prefill") == []


# Comings and goings


async def test_link_to_a_worker_that_left_counts() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    assert router.membership.is_ready
    router.leave(decode)
    assert not router.membership.is_ready
    assert prefill.worker.links == {}
    router.leave(decode)
    assert [worker.worker_id for worker in router.membership] == ["p0"]


async def test_end_of_an_old_session_takes_the_new_one() -> None:
    router = Router()
    _, (decode,) = router.pairs()
    again = router.join(Role.DECODE, "d0")
    router.leave(decode, "its stream ended")
    assert router.membership.get("d0") is again.worker
    assert not again.worker.is_lost


async def test_worker_of_another_model_or_revision_joins() -> None:
    router = Router()
    identity = router.join(Role.DECODE, "d").worker.identity
    router.membership.check(identity)
    for change in ({"model": "other"}, {"revision": "r2"}):
        ((field, value),) = change.items()
        with pytest.raises(InvalidRequest, match=f"{field}.*{value}"):
            router.membership.check(replace(identity, **change))  # type: ignore[arg-type]
