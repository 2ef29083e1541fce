"""Requests that nobody here can serve: told at once, with the reason and that a retry may help; none waits in vain."""

import asyncio

import pytest

from router.request import FinishReason
from router.worker import Role
from splitserve.service.errors import Unavailable
from tests.router.cluster_fakes import Router, collect, ids
from tests.router.driving import hand_off, until


def refused(router: Router, num_prompt: int = 10, **sampling: int) -> Unavailable:
    with pytest.raises(Unavailable) as refusal:
        router.submit(num_prompt, **sampling)
    assert refusal.value.retry_after_s is not None
    assert len(router.dispatcher.queue) == 0
    return refusal.value


async def test_router_that_drains_admits_a_request() -> None:
    router = Router()
    router.pairs()
    assert router.dispatcher.is_ready
    router.dispatcher.drain()
    assert refused(router).reason == "DRAINING"
    assert not router.dispatcher.is_ready
    assert router.dispatcher.why_not_ready() == "this router is shutting down"


async def test_router_that_drains_lets_go_of_what_it_has() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    router.dispatcher.drain()
    decode.reserved(attempt)
    handed_over, _ = await prefill.command("prefill")
    prefill.accepted(handed_over)
    prefill.first(handed_over, 0, 100, FinishReason.LENGTH)
    assert ids(await task) == [100]


async def interrupted(router: Router) -> "asyncio.Task[list[int]]":
    """A request of a router that drains loses its only decode worker behind its first token."""

    async def tokens() -> list[int]:
        return ids(await collect(router.submit()))

    (prefill,), (decode,) = router.pairs()
    task = asyncio.create_task(tokens())
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    router.dispatcher.drain()
    router.leave(decode)
    await until(lambda: len(router.dispatcher.queue) == 1)
    return task


async def test_router_that_drains_gives_up_on_interrupted_requests() -> None:
    """A worker that has lost its stream is back in a moment."""
    router = Router(failover_timeout=60.0)
    task = await interrupted(router)
    again = router.join(Role.DECODE, "d0")
    prefill = next(fake for fake in router.fakes if fake.worker.role is Role.PREFILL)
    attempt, _ = await again.command("reserve")
    again.reserved(attempt)
    await prefill.command("prefill", 1)
    prefill.accepted(attempt)
    prefill.first(attempt, 1, 101, FinishReason.LENGTH)
    assert await task == [100, 101]
    router.assert_idle()


async def test_interrupted_request_waits_for_the_end_of_the_drain() -> None:
    """Not longer than it would otherwise, and it is told both: what happened, and that another router may do better."""
    router = Router(failover_timeout=0.05)
    task = await interrupted(router)
    with pytest.raises(Unavailable) as failure:
        await asyncio.wait_for(task, 5)
    assert (failure.value.reason, failure.value.retry_after_s) == ("DRAINING", 1.0)
    assert failure.value.message == (
        "interrupted by worker_lost, and no decode worker has joined; this router is shutting down"
    )
    router.assert_idle()


async def test_end_of_the_drain_leaves_an_interrupted_request_in_the_queue() -> None:
    router = Router(failover_timeout=60.0)
    task = await interrupted(router)
    task.cancel()  # as `OpenCalls.end_all` does
    with pytest.raises(asyncio.CancelledError):
        await task
    router.assert_idle()


async def test_refusal_without_prefill_hides_what_was_asked_for() -> None:
    """C36."""
    router = Router()
    router.join(Role.DECODE, "d")
    refusal = refused(router)
    assert refusal.reason == "NO_WORKERS"
    assert refusal.message == "no prefill worker has joined (--without-prefill refuse)"


async def test_refusal_without_decode_speaks_of_prefill() -> None:
    router = Router()
    router.join(Role.PREFILL, "p")
    assert "without-prefill" not in refused(router).message


@pytest.mark.parametrize("smaller", list(Role))
async def test_prompt_that_no_pair_can_hold_waits(smaller: Role) -> None:
    """Each role has a worker for it, but the two are not linked: validation, which knows roles only, lets it pass."""
    router = Router()
    small = {"num_blocks": 5}
    router.join(Role.PREFILL, "p0", **(small if smaller is Role.PREFILL else {}))
    linked = router.join(Role.DECODE, "d0", **(small if smaller is Role.DECODE else {}))
    apart = router.join(smaller, "apart")
    for worker in router.membership.of_role(Role.PREFILL):
        for peer in (linked.worker.worker_id, apart.worker.worker_id):
            is_apart = "apart" in (worker.worker_id, peer)
            if is_apart:
                worker.links.pop(peer, None)
    assert router.membership.limits().max_prompt_tokens_decode >= 200
    assert refused(router, 200).message == "no linked pair of workers here can hold 200 tokens"
    flow = router.submit(40)
    await flow.aclose()


async def test_more_samples_than_a_worker_runs_wait() -> None:
    router = Router()
    router.join(Role.PREFILL, "p")
    router.join(Role.DECODE, "d", max_num_seqs=2)
    assert refused(router, n=3).reason == "NO_WORKERS"


async def test_worker_that_has_just_fallen_silent_is_missed_at_once() -> None:
    """A busy machine may be late with its beats: the request waits the moment that it takes to know."""
    router = Router()
    _, (decode,) = router.pairs()
    decode.worker.last_heard = asyncio.get_running_loop().time() - 2 * router.config.suspect_timeout
    assert not router.membership.candidates(Role.DECODE)
    flow = router.submit()
    await flow.aclose()
