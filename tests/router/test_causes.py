"""What an attempt is lost to: the word that explains it decides who is avoided, what counts, and whether to go on."""

import asyncio

import pytest

from router.events import Accepted
from router.inbox import Inbox
from router.membership import End
from router.request import FinishReason, PromptLogprobs, TokenEvent, TokenLogprobs
from router.worker import LoadReport, Role
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import Router, collect, collect_all, ids
from tests.router.driving import hand_off, lose_two, next_attempt, who_prefills, who_reserved

LENGTH = FinishReason.LENGTH


@pytest.mark.parametrize("decode_is_first", [False, True])
async def test_revocation_counts_as_a_failure(decode_is_first: bool) -> None:
    """Decode takes the blocks back, and prefill, to which they no longer go, says that the transfer has failed."""
    router = Router(max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    if decode_is_first:
        decode.ended(attempt, Reason.PREEMPTED)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    if not decode_is_first:
        await asyncio.sleep(0.01)
        decode.ended(attempt, Reason.PREEMPTED)
    second = await hand_off(prefill, decode, 1)
    prefill.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


@pytest.mark.parametrize("culprit", ["prefill", "decode"])
@pytest.mark.parametrize("culprit_is_first", [False, True])
async def test_fault_of_the_request_is_hidden_by_the_other_sides_word(culprit: str, culprit_is_first: bool) -> None:
    router = Router(max_attempts=5)
    prefills, decodes = router.pairs(2, 2)
    task = asyncio.create_task(collect(router.submit()))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    guilty, echo = (prefill, decode) if culprit == "prefill" else (decode, prefill)
    if culprit_is_first:
        guilty.ended(attempt, Reason.INTERNAL)
    echo.ended(attempt, Reason.TRANSFER_FAILED)
    if not culprit_is_first:
        await asyncio.sleep(0.01)
        guilty.ended(attempt, Reason.INTERNAL)
    with pytest.raises(Internal, match="internal: the test says so"):
        await task
    router.assert_idle()


async def test_both_sides_of_a_broken_link_count_as_two_failures() -> None:
    router = Router(max_attempts=2)
    prefills, decodes = router.pairs(2, 2)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    decode.transfer_lost(attempt)
    await decode.command("renew")
    decode.reserved(attempt, 2)
    other = prefills[1 - prefills.index(prefill)]
    await other.command("prefill")
    other.accepted(attempt)
    other.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert flow.attempts == 1


async def test_lost_acknowledgement_ends_a_sequence_that_runs() -> None:
    """Prefill says that the transfer has failed; decode's first word, on its own stream, is a moment behind."""
    router = Router(max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(prefill, decode)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await asyncio.sleep(0.01)
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    assert flow.attempts == 1
    assert decode.channel.of_kind("release") == []
    router.assert_idle()


@pytest.mark.parametrize("death_is_first", [False, True])
async def test_death_of_prefill_is_blamed_on_decode(death_is_first: bool) -> None:
    """It dies after its first token and before its last block: decode, which lives, says that the transfer failed."""
    router = Router(max_attempts=2)
    prefills, decodes = router.pairs(2, 2)
    task = asyncio.create_task(collect(router.submit()))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    prefill.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    if death_is_first:
        router.leave(prefill)
    decode.transfer_lost(attempt)
    if not death_is_first:
        await asyncio.sleep(0.01)
        router.leave(prefill)
    await decode.command("renew")
    # The router prefers workers that the request has not failed on: decode is one of them, and the emptier one.
    decodes[1 - decodes.index(decode)].worker.load = LoadReport(blocks_free=50, blocks_in_use=50)
    decode.ended(attempt, Reason.PREEMPTED)
    again, _, second = await next_attempt(prefills, decodes, attempt)
    assert again is decode
    again.token(second, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]


async def test_decode_that_runs_loses_its_attempt_with_prefill() -> None:
    """Its tokens have come before the prefill worker's own answer, and that never comes."""
    router = Router(max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    await prefill.command("prefill")
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101)
    await asyncio.sleep(0.01)
    router.leave(prefill)
    decode.token(attempt, 2, 102, LENGTH)
    assert ids(await task) == [100, 101, 102]


async def test_prefill_that_was_given_nothing_yet_costs_the_attempt() -> None:
    router = Router(max_attempts=1)
    prefills, (decode,) = router.pairs(2, 1)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt, _ = await decode.command("reserve")
    victim = next(prefill for prefill in prefills if prefill.worker.attempts)
    router.leave(victim)
    decode.reserved(attempt)
    other = prefills[1 - prefills.index(victim)]
    await other.command("prefill")
    other.accepted(attempt)
    other.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert flow.attempts == 1
    assert victim.channel.of_kind("prefill") == []
    router.assert_idle()


# Deaths


async def test_two_cut_streams_end_a_request() -> None:
    """Both are back under their own ids, the second one a moment after its verdict was due."""
    router = Router(max_attempts=10, heartbeat_timeout=5.0)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    lost = await lose_two(router, prefills, decodes, "decoding")
    await asyncio.sleep(0.02)
    assert not task.done()
    router.join(Role.DECODE, lost[0].worker.worker_id)
    last = next(decode for decode in decodes if decode not in lost)
    _, prefill, attempt = await next_attempt(prefills, [last])
    prefill.first(attempt, 2, 102, LENGTH)
    assert ids(await task) == [100, 101, 102]
    router.assert_idle()


async def test_worker_that_is_back_counts_as_dead() -> None:
    """A rolling restart of connections: each decode worker loses its session once, and none has died."""
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, decodes = router.pairs(1, 2)
    task = asyncio.create_task(collect(router.submit()))
    seen: list[str] = []
    for position in range(4):
        decode, prefill, attempt = await next_attempt(prefills, decodes, *seen)
        seen.append(attempt)
        prefill.first(attempt, position, 100 + position)
        decode.token(attempt, position, 100 + position)
        await asyncio.sleep(0.01)
        router.leave(decode, "its stream ended")
        decodes = [d for d in decodes if d is not decode] + [router.join(Role.DECODE, decode.worker.worker_id)]
    _, prefill, attempt = await next_attempt(prefills, decodes, *seen)
    prefill.first(attempt, 4, 104, LENGTH)
    assert ids(await task) == [100, 101, 102, 103, 104]
    router.assert_idle()


@pytest.mark.parametrize(("max_deaths", "survives"), [(2, False), (3, True)])
async def test_limit_of_deaths_is_not_the_flags(max_deaths: int, survives: bool) -> None:
    router = Router(max_attempts=10, heartbeat_timeout=0.05, max_deaths=max_deaths)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    lost = await lose_two(router, prefills, decodes, "decoding")
    if survives:
        last = next(decode for decode in decodes if decode not in lost)
        _, prefill, attempt = await next_attempt(prefills, [last])
        prefill.first(attempt, 2, 102, LENGTH)
        assert ids(await task) == [100, 101, 102]
    else:
        with pytest.raises(Internal, match="2 workers died"):
            await task
    router.assert_idle()


@pytest.mark.parametrize("end", End)
async def test_network_that_breaks_is_taken_for_the_requests_fault(end: End) -> None:
    """Workers that were seen to end have died; of silent ones nobody knows, and the client may try again."""
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    await lose_two(router, prefills, decodes, "decoding", end)
    with pytest.raises(Internal if end is End.SEEN else Unavailable, match="2 workers died") as failure:
        await task
    assert (failure.value.retry_after_s is None) == (end is End.SEEN)


async def test_request_that_kills_decode_as_it_joins_is_given_a_third() -> None:
    """It dies with the first step, before it has said anything."""
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    await lose_two(router, prefills, decodes, "arriving")
    with pytest.raises(Internal, match="2 workers died"):
        await task


async def test_worker_that_dies_without_having_begun_counts() -> None:
    """Two decode workers die while the prompt is still computed elsewhere: nothing of the request was on them."""
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    lost = await lose_two(router, prefills, decodes, "prefilling")
    _, prefill, attempt = await next_attempt(prefills, [decode for decode in decodes if decode not in lost])
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


# What is waited for


async def test_last_moments_word_is_too_late() -> None:
    """It comes in the turn of the event loop in which the time is up."""
    inbox, event = Inbox(), Accepted(0)
    waiting = asyncio.create_task(inbox.next(0.0))
    await asyncio.sleep(0)  # it waits, and its time is up in the next turn
    await asyncio.sleep(0)
    inbox.put(None, event)
    assert await waiting is event
    assert await inbox.next(0.0) is None


async def test_slow_link_that_moves_is_given_up() -> None:
    """The blocks take longer than any gap between two tokens, and they arrive."""
    router = Router(token_timeout=0.05, suspect_timeout=0.02, max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    for num_bytes in range(1, 20):
        decode.worker.load = LoadReport(blocks_free=99, kv_bytes_received=num_bytes)
        await asyncio.sleep(0.02)
    assert not task.done()
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]


async def test_blocks_of_others_keep_a_hand_off_waiting_for_ever() -> None:
    router = Router(token_timeout=0.02, suspect_timeout=0.02, prefill_timeout=0.1, max_attempts=1)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    async with asyncio.timeout(5):
        num_bytes = 0
        while not task.done():
            num_bytes += 1
            decode.worker.load = LoadReport(blocks_free=99, kv_bytes_received=num_bytes)
            await asyncio.sleep(0.005)
    with pytest.raises(Unavailable, match="said nothing"):
        await task


async def test_repeated_prompt_logprobs_let_a_token_pass() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect_all(router.submit(num_prompt=4, prompt_logprobs=0)))
    attempt = await hand_off(prefill, decode)
    entries = [TokenLogprobs(index, -1.0 if index else None, ()) for index in range(4)]
    prefill.prompt_logprobs(attempt, 0, *entries[:2])
    prefill.prompt_logprobs(attempt, 0, *entries[:2])
    decode.token(attempt, 0, 100)
    await asyncio.sleep(0.01)
    prefill.prompt_logprobs(attempt, 2, *entries[2:])
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 1, 101, LENGTH)
    events = await task
    assert [type(event) for event in events] == [PromptLogprobs, PromptLogprobs, TokenEvent, TokenEvent]
    assert [entry for event in events[:2] for entry in getattr(event, "tokens", ())] == entries


