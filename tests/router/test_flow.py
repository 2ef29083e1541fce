"""One request over its attempts: whatever fails on a worker, the client gets each token once and in order, or an
error."""

import asyncio
from dataclasses import replace

import pytest

from router.request import FinishReason
from router.worker import LoadReport, Role
from splitserve.service.errors import DeadlineExceeded, Internal, Overloaded, Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router, collect, ids
from tests.router.driving import hand_off, next_attempt, reserve_on_either, who_prefills, who_reserved

LENGTH = FinishReason.LENGTH


async def test_first_token_is_shown_twice_or_a_gap_is_shown() -> None:
    """C08: prefill and decode both tell the first token; early and repeated ones change nothing."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    decode.token(attempt, 1, 101)
    decode.token(attempt, 0, 100)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 1, 101)
    decode.token(attempt, 3, 103, LENGTH)
    decode.token(attempt, 2, 102)
    events = await task
    assert ids(events) == [100, 101, 102, 103]
    assert [event.position for event in events] == [0, 1, 2, 3]
    router.assert_idle()


async def test_decode_overtakes_the_acceptance_and_its_token_is_lost() -> None:
    """With everything cached the hand-off takes no time, and the two workers' words come on streams of their own."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    await prefill.command("prefill")
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101, LENGTH)
    await asyncio.sleep(0)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100)
    assert ids(await task) == [100, 101]
    assert len(prefill.channel.of_kind("prefill")) == 1
    router.assert_idle()


async def test_cached_tokens_are_told_too_late() -> None:
    """They are known with the last token, also where the prefill worker's own word on its token has not come."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    flow = router.submit(num_prompt=40)
    token = asyncio.ensure_future(anext(aiter(flow)))
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    await prefill.command("prefill")
    prefill.accepted(attempt, num_cached_tokens=32)
    decode.token(attempt, 0, 100, LENGTH)
    assert (await token).finish_reason is LENGTH
    assert flow.cached_tokens == 32
    await flow.aclose()


@pytest.mark.parametrize("has_first_token", [False, True])
async def test_cached_tokens_are_counted_twice(has_first_token: bool) -> None:
    """The number is that of the first attempt that prefill took: a later one finds what this request has left there."""
    router = Router()
    (prefill,), decodes = router.pairs(num_decode=2)
    flow = router.submit(num_prompt=40)
    task = asyncio.create_task(collect(flow))
    attempt = await reserve_on_either(decodes, 0)
    await prefill.command("prefill")
    prefill.accepted(attempt, num_cached_tokens=16)
    if has_first_token:
        prefill.first(attempt, 0, 100)
    next(d for d in decodes if attempt in d.worker.attempts).ended(attempt, Reason.PREEMPTED)
    second = await reserve_on_either(decodes, 1)
    await prefill.command("prefill", 1)
    prefill.accepted(second, num_cached_tokens=32)
    next(d for d in decodes if second in d.worker.attempts).token(second, int(has_first_token), 101, LENGTH)
    await task
    assert flow.cached_tokens == 16
    router.assert_idle()


async def test_finished_request_is_released_as_if_it_ran() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101, LENGTH)
    await task
    assert decode.channel.of_kind("release") == []
    assert prefill.channel.of_kind("release") == []


async def test_token_that_ends_the_request_cancels_its_own_hand_off() -> None:
    """C09: the end comes with prefill's token, and with it to decode; nothing has failed and nothing is released."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit(max_tokens=1)))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert decode.channel.of_kind("release") == prefill.channel.of_kind("release") == []
    router.assert_idle()


async def test_blocks_of_a_finished_request_that_will_not_come_are_waited_for() -> None:
    """Decode's word that the transfer is lost is there, and not yet read, when prefill's token ends the request."""
    router = Router(token_timeout=600.0)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit(max_tokens=1)))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    decode.transfer_lost(attempt)
    assert ids(await task) == [100]
    await decode.command("release")
    router.assert_idle()


