"""Workers that are about to end, and those whose engine says nothing: no new work, no failure, no death."""

import asyncio
from dataclasses import replace

import pytest

from router.join import ClusterServicer
from router.request import FinishReason
from router.worker import Role
from splitserve.service.errors import Unavailable
from splitserve.service.reasons import Reason
from splitserve.v1 import cluster_pb2 as pb
from tests.router.cluster_fakes import FakeWorker, Router, collect, ids, ticket
from tests.router.driving import hand_off, until
from tests.router.test_membership_unit import reserved_on, settle


def hear(router: Router, fake: FakeWorker, message: pb.WorkerMessage) -> None:
    """As if it had come on the worker's stream."""
    ClusterServicer(router.config, router.membership, "r")._on_message(fake.worker, message)


def drain(router: Router, fake: FakeWorker) -> None:
    hear(router, fake, pb.WorkerMessage(draining=pb.Draining(timeout_s=7.0)))


@pytest.mark.parametrize("role", list(Role))
async def test_draining_worker_is_given_work(role: Role) -> None:
    router = Router()
    prefills, decodes = router.pairs(2, 2)
    leaving = (prefills if role is Role.PREFILL else decodes)[0]
    drain(router, leaving)
    assert router.membership.state_of(leaving.worker) == "draining"
    tasks = [asyncio.create_task(collect(router.submit())) for _ in range(4)]
    await settle()
    for decode in decodes:
        for attempt in decode.channel.of_kind("reserve"):
            decode.reserved(attempt)
    await settle()
    assert not leaving.channel.commands
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    router.assert_idle()


@pytest.mark.parametrize("role", list(Role))
async def test_cluster_of_which_all_drain_is_ready(role: Role) -> None:
    """New requests are refused at once, and told why; a worker that joins then is all it takes."""
    router = Router()
    prefills, decodes = router.pairs()
    drain(router, (prefills if role is Role.PREFILL else decodes)[0])
    with pytest.raises(Unavailable, match=f"every {role.value} worker is about to end") as refused:
        router.submit()
    assert refused.value.reason == "NO_WORKERS"
    assert refused.value.retry_after_s is not None
    assert router.membership.limits().max_model_len == 1024
    router.join(role, "fresh")
    router.submit()


async def test_prompt_is_promised_the_room_of_a_worker_that_leaves() -> None:
    router = Router()
    router.join(Role.PREFILL, "p")
    router.join(Role.DECODE, "small", num_blocks=10)
    large = router.join(Role.DECODE, "large", num_blocks=20)
    assert router.membership.limits().max_prompt_tokens_decode > 10 * 16
    drain(router, large)
    assert router.membership.limits().max_prompt_tokens_decode <= 10 * 16


@pytest.mark.parametrize("end", ["leave", "stream", "refused", "ended"])
async def test_drain_counts_as_a_failure(end: str) -> None:
    """However it ends, a request with one attempt to lose goes on: nothing has failed."""
    router = Router(max_attempts=1, suspect_timeout=0.01)
    (prefill,), (leaving,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await leaving.command("reserve")
    drain(router, leaving)
    staying = router.join(Role.DECODE, "staying")
    if end == "refused":
        leaving.refused(attempt, Reason.DRAINING)
    else:
        leaving.reserved(attempt)
        handed_over, _ = await prefill.command("prefill")
        prefill.accepted(handed_over)
        prefill.first(handed_over, 0, 100)
        leaving.token(attempt, 1, 101)
        await settle()
    if end == "leave":
        hear(router, leaving, pb.WorkerMessage(leave=pb.Leave()))
        assert "close" in [kind for kind, _, _ in leaving.channel.commands]
    elif end == "stream":
        router.leave(leaving, "its stream ended")
        assert not router.membership.deaths_among({"d0"})
    elif end == "ended":
        leaving.ended(attempt, Reason.DRAINING)
    again, _ = await staying.command("reserve")
    staying.reserved(again)
    handed_over, _ = await prefill.command("prefill", 0 if end == "refused" else 1)
    prefill.accepted(handed_over)
    position = 0 if end == "refused" else 2
    prefill.first(handed_over, position, 102, FinishReason.LENGTH)
    assert ids(await task) == ([102] if end == "refused" else [100, 101, 102])
    router.assert_idle()


@pytest.mark.parametrize("answer", ["ticket", "refusal"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before the first token", "after it"])
async def test_reservation_on_a_draining_worker_is_not_renewed(is_late: bool, answer: str) -> None:
    """What it has accepted goes on, and it has the last word on that: to refuse another ticket is no failure either.

    The one failure that a request with two attempts may have is that of the prefill worker."""
    router = Router(max_attempts=2)
    (failing,), (leaving,) = router.pairs()
    flow = router.submit()
    task = asyncio.create_task(collect(flow))
    attempt = await hand_off(failing, leaving)
    drain(router, leaving)
    outputs = (100,) if is_late else ()
    if is_late:
        failing.first(attempt, 0, 100)
        await settle()
    prefill, staying = router.join(Role.PREFILL, "p1"), router.join(Role.DECODE, "staying")
    failing.ended(attempt, Reason.TRANSFER_FAILED)
    await leaving.command("renew")
    assert leaving.channel.renewals == [(attempt, ticket(attempt, 1), {0: outputs})]
    decode, position = leaving, len(outputs)
    if answer == "ticket":
        leaving.reserved(attempt, 2)
        await until(lambda: ticket(attempt, 2) in prefill.channel.tickets)
        prefill.accepted(attempt)
    else:
        leaving.refused(attempt, Reason.DRAINING)
        failing.worker.links.clear()
        decode = staying
        attempt = await hand_off(prefill, staying)
    prefill.first(attempt, position, 100 + position)
    decode.token(attempt, position, 100 + position)
    decode.token(attempt, position + 1, 101 + position, FinishReason.LENGTH)
    assert ids(await task) == list(range(100, 102 + position))
    assert flow.attempts == (1 if answer == "ticket" else 2)
    assert bool(staying.channel.commands) == (answer == "refusal")
    router.assert_idle()


# Idle engines that say nothing


async def test_engine_that_is_frozen_while_idle_is_given_work() -> None:
    """Its front beats, and there is no step to be late with."""
    router = Router()
    _, (frozen, fresh) = router.pairs(1, 2)
    frozen.worker.load = replace(frozen.worker.load, silence_s=1.2)
    tasks = [asyncio.create_task(collect(router.submit())) for _ in range(2)]
    await settle()
    assert (reserved_on(frozen), reserved_on(fresh)) == (0, 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_engine_deep_in_a_step_is_taken_for_frozen() -> None:
    router = Router()
    _, (computing,) = router.pairs()
    computing.worker.load = replace(computing.worker.load, silence_s=5.0, step_age_s=5.0)
    assert computing.worker in router.membership.candidates(Role.DECODE)


@pytest.mark.parametrize(("silence_s", "is_kept"), [(9.9, True), (10.1, False)])
async def test_engine_that_is_frozen_while_idle_is_kept(silence_s: float, is_kept: bool) -> None:
    router = Router()
    _, (frozen,) = router.pairs()
    frozen.worker.load = replace(frozen.worker.load, silence_s=silence_s)
    watching = asyncio.create_task(router.membership.watch())
    await settle()
    watching.cancel()
    assert (router.membership.get("d0") is frozen.worker) == is_kept
