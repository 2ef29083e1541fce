"""Prompts that decode workers compute themselves: who gets which, what the router takes such an attempt for, and what a
cluster without prefill workers promises."""

import asyncio
from typing import Any

import pytest

from kvtransfer.ticket import Ticket
from router.events import Reserved
from router.request import FinishReason, TokenEvent
from router.stages import Stage
from router.worker import Link, LoadReport, Role
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router, collect, collect_all, ids
from tests.router.driving import hand_off, until
from tests.router.test_logprobs import PROMPT, shown
from tests.router.test_refusals import refused

LENGTH = FinishReason.LENGTH


def num_local(router: Router) -> float:
    return router.registry.get_sample_value("splitserve_local_prefills_total", {"model": "tiny"}) or 0.0


async def asked(decode: FakeWorker, number: int = 0) -> str:
    """The `number`-th attempt, which the decode worker is to compute itself, and takes."""
    attempt, _ = await decode.command("reserve", number)
    assert attempt in decode.channel.local
    decode.accepted(attempt)
    return attempt


async def answer(decode: FakeWorker, number: int = 0, num_tokens: int = 2) -> str:
    attempt = await asked(decode, number)
    decode.first(attempt, 0, 100, LENGTH if num_tokens == 1 else None)
    for position in range(1, num_tokens):
        decode.token(attempt, position, 100 + position, LENGTH if position == num_tokens - 1 else None)
    return attempt


# Whose it is


@pytest.mark.parametrize(("num_prompt", "is_local"), [(1, True), (20, True), (21, False), (100, False)])
async def test_threshold_sends_a_prompt_to_the_wrong_side(num_prompt: int, is_local: bool) -> None:
    router = Router(split_threshold=20)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit(num_prompt)))
    if is_local:
        attempt = await answer(decode)
        assert prefill.channel.commands == []
    else:
        attempt = await hand_off(prefill, decode)
        assert not decode.channel.local
        prefill.first(attempt, 0, 100)
        decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    assert num_local(router) == is_local
    assert decode.channel.of_kind("release") == []
    router.assert_idle()


async def test_outputs_do_not_count_for_the_threshold() -> None:
    """A request that has grown past it goes on by way of a prefill worker, in a later attempt."""
    router = Router(split_threshold=20)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit(19)))
    attempt = await asked(decode)
    for position in range(2):
        decode.token(attempt, position, 100 + position)
    await asyncio.sleep(0.01)
    decode.ended(attempt, Reason.PREEMPTED)
    attempt, start = await decode.command("reserve", 1)
    assert start is not None
    assert (start.num_tokens, attempt in decode.channel.local) == (21, False)
    decode.reserved(attempt)
    await prefill.command("prefill")
    prefill.first(attempt, 2, 102, LENGTH)
    assert ids(await task) == [100, 101, 102]
    router.assert_idle()


@pytest.mark.parametrize("num_prompt", [5, 500])
async def test_cluster_without_prefill_refuses_although_decode_may_compute(num_prompt: int) -> None:
    router = Router(without_prefill="local")
    assert not router.dispatcher.is_ready
    assert refused(router).message == "no decode worker has joined"
    decode = router.join(Role.DECODE, "d")
    assert router.dispatcher.is_ready
    assert router.membership.state_of(decode.worker) == "ready"
    task = asyncio.create_task(collect(router.submit(num_prompt)))
    await answer(decode)
    assert ids(await task) == [100, 101]
    router.assert_idle()