@pytest.mark.parametrize("how", ["lost", "ended"])
async def test_failure_before_the_first_token_reaches_the_client(how: str) -> None:
    router = Router()
    prefills, decodes = router.pairs(2, 2)
    task = asyncio.create_task(collect(router.submit()))
    first_decode = await who_reserved(decodes)
    attempt, _ = await first_decode.command("reserve")
    first_decode.reserved(attempt)
    first_prefill = await who_prefills(prefills, attempt)
    first_prefill.accepted(attempt)
    victim = first_decode
    if how == "lost":
        router.leave(victim)
    else:
        victim.ended(attempt, Reason.TRANSFER_FAILED)
    decode, prefill, second = await next_attempt(prefills, decodes, attempt)
    assert second != attempt
    assert victim not in (decode, prefill), "the worker that failed the request was asked again first"
    prefill.first(second, 0, 100)
    decode.token(second, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    router.assert_idle()


async def test_failover_loses_or_doubles_tokens() -> None:
    """Decode dies in the middle: the next attempt carries prompt and outputs apart and goes on behind them."""
    router = Router()
    prefills, decodes = router.pairs(1, 2)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    decode = await who_reserved(decodes)
    attempt = await hand_off(prefills[0], decode)
    prefills[0].first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101)
    await asyncio.sleep(0.01)
    router.leave(decode)
    other, prefill, second = await next_attempt(prefills, decodes, attempt)
    start = next(start for kind, _, start in other.channel.commands if kind == "reserve")
    assert start is not None
    assert start.prompt_ids == tuple(range(10))
    assert start.outputs == {0: (100, 101)}
    decode.token(attempt, 2, 999)  # the dead worker's last words
    prefill.first(second, 2, 102)
    other.token(second, 2, 102)
    other.token(second, 3, 103, LENGTH)
    assert ids(await task) == [100, 101, 102, 103]
    assert flow.attempts == 2
    router.assert_idle()


async def test_prefill_that_refuses_costs_the_reservation() -> None:
    router = Router()
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    first = await who_prefills(prefills, attempt)
    first.refused(attempt)
    second = prefills[1 - prefills.index(first)]
    await second.command("prefill")
    second.accepted(attempt)
    second.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert len(decode.channel.of_kind("reserve")) == 1


async def test_dead_prefill_worker_ends_an_attempt_that_has_left_it() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    router.leave(prefill)
    decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    assert flow.attempts == 1


async def test_refusals_count_as_failures() -> None:
    router = Router(max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    for number, reason in enumerate([Reason.NO_ROOM, Reason.NO_ROOM, Reason.NO_ROOM]):
        attempt, _ = await decode.command("reserve", number)
        decode.refused(attempt, reason)
    attempt, _ = await decode.command("reserve", 3)
    decode.reserved(attempt)
    await prefill.command("prefill")
    prefill.accepted(attempt)
    decode.ended(attempt, Reason.PREEMPTED)
    attempt, _ = await decode.command("reserve", 4)
    decode.reserved(attempt)
    await prefill.command("prefill", 1)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


async def test_attempts_never_end() -> None:
    router = Router(max_attempts=2)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    for number in range(2):
        attempt, _ = await decode.command("reserve", number)
        decode.reserved(attempt)
        await prefill.command("prefill", number)
        prefill.accepted(attempt)
        decode.ended(attempt, Reason.TRANSFER_FAILED)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await task
    router.assert_idle()


async def test_request_kills_a_third_worker() -> None:
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    seen: set[str] = set()
    for _ in range(2):
        decode, prefill, attempt = await next_attempt(prefills, decodes, *seen)
        seen.add(attempt)
        prefill.first(attempt, 0, 100)
        decode.token(attempt, 0, 100)
        await asyncio.sleep(0.01)
        router.leave(decode)
    with pytest.raises(Internal, match="2 workers died"):
        await task


async def test_fault_of_the_request_is_tried_elsewhere() -> None:
    router = Router()
    (prefill,), (decode, _) = router.pairs(1, 2)
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.ended(attempt, Reason.INTERNAL)
    with pytest.raises(Internal):
        await task
    router.assert_idle()


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_request_that_every_worker_refuses_is_to_be_sent_again(role: Role) -> None:
    """It is not valid anywhere: one worker's word is enough, and the client is not told to retry."""
    router = Router()
    (prefill,), (decode, _) = router.pairs(1, 2)
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    if role is Role.PREFILL:
        decode.reserved(attempt)
        await prefill.command("prefill")
    (prefill if role is Role.PREFILL else decode).refused(attempt, Reason.INVALID)
    with pytest.raises(Internal, match="invalid: the test says so") as failure:
        await task
    assert failure.value.retry_after_s is None
    router.assert_idle()


async def test_invalid_hand_off_is_the_requests_own_fault() -> None:
    """What prefill sent to decode was wrong: another prefill worker may do better."""
    router = Router()
    prefills, decodes = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit()))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    decode.ended(attempt, Reason.INVALID)
    _, prefill, second = await next_attempt(prefills, decodes, attempt)
    prefill.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]