async def test_session_without_a_report_gets_work() -> None:
    """A stuck worker that was removed joins again: until it says how it is, it is given nothing."""
    router = Router()
    (prefill,), (decode,) = router.pairs()
    decode.worker.has_reported = False
    task = asyncio.create_task(collect(router.submit()))
    await asyncio.sleep(0.01)
    assert decode.channel.of_kind("reserve") == []
    decode.worker.has_reported = True
    router.membership.changed()
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


async def test_requests_too_large_for_who_is_left_are_their_own_fault() -> None:
    """It was admitted while larger workers were here: the client is told to try again, not that it is wrong."""
    router = Router()
    _, (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.refused(attempt, Reason.TOO_LARGE)
    with pytest.raises(Unavailable, match="too_large") as failure:
        await task
    assert failure.value.retry_after_s is not None


async def test_reattempt_goes_to_a_prefill_worker_of_other_numerics() -> None:
    """It computes the outputs so far anew: only one of the same numerics makes of them what decode has made."""
    router = Router()
    same = router.join(Role.PREFILL, "p0")
    other = router.join(Role.PREFILL, "p1", numerics="other")
    decodes = [router.join(Role.DECODE, f"d{index}") for index in range(2)]
    other.worker.load = LoadReport(blocks_free=100)
    task = asyncio.create_task(collect(router.submit()))
    decode = await who_reserved(decodes)
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    prefill = await who_prefills([same, other], attempt)
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    await asyncio.sleep(0.01)
    # The one of equal numerics has work, the other none.
    same.worker.load = LoadReport(blocks_free=50, blocks_in_use=50, waiting_tokens=10, tokens_ahead=10)
    decode.ended(attempt, Reason.PREEMPTED)
    _, prefill, second = await next_attempt([same, other], decodes, attempt)
    assert prefill is same
    prefill.first(second, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
