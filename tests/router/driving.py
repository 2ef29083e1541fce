"""Drives requests through a router whose workers a test speaks for: finds out whom it chose, and answers."""

import asyncio
from collections.abc import Callable

from router.membership import End
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import FakeWorker, Router


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.001)


async def hand_off(prefill: FakeWorker, decode: FakeWorker, number: int = 0) -> str:
    """Drives one attempt up to the prefill worker's acceptance."""
    attempt, _ = await decode.command("reserve", number)
    decode.reserved(attempt)
    await who_prefills([prefill], attempt)
    prefill.accepted(attempt)
    return attempt


async def reserve_on_either(decodes: list[FakeWorker], number: int) -> str:
    """The request's `number`-th reservation, on whichever decode worker, is granted."""
    async with asyncio.timeout(5):
        while True:
            asked = [(d, attempt) for d in decodes for attempt in d.channel.of_kind("reserve")]
            if len(asked) > number:
                decode, attempt = next((d, a) for d, a in asked if a in d.worker.attempts)
                decode.reserved(attempt)
                return attempt
            await asyncio.sleep(0.01)


async def who_reserved(decodes: list[FakeWorker], *known: str) -> FakeWorker:
    async with asyncio.timeout(5):
        while True:
            for decode in decodes:
                if set(decode.channel.of_kind("reserve")) - set(known):
                    return decode
            await asyncio.sleep(0.001)


async def who_prefills(prefills: list[FakeWorker], attempt: str) -> FakeWorker:
    async with asyncio.timeout(5):
        while True:
            for prefill in prefills:
                if attempt in prefill.channel.of_kind("prefill"):
                    return prefill
            await asyncio.sleep(0.001)


async def next_attempt(
    prefills: list[FakeWorker], decodes: list[FakeWorker], *known: str
) -> tuple[FakeWorker, FakeWorker, str]:
    """Drives the next attempt up to prefill's acceptance: (decode, prefill, attempt id)."""
    decode = await who_reserved(decodes, *known)
    (attempt,) = set(decode.channel.of_kind("reserve")) - set(known)
    decode.reserved(attempt)
    prefill = await who_prefills(prefills, attempt)
    prefill.accepted(attempt)
    return decode, prefill, attempt


async def lose_two(
    router: Router, prefills: list[FakeWorker], decodes: list[FakeWorker], stage: str, end: End = End.SEEN
) -> list[FakeWorker]:
    """Two decode workers leave in the middle of one request, each as its attempt is in `stage`: "prefilling",
    "arriving", "renewing" because the transfer has failed, or "decoding". Returns them."""
    seen: list[str] = []
    lost = []
    for position in range(2):
        decode, prefill, attempt = await next_attempt(prefills, decodes, *seen)
        seen.append(attempt)
        if stage != "prefilling":
            prefill.first(attempt, position, 100 + position)
        if stage == "decoding":
            decode.token(attempt, position, 100 + position)
        await asyncio.sleep(0.01)
        if stage == "renewing":
            prefill.ended(attempt, Reason.TRANSFER_FAILED)
            await decode.command("renew")
        router.membership.remove(decode.worker, "gone", end)
        lost.append(decode)
    return lost