async def test_prefill_worker_that_comes_is_not_used_and_one_that_leaves_is_waited_for() -> None:
    """Who comes first changes nothing: with a pair prompts go there, without one decode computes them."""
    router = Router(without_prefill="local")
    prefill = router.join(Role.PREFILL, "p")
    assert router.dispatcher.why_not_ready() == "no decode worker has joined"
    decode = router.join(Role.DECODE, "d")
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    await task
    assert not router.membership.describe()["aggregated"]
    prefill.worker.links["d"] = Link(False, "cut")
    assert router.membership.describe()["aggregated"]
    task = asyncio.create_task(collect(router.submit()))
    await answer(decode, 1)
    await task
    prefill.worker.links["d"] = Link(True, "ipc")
    router.leave(prefill)
    task = asyncio.create_task(collect(router.submit()))
    await answer(decode, 2)
    await task
    prefill = router.join(Role.PREFILL, "p2")
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode, 3)
    prefill.first(attempt, 0, 100, LENGTH)
    await task
    assert num_local(router) == 2
    router.assert_idle()


@pytest.mark.parametrize("stage", ["queued", "prefilling", "arriving"])
async def test_loss_of_the_last_prefill_worker_fails_a_request(stage: str) -> None:
    """It goes on on a decode worker alone, from what the client has."""
    router = Router(without_prefill="local", max_attempts=2)
    (prefill,), (decode,) = router.pairs()
    if stage == "queued":
        prefill.worker.load = LoadReport(blocks_free=0)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    if stage != "queued":
        attempt = await hand_off(prefill, decode)
    if stage == "arriving":
        prefill.first(attempt, 0, 100)
        await asyncio.sleep(0.01)
    router.leave(prefill)
    attempt = await asked(decode, 0 if stage == "queued" else 1)
    start = next(s for kind, a, s in decode.channel.commands if kind == "reserve" and a == attempt)
    assert start is not None
    assert start.outputs == {0: (100,) if stage == "arriving" else ()}
    decode.first(attempt, len(start.outputs[0]), 100 + len(start.outputs[0]), LENGTH)
    assert ids(await task) == list(range(100, 101 + len(start.outputs[0])))
    assert flow.attempts == (1 if stage == "queued" else 2)
    router.assert_idle()


async def test_refusing_router_computes_locally() -> None:
    """C36: without a pair short prompts are refused as well: the cluster is not ready."""
    router = Router(split_threshold=20)
    router.join(Role.DECODE, "d")
    assert refused(router).message == "no prefill worker has joined (--without-prefill refuse)"
    assert not router.membership.limits().ready


async def test_router_forgets_the_room_that_a_local_prompt_takes() -> None:
    """Its blocks, its place, and its tokens, of which no more wait on a worker than two steps compute."""
    router = Router(without_prefill="local")
    decode = router.join(Role.DECODE, "d", max_num_batched_tokens=64, long_prefill_threshold=32)
    tasks = [asyncio.create_task(collect(router.submit(60))) for _ in range(6)]
    await until(lambda: len(decode.channel.of_kind("reserve")) == 3)
    await asyncio.sleep(0.01)
    assert len(router.dispatcher.queue) == 3
    view = decode.worker.decode_view()
    assert (view.available_blocks, view.num_seqs) == (100 - 3 * 4, 3)
    assert decode.worker.prefill_view().waiting_tokens == 180
    for number in range(6):
        await answer(decode, number)
    for task in tasks:
        await task
    router.assert_idle()


async def test_prompts_that_are_handed_over_count_as_waiting_on_decode() -> None:
    router = Router(split_threshold=20)
    _, (decode,) = router.pairs()
    tasks = [asyncio.create_task(collect(router.submit(60))) for _ in range(3)]
    await until(lambda: len(decode.channel.of_kind("reserve")) == 3)
    assert decode.worker.prefill_view().waiting_tokens == 0
    short = asyncio.create_task(collect(router.submit(20)))
    await answer(decode, 3)
    await short
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    router.assert_idle()


async def test_short_prompt_that_waits_holds_up_long_ones() -> None:
    """The decode worker has as many tokens to compute as it may; a prefill worker has none."""
    router = Router(split_threshold=20)
    (prefill,), (decode,) = router.pairs()
    decode.worker.load = LoadReport(blocks_free=100, waiting_tokens=128, tokens_ahead=128)
    short, long = (asyncio.create_task(collect(router.submit(length))) for length in (20, 60))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100, LENGTH)
    await long
    assert len(router.dispatcher.queue) == 1
    decode.worker.load = LoadReport(blocks_free=100)
    router.membership.changed()
    await answer(decode, 1)
    await short
    router.assert_idle()


