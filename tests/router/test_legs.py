"""Only the prefill worker's part fails: decode's reservation is kept, its ticket renewed, and another leg goes on."""

import asyncio

import pytest

from router.request import Event, FinishReason, TokenEvent
from router.worker import Link, LoadReport, Role
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router, collect, collect_all, ids, ticket
from tests.router.driving import hand_off, next_attempt, until
from tests.router.test_logprobs import PROMPT, shown

LENGTH = FinishReason.LENGTH


def renewals(router: Router, reason: str) -> float:
    labels = {"reason": reason, "model": "tiny"}
    return router.registry.get_sample_value("splitserve_ticket_renewals_total", labels) or 0.0


async def renew(decode: FakeWorker, prefill: FakeWorker, attempt: str, number: int = 1) -> None:
    """Decode gives out the ticket after the `number`-th one, and `prefill` takes it."""
    await decode.command("renew", number - 1)
    decode.reserved(attempt, number + 1)
    await until(lambda: ticket(attempt, number + 1) in prefill.channel.tickets)
    prefill.accepted(attempt)


async def who_has(prefills: list[FakeWorker], wanted: str) -> FakeWorker:
    """Whoever is handed this ticket."""
    await until(lambda: any(wanted in prefill.channel.tickets for prefill in prefills))
    return next(prefill for prefill in prefills if wanted in prefill.channel.tickets)


def fail(how: str, router: Router, prefill: FakeWorker, decode: FakeWorker, attempt: str) -> str:
    """One leg fails; returns what the router counts."""
    if how == "dies":
        router.leave(prefill)
        return "worker_lost"
    if how == "ends":
        prefill.ended(attempt, Reason.TRANSFER_FAILED)
    elif how == "gives up":
        prefill.ended(attempt, Reason.TIMEOUT)
        return "timeout"
    else:
        decode.transfer_lost(attempt)
    return "transfer_failed"


@pytest.mark.parametrize("how", ["dies", "ends", "gives up", "is missed by decode"])
@pytest.mark.parametrize("stage", ["handing over", "prefilling", "arriving"])
async def test_lost_leg_costs_the_reservation(stage: str, how: str) -> None:
    router = Router(max_attempts=2)
    prefills, (decode,) = router.pairs(2, 1)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt, _ = await decode.command("reserve")
    decode.reserved(attempt)
    prefill = await who_has(prefills, ticket(attempt, 1))
    other = prefills[1 - prefills.index(prefill)]
    if stage != "handing over":
        prefill.accepted(attempt)
    if stage == "arriving":
        prefill.first(attempt, 0, 100)
        await asyncio.sleep(0.01)
    reason = fail(how, router, prefill, decode, attempt)
    await renew(decode, other, attempt)
    outputs = (100,) if stage == "arriving" else ()
    assert decode.channel.renewals == [(attempt, ticket(attempt, 1), {0: outputs})]
    start = next(start for kind, _, start in other.channel.commands if kind == "prefill")
    assert start is not None
    assert (start.prompt_ids, start.outputs) == (tuple(range(10)), {0: outputs})
    position = len(outputs)
    other.first(attempt, position, 100 + position)
    decode.token(attempt, position, 100 + position)
    decode.token(attempt, position + 1, 101 + position, LENGTH)
    assert ids(await task) == list(range(100, 102 + position))
    assert flow.attempts == 1
    assert decode.channel.of_kind("release") == []
    assert renewals(router, reason) == 1
    assert prefill.channel.of_kind("release") == ([] if how == "dies" else [attempt])
    router.assert_idle()


async def test_leg_that_is_replaced_is_no_failure() -> None:
    """Each leg counts like an attempt: a request that no prefill worker can serve comes to an end."""
    router = Router(max_attempts=3)
    prefills, (decode,) = router.pairs(3, 1)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    for number in (1, 2):
        await decode.command("renew", number - 1)
        decode.reserved(attempt, number + 1)
        prefill = await who_has(prefills, ticket(attempt, number + 1))
        prefill.ended(attempt, Reason.TRANSFER_FAILED)
    with pytest.raises(Unavailable, match="3 attempts failed"):
        await task
    assert flow.attempts == 1
    assert {len(p.channel.tickets) for p in prefills} == {1}, "one that had failed was asked again before all others"
    router.assert_idle()


async def test_request_kills_a_third_prefill_worker() -> None:
    router = Router(max_attempts=10, heartbeat_timeout=0.05)
    prefills, (decode,) = router.pairs(3, 1)
    task = asyncio.create_task(collect(router.submit()))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    router.leave(prefill)
    await decode.command("renew")
    decode.reserved(attempt, 2)
    prefill = await who_has(prefills, ticket(attempt, 2))
    prefill.accepted(attempt)
    await asyncio.sleep(0)
    router.leave(prefill)
    with pytest.raises(Internal, match="2 workers died"):
        await task
    assert sum(len(p.channel.tickets) for p in prefills) == 2
    router.assert_idle()


