"""A worker dies, and the other side's word that the transfer has failed is heard long before: that is one failure."""

import asyncio

import pytest

from router import causes
from router.request import FinishReason
from router.worker import LoadReport, Role
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import Router, collect, ids, ticket
from tests.router.driving import hand_off, lose_two, next_attempt, until, who_reserved
from tests.router.test_legs import renew, who_has

LENGTH = FinishReason.LENGTH


@pytest.fixture(autouse=True)
def no_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes after the first word comes too late to explain it."""
    monkeypatch.setattr(causes, "_ECHO_S", 0.0)


@pytest.mark.parametrize("stage", ["prefilling", "arriving"])
async def test_late_death_of_decode_is_a_second_failure(stage: str) -> None:
    router = Router(max_attempts=2)
    prefills, decodes = router.pairs(2, 2)
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    if stage == "arriving":
        prefill.first(attempt, 0, 100)
        await asyncio.sleep(0.01)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await decode.command("renew")
    router.leave(decode)
    _, again, second = await next_attempt(prefills, decodes, attempt)
    position = 1 if stage == "arriving" else 0
    again.first(second, position, 100 + position, LENGTH)
    assert ids(await task) == list(range(100, 101 + position))
    assert flow.attempts == 2
    router.assert_idle()


async def test_prefill_worker_is_avoided_for_the_late_death_of_decode() -> None:
    """What it said was true, and decode was the cause: the next attempt may go to it, as the emptier one."""
    router = Router(max_attempts=3)
    prefills, decodes = router.pairs(2, 2)
    task = asyncio.create_task(collect(router.submit()))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await decode.command("renew")
    busy = prefills[1 - prefills.index(prefill)]
    busy.worker.load = LoadReport(blocks_free=50, blocks_in_use=50, waiting_tokens=20, tokens_ahead=20)
    router.leave(decode)
    _, again, second = await next_attempt(prefills, decodes, attempt)
    assert again is prefill
    again.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]


async def test_late_death_of_the_only_prefill_worker_is_a_second_failure() -> None:
    """Nobody knows yet that it is dead, so it is given the next leg, too."""
    router = Router(max_attempts=2, failover_timeout=60.0)
    (prefill,), (decode,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(prefill, decode)
    decode.transfer_lost(attempt)
    await decode.command("renew")
    decode.reserved(attempt, 2)
    await until(lambda: ticket(attempt, 2) in prefill.channel.tickets)
    router.leave(prefill)
    await decode.command("release")
    again = router.join(Role.PREFILL, "p1")
    second = await hand_off(again, decode, 1)
    again.first(second, 0, 100, LENGTH)
    assert ids(await task) == [100]
    router.assert_idle()


async def test_late_death_counts_for_each_sample() -> None:
    """Samples that differ go on in an attempt each, and the first of those asks the dead worker for room."""
    router = Router(max_attempts=2)
    prefills, decodes = router.pairs(2, 2)
    task = asyncio.create_task(collect(router.submit(n=2)))
    decode, prefill, attempt = await next_attempt(prefills, decodes)
    prefill.first(attempt, 0, 100)
    await asyncio.sleep(0.01)
    other = decodes[1 - decodes.index(decode)]
    other.worker.is_draining = True
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await decode.command("reserve", 1)
    other.worker.is_draining = False
    router.leave(decode)
    assert await who_reserved([other]) is other
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    router.assert_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_death_of_a_worker_that_has_spoken_since_costs_nothing(side: str) -> None:
    """It was alive after the first failure: its death is another one."""
    router = Router(max_attempts=2)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    decode.transfer_lost(attempt)
    await renew(decode, prefill, attempt)
    await asyncio.sleep(0.01)
    router.leave(prefill if side == "prefill" else decode)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await task
    router.assert_idle()


async def test_one_failure_excuses_two_deaths() -> None:
    """It has one cause: whoever dies after it was found is another failure."""
    router = Router(max_attempts=2, failover_timeout=60.0)
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt = await hand_off(prefill, decode)
    prefill.ended(attempt, Reason.TRANSFER_FAILED)
    await decode.command("renew")
    router.leave(decode)
    other = router.join(Role.DECODE, "d1")
    second, _ = await other.command("reserve")
    other.reserved(second)
    await until(lambda: ticket(second, 1) in prefill.channel.tickets)
    router.leave(prefill)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await task
    router.assert_idle()


async def test_late_deaths_spare_a_third_worker() -> None:
    """They are no failures of their own, but the request may be what the workers die of."""
    router = Router(max_attempts=10, heartbeat_timeout=0.05, suspect_timeout=0.01)
    prefills, decodes = router.pairs(1, 3)
    task = asyncio.create_task(collect(router.submit()))
    await lose_two(router, prefills, decodes, "renewing")
    with pytest.raises(Internal, match="2 workers died"):
        await task
    router.assert_idle()


@pytest.mark.parametrize("is_late", [False, True])
async def test_second_leg_on_another_worker_hides_a_failure(is_late: bool) -> None:
    """Two legs on two workers fail: that is two, whenever it is heard that the first one has died."""
    router = Router(max_attempts=2, suspect_timeout=0.01)
    prefills, (decode,) = router.pairs(2, 1)
    task = asyncio.create_task(collect(router.submit()))
    _, prefill, attempt = await next_attempt(prefills, [decode])
    if not is_late:
        router.leave(prefill)
    decode.transfer_lost(attempt)
    await decode.command("renew")
    decode.reserved(attempt, 2)
    other = await who_has(prefills, ticket(attempt, 2))
    assert other is not prefill
    other.accepted(attempt)
    if is_late:
        router.leave(prefill)
    other.ended(attempt, Reason.TRANSFER_FAILED)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await task
    router.assert_idle()