async def test_decode_workers_take_turns_with_prefill_workers() -> None:
    """Round robin among those that are meant: whoever computes short prompts is not counted."""
    router = Router(split_threshold=20, routing="round_robin")
    prefills, decodes = router.pairs(2, 2)
    tasks = [asyncio.create_task(collect(router.submit(60))) for _ in range(4)]
    for decode in decodes:
        for number in range(2):
            attempt, _ = await decode.command("reserve", number)
            decode.reserved(attempt)
    await until(lambda: sum(len(prefill.channel.tickets) for prefill in prefills) == 4)
    assert [len(prefill.channel.tickets) for prefill in prefills] == [2, 2]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("settings", "has_prefill", "most"),
    [
        ({}, True, 79),
        ({"split_threshold": 50}, True, 79),
        ({"split_threshold": 120}, True, 120),
        ({"split_threshold": 900}, True, 160),
        ({"without_prefill": "local"}, True, 79),
        ({"without_prefill": "local"}, False, 160),
        ({"split_threshold": 50}, False, 0),
    ],
)
async def test_limits_are_those_of_workers_that_have_no_part(
    settings: dict[str, Any], has_prefill: bool, most: int
) -> None:
    router = Router(**settings)
    if has_prefill:
        router.join(Role.PREFILL, "p", num_blocks=5, max_model_len=80)
    router.join(Role.DECODE, "d", num_blocks=10)
    limits = router.membership.limits()
    assert (limits.max_prompt_tokens_prefill, limits.max_prompt_tokens_decode) == (most, 159)
    assert limits.max_model_len == (80 if has_prefill else 1024)


async def test_prompt_that_no_decode_worker_can_hold_waits() -> None:
    router = Router(without_prefill="local")
    router.join(Role.DECODE, "d", num_blocks=5)
    assert refused(router, 81).message == "no decode worker here can hold 81 tokens"
    router.membership.get("d").is_draining = True  # type: ignore[union-attr]
    assert refused(router).message == "every decode worker is about to end"


# The attempt


async def test_prompt_logprobs_and_samples_of_a_local_prompt_are_lost() -> None:
    router = Router(without_prefill="local")
    decode = router.join(Role.DECODE, "d")
    flow = router.submit(3, prompt_logprobs=1, n=2)
    task = asyncio.create_task(collect_all(flow))
    attempt = await asked(decode)
    decode.prompt_logprobs(attempt, 0, *PROMPT[:2])
    decode.prompt_logprobs(attempt, 2, *PROMPT[2:])
    decode.first(attempt, 0, 100, samples=(0, 1))
    for sample in (0, 1):
        decode.token(attempt, 1, 101, LENGTH, sample=sample)
    events = await task
    assert shown(events)[: len(PROMPT)] == PROMPT
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert sorted((t.sample, t.token_id) for t in tokens) == [(0, 100), (0, 101), (1, 100), (1, 101)]
    router.assert_idle()


async def test_time_of_a_local_prompt_counts_as_hand_off() -> None:
    router = Router(without_prefill="local")
    decode = router.join(Role.DECODE, "d")
    now = 0.0
    stages = router.stage_clock(lambda: now)
    flow = router.submit(stages=stages)
    task = asyncio.create_task(collect(flow))
    attempt, _ = await decode.command("reserve")
    now = 1.0
    decode.accepted(attempt, 7)
    await asyncio.sleep(0.01)
    now = 3.0
    decode.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    now = 7.0
    decode.token(attempt, 1, 101, LENGTH)
    await task
    timings = stages.timings()
    assert [timings.seconds[stage] for stage in (Stage.QUEUE, Stage.PREFILL, Stage.HANDOFF, Stage.DECODE)] == [
        1.0, 2.0, 0.0, 4.0
    ]  # fmt: skip
    assert timings.transfer_bytes == 0
    assert flow.cached_tokens == 7
    stays = router.registry.get_sample_value("splitserve_request_handoff_time_seconds_count", {"model": "tiny"})
    assert stays == 0