async def test_only_prefill_worker_is_not_asked_again() -> None:
    """Its link was cut, and comes back: its late words about the first leg, and its full pool, change nothing."""
    router = Router(max_attempts=2, reserve_timeout=5.0)
    (prefill,), (decode,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(prefill, decode)
    first_leg = prefill.channel.legs[attempt]
    prefill.worker.links["d0"] = Link(False, "cut")
    decode.transfer_lost(attempt)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await prefill.command("release")
    await asyncio.sleep(0.06)
    assert decode.channel.of_kind("renew") == [], "renewed for nobody"
    prefill.worker.links["d0"] = Link(True, "ipc")
    await decode.command("renew")
    assert not prefill.say(first_leg, None), "the first leg is still heard"
    decode.reserved(attempt, 2)
    await prefill.command("prefill", 1)
    prefill.worker.load = LoadReport(blocks_free=0, blocks_in_use=100)  # the blocks of the first leg are still pinned
    prefill.refused(attempt)
    await asyncio.sleep(0.06)
    prefill.worker.load = LoadReport(blocks_free=100)
    await prefill.command("prefill", 2)
    assert prefill.channel.tickets[1:] == [ticket(attempt, 2)] * 2, "a refusal costs the ticket"
    prefill.accepted(attempt)
    prefill.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert flow.attempts == 1
    router.assert_idle()


@pytest.mark.parametrize("stage", ["reserving", "prefilling"])
async def test_decode_is_kept_waiting_where_no_prefill_worker_is_left(stage: str) -> None:
    max_attempts = 1 if stage == "reserving" else 2  # nothing had been given to it: nobody has failed
    router = Router(reserve_timeout=60.0, failover_timeout=60.0, max_attempts=max_attempts)
    (prefill,), (decode,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt, _ = await decode.command("reserve")
    if stage == "prefilling":
        decode.reserved(attempt)
        await prefill.command("prefill")
        prefill.accepted(attempt)
        await asyncio.sleep(0)
    router.leave(prefill)
    if stage == "reserving":
        decode.reserved(attempt)
    await decode.command("release")
    other = router.join(Role.PREFILL, "p1")
    second = await hand_off(other, decode, 1)
    other.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    assert flow.attempts == 2
    router.assert_idle()


async def lost_while_others_are_full(
    router: Router,
) -> tuple["asyncio.Task[list[TokenEvent]]", FakeWorker, FakeWorker]:
    """A prefill worker dies with the prompt in its hands, and there is no room on the other: (task, decode, other)."""
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit()))
    _, prefill, _ = await next_attempt(prefills, [decode])
    other = prefills[1 - prefills.index(prefill)]
    other.worker.load = LoadReport(blocks_free=0, blocks_in_use=100)
    router.leave(prefill)
    return task, decode, other


async def test_reservation_outlasts_the_search_for_room() -> None:
    router = Router(reserve_timeout=0.1)
    task, decode, other = await lost_while_others_are_full(router)
    await decode.command("release")
    other.worker.load = LoadReport(blocks_free=100)
    router.membership.changed()
    second = await hand_off(other, decode, 1)
    other.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


async def test_request_that_lost_a_leg_waits_for_ever_for_room() -> None:
    """It was interrupted by a failure, whoever has counted it."""
    router = Router(reserve_timeout=0.1, failover_timeout=0.2)
    task, _, _ = await lost_while_others_are_full(router)
    with pytest.raises(Unavailable, match="interrupted by worker_lost, and no pair of workers has room"):
        await asyncio.wait_for(task, 5)
    router.assert_idle()


# Wrong hand-offs


async def test_wrong_hand_off_costs_the_attempt() -> None:
    """The reservation is kept, whose Finish was wrong is avoided, and the client's stream goes on."""
    router = Router(max_attempts=2)
    prefills, (decode,) = router.pairs(2, 1)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    prefill.first(attempt, 0, 100)
    decode.transfer_lost(attempt, reason=Reason.INVALID)
    other = prefills[1 - prefills.index(prefill)]
    await renew(decode, other, attempt)
    decode.ended(attempt, Reason.PREEMPTED)
    prefill.worker.load = LoadReport(blocks_free=100)
    other.worker.load = LoadReport(blocks_free=50, blocks_in_use=50, waiting_tokens=20, tokens_ahead=20)
    _, again, second = await next_attempt(prefills, [decode], attempt)
    assert again is other, "the one at fault is the emptier one"
    again.first(second, 1, 101, LENGTH)
    assert ids(await task) == [100, 101]
    assert renewals(router, "invalid") == 1
    router.assert_idle()


