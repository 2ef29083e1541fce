"""Who passes whom in the queue: small ones a head that does not fit, and nobody for too long."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.request import FinishReason
from router.worker import LoadReport, Role
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router, collect, ids
from tests.router.test_membership_unit import settle

B = 16
HEAD, SMALL = 8 * B, B  # 9 and 2 blocks with the first decoded token's


def reserved(decode: FakeWorker) -> list[int]:
    """The prompts that decode was asked to take, by their lengths."""
    return [len(start.prompt_ids) for kind, _, start in decode.channel.commands if kind == "reserve" and start]


def report(router: Router, worker: FakeWorker, *, free: int) -> None:
    """The worker's word on its blocks, with every promise answered."""
    for attempt in list(worker.worker.promises):
        worker.worker.promises.pop(attempt)
    worker.worker.load = LoadReport(blocks_free=free, blocks_in_use=worker.worker.identity.num_blocks - free)
    router.membership.changed()


async def submit(router: Router, *lengths: int) -> list["asyncio.Task[object]"]:
    tasks: list[asyncio.Task[object]] = []
    for length in lengths:
        tasks.append(asyncio.create_task(collect(router.submit(num_prompt=length))))
        await settle()
    return tasks


async def cancel(router: Router, tasks: Sequence["asyncio.Task[object]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    router.assert_idle()


async def test_head_that_does_not_fit_stops_those_behind_it() -> None:
    """They pass it one after the other, in order among themselves; it goes as soon as it fits."""
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    report(router, decode, free=5)
    tasks = await submit(router, HEAD, SMALL, HEAD + 1, SMALL + 1, SMALL + 2)
    assert reserved(decode) == [SMALL, SMALL + 1]
    report(router, decode, free=9)
    await settle()
    assert len(router.dispatcher.queue) == 2
    assert reserved(decode)[2:] == [HEAD]
    await cancel(router, tasks)


async def test_small_ones_pass_the_head_for_ever() -> None:
    """C47: once it was passed for long enough room is kept for it; small ones go elsewhere, or after it."""
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    report(router, decode, free=5)
    tasks = await submit(router, HEAD, SMALL)
    assert reserved(decode) == [SMALL]
    (head,) = router.dispatcher.queue.in_order()
    assert head.blocked_since is not None
    head.blocked_since -= 3600.0
    report(router, decode, free=8)
    tasks += await submit(router, SMALL, SMALL, SMALL)
    assert reserved(decode) == [SMALL]
    other = router.join(Role.DECODE, "d1", num_blocks=4)
    await settle()
    assert (reserved(other), reserved(decode)) == ([SMALL, SMALL], [SMALL])
    report(router, decode, free=11)
    await settle()
    assert reserved(decode) == [SMALL, HEAD, SMALL]
    await cancel(router, tasks)


async def test_timeout_of_the_first_head_counts_for_the_second() -> None:
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    report(router, decode, free=5)
    tasks = await submit(router, HEAD, HEAD - B)
    first, second = router.dispatcher.queue.in_order()
    assert second.blocked_since is None
    first.blocked_since = -3600.0
    router.dispatcher.kick()
    await settle()
    assert (first.blocked_since, second.blocked_since) == (-3600.0, None)
    report(router, decode, free=10)
    await settle()
    report(router, decode, free=5)
    assert second.blocked_since is not None
    tasks += await submit(router, SMALL)
    assert reserved(decode) == [HEAD, SMALL]
    await cancel(router, tasks)


async def test_request_that_fits_nobody_is_taken_for_the_head() -> None:
    """C44: those that could hold it say nothing. No room is kept for it, but for the one behind it that only waits."""
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    report(router, decode, free=5)
    large = [router.join(role, f"large {role}", num_blocks=400, max_model_len=8192) for role in Role]
    for worker in large:
        worker.worker.last_heard = asyncio.get_running_loop().time() - 2.0
    tasks = await submit(router, 5000, HEAD)
    impossible, head = router.dispatcher.queue.in_order()
    assert impossible.blocked_since is None
    assert head.blocked_since is not None
    await cancel(router, tasks)


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.TIMEOUT])
async def test_new_work_takes_the_room_that_an_interrupted_request_waits_for(reason: Reason) -> None:
    """It is not passed at all; one that was preempted waits for more, so that it is not preempted again at once."""
    router = Router(passing_timeout=3600.0)
    (prefill,), (decode,) = router.pairs()
    victim = await submit(router, HEAD)
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    await prefill.command("prefill")
    prefill.accepted(attempt)
    report(router, decode, free=5)
    decode.worker.load = replace(decode.worker.load, num_running=3)
    decode.ended(attempt, reason)
    await asyncio.sleep(0.1)
    later = await submit(router, SMALL, SMALL)
    assert reserved(decode) == [HEAD]
    decode.worker.load = replace(decode.worker.load, blocks_free=11)
    router.membership.changed()
    await settle()
    assert reserved(decode) == ([HEAD] if reason is Reason.PREEMPTED else [HEAD, HEAD, SMALL])
    decode.worker.load = replace(decode.worker.load, blocks_free=12)
    router.membership.changed()
    await settle()
    assert reserved(decode)[:2] == [HEAD, HEAD]
    await cancel(router, [*victim, *later])