@pytest.mark.parametrize("stage", ["queued", "reserving", "prefilling", "decoding"])
async def test_client_that_leaves_keeps_a_worker_busy(stage: str) -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    if stage == "queued":
        decode.worker.load = type(decode.worker.load)(blocks_free=0)
    task = asyncio.create_task(collect(router.submit()))
    await asyncio.sleep(0)
    attempt = ""
    if stage != "queued":
        attempt, _ = await decode.command("reserve")
    if stage in ("prefilling", "decoding"):
        attempt = await hand_off(prefill, decode)
    if stage == "decoding":
        prefill.first(attempt, 0, 100)
        decode.token(attempt, 0, 100)
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert decode.channel.of_kind("release") == ([attempt] if attempt else [])
    assert prefill.channel.of_kind("release") == ([attempt] if stage == "prefilling" else [])
    router.assert_idle()


async def test_deadline_passes_unnoticed_while_waiting() -> None:
    router = Router()
    _, (decode,) = router.pairs()
    with pytest.raises(DeadlineExceeded):
        await collect(router.submit(deadline_s=0.05))
    attempt, _ = await decode.command("reserve")
    assert decode.channel.of_kind("release") == [attempt]
    router.assert_idle()


async def test_worker_that_says_nothing_is_waited_for() -> None:
    router = Router(token_timeout=0.05, max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    with pytest.raises(Unavailable, match="said nothing"):
        await task
    router.assert_idle()


async def test_interrupted_request_waits_for_ever() -> None:
    router = Router(failover_timeout=0.05)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    await hand_off(prefill, decode)
    router.leave(decode)
    with pytest.raises(Unavailable, match="no decode worker"):
        await task
    router.assert_idle()


async def test_queued_request_has_no_time_once_nobody_could_take_it() -> None:
    """Its workers leave while it waits for room, long after it came: from then on it has `failover_timeout`."""
    router = Router(failover_timeout=0.5)
    (prefill,), (decode,) = router.pairs()
    decode.worker.load = LoadReport(blocks_in_use=100)
    task = asyncio.create_task(collect(router.submit()))
    await asyncio.sleep(0.9)
    router.leave(decode)
    await asyncio.sleep(0.3)
    assert not task.done()
    again = router.join(Role.DECODE, "d1")
    attempt = await hand_off(prefill, again)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


async def test_silence_of_a_moment_is_taken_for_want_of_room() -> None:
    """Whoever waits behind a full worker that is late with its beats is not told that nobody can hold it."""
    router = Router(failover_timeout=0.1)
    (prefill,), (decode,) = router.pairs()
    decode.worker.load = LoadReport(blocks_in_use=100)
    task = asyncio.create_task(collect(router.submit()))
    heard = decode.worker.last_heard
    decode.worker.last_heard = asyncio.get_running_loop().time() - 2 * router.config.suspect_timeout
    await asyncio.sleep(0.3)
    assert not task.done()
    decode.worker.last_heard, decode.worker.load = heard, LoadReport(blocks_free=100)
    router.membership.changed()
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


async def test_nobody_to_serve_and_no_refusal() -> None:
    """C36: no pair, an immediate answer that says whether to retry."""
    router = Router()
    router.join(Role.DECODE, "d")
    with pytest.raises(Unavailable, match="no prefill worker has joined") as refusal:
        router.submit()
    assert refusal.value.retry_after_s is not None


async def test_queue_grows_without_bound() -> None:
    """C52."""
    router = Router(max_queue_requests=3, max_queue_tokens=1000)
    _, (decode,) = router.pairs()
    decode.worker.load = type(decode.worker.load)(blocks_free=0)
    flows = [router.submit() for _ in range(3)]
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        router.submit()
    for flow in flows:
        await flow.aclose()
    waiting = router.submit(num_prompt=900)
    with pytest.raises(Overloaded, match="900 prompt tokens are waiting"):
        router.submit(num_prompt=101)
    await waiting.aclose()
    router.assert_idle()


async def test_third_worker_gets_nothing_from_the_queue() -> None:
    """Two full decode workers, twenty queued requests, a third joins: the next one is its."""
    router = Router()
    _, decodes = router.pairs(1, 2)
    for decode in decodes:
        decode.worker.load = type(decode.worker.load)(blocks_free=0, blocks_in_use=100)
    tasks = [asyncio.create_task(collect(router.submit())) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert len(router.dispatcher.queue) == 20
    third = router.join(Role.DECODE, "d2")
    await third.command("reserve")
    assert len(router.dispatcher.queue) < 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    router.assert_idle()


async def test_later_request_passes_an_interrupted_one() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    victim = asyncio.create_task(collect(router.submit(num_prompt=11)))
    await hand_off(prefill, decode)
    decode.worker.load = type(decode.worker.load)(blocks_free=0, blocks_in_use=100)
    later = [asyncio.create_task(collect(router.submit(num_prompt=12))) for _ in range(3)]
    await asyncio.sleep(0.01)
    decode.ended(decode.channel.of_kind("reserve")[0], Reason.PREEMPTED)
    await asyncio.sleep(0.1)
    decode.worker.load = type(decode.worker.load)(blocks_free=100)
    router.membership.changed()
    _, start = await decode.command("reserve", 1)
    assert start is not None
    assert len(start.prompt_ids) == 11
    for task in (victim, *later):
        task.cancel()
    await asyncio.gather(victim, *later, return_exceptions=True)
    router.assert_idle()


async def test_silent_worker_is_kept() -> None:
    """A worker without a sign of life gets no new work, then is dead; its attempts go on elsewhere."""
    router = Router(heartbeat_timeout=0.3, suspect_timeout=0.1)
    (prefill,), decodes = router.pairs(1, 2)
    task = asyncio.create_task(collect(router.submit()))
    decode = await who_reserved(decodes)
    attempt = await hand_off(prefill, decode)
    decode.worker.last_heard = asyncio.get_running_loop().time()
    watch = asyncio.create_task(router.membership.watch())
    other, _, second = await next_attempt([prefill], decodes, attempt)
    assert other is not decode
    assert decode.worker.is_lost
    prefill.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    watch.cancel()


async def test_worker_that_joins_again_keeps_its_old_attempts() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    again = router.join(Role.DECODE, "d0")
    assert decode.worker.is_lost
    second, _ = await again.command("reserve")
    assert second != attempt
    again.reserved(second)
    await prefill.command("prefill", 1)
    prefill.accepted(second)
    prefill.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


@pytest.mark.parametrize("is_retry", [False, True])
async def test_request_that_fits_nobody_blocks_everyone(is_retry: bool) -> None:
    """C44: it outgrew the pools, or the worker that could hold it has left; others pass it, and it fails."""
    router = Router(failover_timeout=0.2)
    prefill = router.join(Role.PREFILL, "p0")
    decode = router.join(Role.DECODE, "d0")
    if is_retry:
        task = asyncio.create_task(collect(router.submit(num_prompt=320)))
        await hand_off(prefill, decode)
    else:
        decode.worker.load = type(decode.worker.load)(blocks_free=0, blocks_in_use=100)
        task = asyncio.create_task(collect(router.submit(num_prompt=320)))
        await asyncio.sleep(0.01)
    router.leave(decode)
    small = router.join(Role.DECODE, "d1", num_blocks=10)
    other = asyncio.create_task(collect(router.submit(num_prompt=10)))
    attempt, start = await small.command("reserve")
    assert start is not None
    assert len(start.prompt_ids) == 10
    small.reserved(attempt)
    await who_prefills([prefill], attempt)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await other) == [100]
    with pytest.raises(Unavailable, match="can hold 320 tokens"):
        await task
    router.assert_idle()


@pytest.mark.parametrize("reason", [Reason.NO_ROOM, Reason.PREEMPTED])
async def test_full_cluster_fails_what_it_had_to_put_back(reason: Reason) -> None:
    """Refused or preempted is not failed: it waits as long as its deadline allows, not as long as a failover may."""
    router = Router(failover_timeout=0.1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.worker.load = type(decode.worker.load)(blocks_free=0, blocks_in_use=100)
    if reason is Reason.NO_ROOM:
        decode.refused(attempt)
    else:
        decode.reserved(attempt)
        await prefill.command("prefill")
        prefill.accepted(attempt)
        decode.ended(attempt, reason)
    await asyncio.sleep(0.4)
    assert not task.done()
    decode.worker.load = type(decode.worker.load)(blocks_free=100)
    router.membership.changed()
    attempt, _ = await decode.command("reserve", 1)
    decode.reserved(attempt)
    await who_prefills([prefill], attempt)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


async def test_slow_step_costs_an_attempt() -> None:
    """A worker answers between two steps, and a step may legally take longer than a reservation is kept."""
    router = Router(reserve_timeout=0.05, max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    await asyncio.sleep(0.15)
    decode.reserved(attempt)
    await prefill.command("prefill")
    await asyncio.sleep(0.15)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


def _report_steps(worker: FakeWorker, engine_steps: int, step_age_s: float) -> None:
    worker.worker.load = replace(worker.worker.load, engine_steps=engine_steps, step_age_s=step_age_s)


@pytest.mark.parametrize("stage", ["reserving", "prefilling", "decoding"])
async def test_step_longer_than_any_answer_is_waited_for_costs_an_attempt(stage: str) -> None:
    """As long as it gets further membership keeps the worker, which answers when the step has ended."""
    router = Router(
        stall_timeout=0.02, heartbeat_timeout=0.01, token_timeout=0.03, suspect_timeout=0.02, max_attempts=1
    )
    (prefill,), (decode,) = router.pairs()
    for worker in (prefill, decode):
        _report_steps(worker, 1000, 0.01)
    task = asyncio.create_task(collect(router.submit()))

    async def long_step(stage_of_it: str) -> None:
        if stage == stage_of_it:
            await asyncio.sleep(0.2)
            # The report that it has ended, and that the next one has begun, may come just before the answer.
            _report_steps(prefill, 1001, 0.0)
            _report_steps(decode, 1001, 0.0)

    attempt, _ = await decode.command("reserve")
    await long_step("reserving")
    decode.reserved(attempt)
    await prefill.command("prefill")
    await long_step("prefilling")
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100)
    await long_step("decoding")
    decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    assert decode.channel.of_kind("reserve") == [attempt]


@pytest.mark.parametrize("stage", ["reserving", "prefilling", "decoding"])
@pytest.mark.parametrize("is_idle", [False, True])
async def test_worker_that_computes_for_others_is_waited_for_for_ever(stage: str, is_idle: bool) -> None:
    """It finishes step after step, or has nothing to do, and has forgotten this attempt."""
    router = Router(
        stall_timeout=0.02, heartbeat_timeout=0.01, token_timeout=0.03, suspect_timeout=0.02, max_attempts=1
    )
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    if stage != "reserving":
        decode.reserved(attempt)
        await prefill.command("prefill")
    if stage == "decoding":
        prefill.accepted(attempt)
        prefill.first(attempt, 0, 100)
    steps = 0
    async with asyncio.timeout(5):
        while not task.done():
            steps += 0 if is_idle else 1
            for worker in (prefill, decode):
                _report_steps(worker, steps, 0.0 if is_idle else 0.01)
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="said nothing"):
        await task
    router.assert_idle()


async def test_lost_link_is_blamed_on_the_survivor() -> None:
    """A prefill worker dies: decode notices first. The dead one is avoided and counted, not the messenger."""
    router = Router(suspect_timeout=0.5, heartbeat_timeout=0.1)
    prefills, (decode,) = router.pairs(3, 1)
    task = asyncio.create_task(collect(router.submit()))
    seen: set[str] = set()
    for _ in range(2):
        attempt = await _reserved_on(decode, seen)
        prefill = await who_prefills(prefills, attempt)
        prefill.accepted(attempt)
        decode.ended(attempt, Reason.TRANSFER_FAILED)
        await asyncio.sleep(0.05)
        router.leave(prefill)
    with pytest.raises(Internal, match="2 workers died"):
        await task


async def _reserved_on(decode: FakeWorker, seen: set[str]) -> str:
    await who_reserved([decode], *seen)
    (attempt,) = set(decode.channel.of_kind("reserve")) - seen
    seen.add(attempt)
    decode.reserved(attempt)
    return attempt