async def test_decode_that_finds_every_hand_off_wrong_is_kept() -> None:
    """A second prefill worker did no better, so decode ends the attempt: the next one goes to another pair, and each of
    the two losses is a failure."""
    router = Router(max_attempts=3)
    prefills, decodes = router.pairs(3, 2)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    decode, _, attempt = await next_attempt(prefills, decodes)
    decode.transfer_lost(attempt, reason=Reason.INVALID)
    await decode.command("renew")
    decode.reserved(attempt, 2)
    second = await who_has(prefills, ticket(attempt, 2))
    second.accepted(attempt)
    decode.ended(attempt, Reason.INVALID)
    decode.worker.load = LoadReport(blocks_free=100)
    another, prefill, last = await next_attempt(prefills, decodes, attempt)
    assert another is not decode
    prefill.ended(last, Reason.TRANSFER_FAILED)
    with pytest.raises(Unavailable, match="3 attempts failed"):
        await task
    router.assert_idle()


# Words that cross


@pytest.fixture
def router() -> Router:
    return Router(max_attempts=2)


async def lost_while_arriving(
    router: Router, **sampling: int
) -> tuple["asyncio.Task[list[int]]", FakeWorker, FakeWorker, str]:
    """The prefill worker dies after its first token, and the ticket is renewed: (task, decode, the other one, id)."""
    prefills, (decode,) = router.pairs(2, 1)

    async def tokens() -> list[int]:
        return ids(await collect(router.submit(**sampling)))

    task = asyncio.create_task(tokens())
    _, prefill, attempt = await next_attempt(prefills, [decode])
    prefill.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    router.leave(prefill)
    await decode.command("renew")
    return task, decode, prefills[1 - prefills.index(prefill)], attempt


async def test_loss_of_the_old_transfer_costs_the_new_one(router: Router) -> None:
    """It was said before decode heard of the renewal, and is read after it, or after the new ticket."""
    task, decode, other, attempt = await lost_while_arriving(router)
    decode.transfer_lost(attempt)
    decode.reserved(attempt, 2)
    await until(lambda: other.channel.tickets)
    decode.transfer_lost(attempt)
    other.accepted(attempt)
    other.first(attempt, 1, 101, LENGTH)
    assert await task == [100, 101]
    assert len(decode.channel.of_kind("renew")) == 1
    router.assert_idle()


@pytest.mark.parametrize("token_is_first", [False, True])
async def test_decode_that_already_runs_is_handed_another_prompt(router: Router, token_is_first: bool) -> None:
    """All blocks had come; the room that was promised on the other prefill worker is free again."""
    task, decode, other, attempt = await lost_while_arriving(router)
    if token_is_first:
        decode.token(attempt, 0, 100)
    decode.already_running(attempt)
    decode.token(attempt, 0, 100)
    await asyncio.sleep(0.01)
    assert not other.worker.promises
    decode.token(attempt, 1, 101, LENGTH)
    assert await task == [100, 101]
    assert other.channel.commands == []
    router.assert_idle()


@pytest.mark.parametrize("word", ["ended", "refused"])
async def test_kept_for_too_short_a_time_is_a_second_failure(router: Router, word: str) -> None:
    """The time for which decode keeps the reservation passes as the renewal is on its way."""
    task, decode, other, attempt = await lost_while_arriving(router)
    if word == "ended":
        decode.ended(attempt, Reason.TIMEOUT)
    decode.refused(attempt)
    second = await hand_off(other, decode, 1)
    other.first(second, 1, 101, LENGTH)
    assert await task == [100, 101]
    router.assert_idle()


async def test_revocation_while_the_ticket_is_renewed_is_a_second_failure(router: Router) -> None:
    task, decode, other, attempt = await lost_while_arriving(router)
    decode.ended(attempt, Reason.PREEMPTED)
    second = await hand_off(other, decode, 1)
    other.first(second, 1, 101, LENGTH)
    assert await task == [100, 101]
    router.assert_idle()


async def test_ticket_that_is_said_twice_is_handed_out_twice(router: Router) -> None:
    """Also the one that has been spent."""
    task, decode, other, attempt = await lost_while_arriving(router)
    decode.reserved(attempt, 1)
    await asyncio.sleep(0.01)
    assert other.channel.commands == []
    decode.reserved(attempt, 2)
    await until(lambda: other.channel.tickets)
    decode.reserved(attempt, 2)
    other.accepted(attempt)
    other.first(attempt, 1, 101, LENGTH)
    assert await task == [100, 101]
    assert other.channel.tickets == [ticket(attempt, 2)]
    router.assert_idle()