async def run_attempt(prefill: FakeWorker, decode: FakeWorker, number: int = 0) -> str:
    """Drives the `number`-th attempt up to its first decoded token."""
    attempt, start = await decode.command("reserve", number)
    assert start is not None
    decode.reserved(attempt)
    await prefill.command("prefill", number)
    prefill.accepted(attempt)
    position = len(start.outputs[0])
    prefill.first(attempt, position, 7)
    decode.token(attempt, position, 7)
    await settle()
    return attempt


async def test_new_work_takes_the_room_that_a_preempted_request_has_just_left() -> None:
    """C47: its blocks come free with the next report of load, and by then it is in its place again."""
    router = Router(passing_timeout=3600.0)
    (prefill,), (decode,) = router.pairs()
    victim = await submit(router, 30 * B)
    attempt = await run_attempt(prefill, decode)
    report(router, decode, free=0)
    later = await submit(router, 28 * B)
    decode.ended(attempt, Reason.PREEMPTED)
    report(router, decode, free=30)
    await settle()
    assert reserved(decode) == [30 * B]
    report(router, decode, free=31)
    await settle()
    assert reserved(decode) == [30 * B, 30 * B]
    await cancel(router, [*victim, *later])


@pytest.mark.parametrize("urgent", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("lengths", [(4 * B, 3 * B), (3 * B, 4 * B)], ids=str)
async def test_priorities_make_two_requests_wait_for_each_other(lengths: tuple[int, int], urgent: int) -> None:
    """C43: seven blocks for 4 + 1 and 3 + 1. Who runs is preempted, and gets its blocks again before the other, however
    urgent that is; then the other gets its own: both finish."""
    router = Router(passing_timeout=3600.0)
    prefill, decode = router.join(Role.PREFILL, "p0"), router.join(Role.DECODE, "d0", num_blocks=7)
    tasks = []
    for index, length in enumerate(lengths):
        flow = router.submit(length, priority=9 if index == urgent else 0)
        tasks.append(asyncio.create_task(collect(flow)))
        await settle()
    attempt = await run_attempt(prefill, decode)
    report(router, decode, free=1)
    await settle()
    decode.ended(attempt, Reason.PREEMPTED)
    report(router, decode, free=7)
    for number in (1, 2):
        await settle()
        assert len(reserved(decode)) == number + 1, "both hold blocks, or nobody does"
        attempt, start = await decode.command("reserve", number)
        assert start is not None
        position = len(start.outputs[0])
        decode.reserved(attempt)
        await prefill.command("prefill", number)
        prefill.accepted(attempt)
        prefill.first(attempt, position, 8, FinishReason.LENGTH)
        decode.token(attempt, position, 8, FinishReason.LENGTH)
        await settle()
        report(router, decode, free=7)
    assert reserved(decode) == [lengths[0], *lengths]
    assert [ids(await task) for task in tasks] == [[7, 8], [8]]
    router.assert_idle()


@pytest.mark.parametrize("free", [2, 9])
async def test_new_work_takes_the_place_of_a_request_that_was_refused(free: int) -> None:
    """Whoever was refused is not asked to take it again at once; whatever room there seems to be is kept for it."""
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    tasks = await submit(router, HEAD)
    attempt, _ = await decode.command("reserve")
    # The report that precedes a refusal shows the promised blocks as well as those that somebody else has taken.
    decode.worker.load = LoadReport(blocks_free=free, blocks_in_use=100 - free)
    decode.refused(attempt)
    router.membership.changed()
    tasks += await submit(router, SMALL)
    assert reserved(decode) == [HEAD]
    assert len(router.dispatcher.queue) == 2
    report(router, decode, free=9)
    await decode.command("reserve", 1)
    await settle()
    assert reserved(decode) == [HEAD, HEAD]
    await cancel(router, tasks)


async def test_pause_after_a_refusal_stops_those_that_find_room_beside_it() -> None:
    router = Router(passing_timeout=3600.0)
    _, (decode,) = router.pairs()
    tasks = await submit(router, HEAD)
    attempt, _ = await decode.command("reserve")
    decode.refused(attempt)
    tasks += await submit(router, SMALL, SMALL)
    assert reserved(decode) == [HEAD, SMALL, SMALL]
    await cancel(router, tasks)


async def test_refusal_after_a_preemption_costs_the_block_to_grow_into() -> None:
    """It still waits for one block more for each sequence that is there, or it would be preempted again at once."""
    router = Router(passing_timeout=3600.0)
    (prefill,), (decode,) = router.pairs()
    victim = await submit(router, HEAD)
    attempt = await run_attempt(prefill, decode)
    decode.ended(attempt, Reason.PREEMPTED)
    second, _ = await decode.command("reserve", 1)
    decode.refused(second)
    for free, num_reserved in ((11, 2), (12, 3)):
        report(router, decode, free=free)
        decode.worker.load = replace(decode.worker.load, num_running=3)
        await asyncio.sleep(0.1)
        router.membership.changed()
        await settle()
        assert len(reserved(decode)) == num_reserved
    await cancel(router, victim)


async def test_refused_hand_over_takes_the_prefill_room_that_is_kept_for_the_head() -> None:
    router = Router(passing_timeout=0.0, reserve_timeout=0.05)
    prefills, decodes = [router.join(Role.PREFILL, "p0", num_blocks=8)], [router.join(Role.DECODE, "d0")]
    tasks = await submit(router, SMALL)
    attempt, _ = await decodes[0].command("reserve")
    decodes[0].reserved(attempt)
    await prefills[0].command("prefill")
    big = router.join(Role.PREFILL, "p1", num_blocks=9)
    report(router, big, free=8)
    tasks += await submit(router, 9 * B)
    assert len(router.dispatcher.queue) == 1
    prefills[0].refused(attempt)
    await decodes[0].command("release")
    assert big.channel.of_kind("prefill") == []
    assert decodes[0].channel.of_kind("release") == [attempt]
    await cancel(router, tasks)


async def test_giant_prompt_keeps_short_ones_in_the_queue() -> None:
    """C47: prefill computes 600 tokens, more than may wait there; short ones are handed over, a second giant is not."""
    router = Router(passing_timeout=3600.0)
    (prefill,), (decode,) = router.pairs()
    tasks = await submit(router, 600, 500, 20, 20, 20, 20, 20, 20)
    # Two steps of 64 tokens: 32 for the giant, and 96 for short ones.
    assert reserved(decode) == [600, 20, 20, 20, 20]
    prefill.worker.promises.clear()
    prefill.worker.load = LoadReport(blocks_free=60, waiting_tokens=31, tokens_ahead=31)
    router.membership.changed()
    await settle()
    assert reserved(decode)[5:] == [500, 20, 20]
    await cancel(router, tasks)