@pytest.mark.parametrize("stage", ["reserving", "prefilling", "decoding"])
async def test_cancelled_local_prompt_stays_on_its_worker(stage: str) -> None:
    router = Router(without_prefill="local")
    decode = router.join(Role.DECODE, "d")
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    if stage != "reserving":
        decode.accepted(attempt)
    if stage == "decoding":
        decode.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert decode.channel.of_kind("release") == [attempt]
    router.assert_idle()


@pytest.mark.parametrize("stage", ["reserving", "prefilling", "decoding"])
async def test_death_of_a_computing_worker_ends_the_request(stage: str) -> None:
    router = Router(without_prefill="local", max_attempts=2)
    decodes = [router.join(Role.DECODE, f"d{index}") for index in range(2)]
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    await until(lambda: any(decode.channel.commands for decode in decodes))
    decodes.sort(key=lambda decode: not decode.channel.commands)
    attempt, _ = await decodes[0].command("reserve")
    if stage != "reserving":
        decodes[0].accepted(attempt)
    if stage == "decoding":
        decodes[0].first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    router.leave(decodes[0])
    again = await asked(decodes[1])
    position = 1 if stage == "decoding" else 0
    decodes[1].first(again, position, 100 + position, LENGTH)
    assert ids(await task) == list(range(100, 101 + position))
    assert flow.attempts == 2
    router.assert_idle()


async def test_prompt_kills_a_third_decode_worker() -> None:
    router = Router(without_prefill="local", max_attempts=10, heartbeat_timeout=0.05)
    decodes = [router.join(Role.DECODE, f"d{index}") for index in range(3)]
    task = asyncio.create_task(collect(router.submit()))
    for _ in range(2):
        await until(lambda: any(d.worker.attempts for d in decodes if not d.worker.is_lost))
        decode = next(d for d in decodes if d.worker.attempts)
        await asked(decode)
        await asyncio.sleep(0.01)
        router.leave(decode)
    with pytest.raises(Internal, match="2 workers died"):
        await task
    router.assert_idle()


@pytest.mark.parametrize("reason", [Reason.NO_ROOM, Reason.DRAINING])
async def test_refused_local_prompt_counts_as_failed(reason: Reason) -> None:
    router = Router(without_prefill="local", max_attempts=1)
    decode = router.join(Role.DECODE, "d")
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.refused(attempt, reason)
    await answer(decode, 1)
    assert ids(await task) == [100, 101]
    assert num_local(router) == 1
    router.assert_idle()


async def test_worker_that_answers_as_if_it_was_to_receive_hangs_the_request() -> None:
    """It does not know what it was asked, or is not sane: its time is over when any other's would be."""
    router = Router(
        without_prefill="local", max_attempts=1, stall_timeout=0.03, heartbeat_timeout=0.02, suspect_timeout=0.02
    )
    decode = router.join(Role.DECODE, "d")
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    decode.say(attempt, Reserved(Ticket("t", "d", 0, 1)))
    with pytest.raises(Unavailable, match="said nothing"):
        await task
    assert decode.channel.of_kind("prefill") == []
    router.assert_idle()


async def test_word_of_a_transfer_ends_a_local_prompt() -> None:
    router = Router(without_prefill="local")
    decode = router.join(Role.DECODE, "d")
    task = asyncio.create_task(collect(router.submit()))
    attempt = await asked(decode)
    decode.transfer_lost(attempt)
    await asyncio.sleep(0.01)
    decode.transferred(attempt, 0)
    decode.already_running(attempt)
    decode.first(attempt, 0, 100)
    decode.transfer_lost(attempt)
    decode.token(attempt, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    router.assert_idle()