async def test_client_that_leaves_while_the_ticket_is_renewed_keeps_a_worker_busy(router: Router) -> None:
    task, decode, other, attempt = await lost_while_arriving(router)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert decode.channel.of_kind("release") == [attempt]
    assert other.channel.commands == []
    router.assert_idle()


async def test_late_first_token_of_a_lost_leg_is_shown() -> None:
    """Decode's new prompt lacks it, so the next leg draws that position, and it alone is believed."""
    router = Router()
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit()))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    decode.transfer_lost(attempt)
    prefill.first(attempt, 0, 999)
    await decode.command("renew")
    assert not prefill.say(prefill.channel.legs[attempt], None)
    assert decode.channel.renewals[0][2] == {0: ()}
    other = prefills[1 - prefills.index(prefill)]
    await renew(decode, other, attempt)
    other.first(attempt, 0, 100, LENGTH)
    assert ids(await task) == [100]


async def test_new_leg_dies_before_it_was_given_anything(router: Router) -> None:
    """It costs nothing; and a third one that is full for now is waited for."""
    third = router.join(Role.PREFILL, "late", num_blocks=50)
    third.worker.load = LoadReport(blocks_free=0, blocks_in_use=50)
    task, decode, other, attempt = await lost_while_arriving(router)
    router.leave(other)
    decode.reserved(attempt, 2)
    await asyncio.sleep(0.06)
    third.worker.load = LoadReport(blocks_free=50)
    await until(lambda: third.channel.tickets)
    third.accepted(attempt)
    third.first(attempt, 1, 101, LENGTH)
    assert await task == [100, 101]
    assert len(decode.channel.of_kind("renew")) == 1
    router.assert_idle()


async def half_scored(
    router: Router,
) -> tuple["asyncio.Task[list[Event]]", FakeWorker, FakeWorker, FakeWorker, str]:
    """Half of the prompt's logprobs have come: (task, decode, its prefill worker, another one, attempt id)."""
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect_all(router.submit(prompt_logprobs=1)))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    prefill.prompt_logprobs(attempt, 0, *PROMPT[:6])
    await asyncio.sleep(0.01)
    return task, decode, prefill, prefills[1 - prefills.index(prefill)], attempt


async def test_prompt_logprobs_of_the_second_leg_are_shown_again(router: Router) -> None:
    """They begin at 0 again."""
    task, decode, _, other, attempt = await half_scored(router)
    decode.transfer_lost(attempt)
    await renew(decode, other, attempt)
    other.prompt_logprobs(attempt, 0, *PROMPT[:4])
    other.prompt_logprobs(attempt, 4, *PROMPT[4:])
    other.first(attempt, 0, 100, LENGTH)
    assert shown(await task) == [*PROMPT, 100]


async def test_running_sequence_waits_for_logprobs_that_nobody_brings(router: Router) -> None:
    """All blocks came and half of the prompt's logprobs did: the attempt is lost with its leg, and once."""
    task, decode, prefill, other, attempt = await half_scored(router)
    router.leave(prefill)
    await decode.command("renew")
    decode.already_running(attempt)
    decode.token(attempt, 0, 100)
    second = await hand_off(other, decode, 1)
    other.prompt_logprobs(second, 0, *PROMPT)
    other.first(second, 0, 100, LENGTH)
    assert shown(await task) == [*PROMPT, 100]
    router.assert_idle()


async def test_samples_that_differ_share_a_ticket() -> None:
    """After first tokens each sample goes on by itself: one attempt for each, as after any other loss."""
    router = Router(max_attempts=3)
    prefills, (decode,) = router.pairs(2, 1)
    flow = router.submit(n=2)
    task = asyncio.create_task(collect(flow))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    prefill.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    router.leave(prefill)
    await decode.command("release")
    assert decode.channel.of_kind("renew") == []
    other = prefills[1 - prefills.index(prefill)]
    second = await hand_off(other, decode, 1)
    _, start = await other.command("prefill")
    assert start is not None
    assert start.outputs == {0: (100,)}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert second != attempt
    router.assert_idle()


async def test_samples_that_have_not_begun_lose_their_ticket() -> None:
    router = Router()
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit(n=2)))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    router.leave(prefill)
    await renew(decode, prefills[1 - prefills.index(prefill)], attempt)
    assert decode.channel.renewals[0][2] == {0: (), 1: ()}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    router.assert_idle()
