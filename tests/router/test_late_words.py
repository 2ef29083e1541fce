"""Words of workers about attempts that this router does not have: a worker that holds something is told to let go."""

import asyncio

import pytest
from prometheus_client import generate_latest

from router.join import ClusterServicer
from router.worker import Role
from splitserve.v1 import cluster_pb2 as pb
from tests.router.cluster_fakes import FakeWorker, Router, collect


def hear(router: Router, fake: FakeWorker, kind: str, attempt: str = "gone") -> None:
    """One word, as it comes from the worker's stream."""
    message = pb.WorkerMessage()
    body = getattr(message, kind)
    if kind == "step_tokens":
        body.tokens.add(attempt_id=attempt, position=0, token_id=7)
    else:
        body.attempt_id = attempt
    servicer = ClusterServicer(router.config, router.membership, "r", router.metrics.count_ignored)
    servicer._on_message(fake.worker, message)


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("reserved", True),
        ("accepted", True),
        ("transfer_lost", True),
        ("already_running", True),
        ("transferred", False),
        ("refused", False),
        ("first_tokens", False),
        ("prompt_logprobs", False),
        ("step_tokens", False),
        ("attempt_ended", False),
    ],
)
async def test_late_word_leaves_blocks_with_a_worker(kind: str, holds: bool) -> None:
    router = Router()
    decode = router.join(Role.DECODE, "d0")
    hear(router, decode, kind)
    assert decode.channel.of_kind("release") == (["gone"] if holds else [])
    page = generate_latest(router.registry).decode()
    assert f'splitserve_messages_ignored_total{{kind="{kind}",model="tiny"}} 1.0' in page


async def test_reservation_for_a_client_that_left_is_kept() -> None:
    """The client leaves while decode is asked, and whatever decode says afterwards finds nobody."""
    router = Router()
    _, (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    released = len(decode.channel.of_kind("release"))
    hear(router, decode, "reserved", attempt)
    assert len(decode.channel.of_kind("release")) == released + 1
    router.assert_idle()


async def test_word_of_a_live_attempt_is_counted_as_late() -> None:
    router = Router()
    _, (decode,) = router.pairs()
    task = asyncio.create_task(collect(router.submit()))
    attempt, _ = await decode.command("reserve")
    hear(router, decode, "reserved", attempt)
    assert "splitserve_messages_ignored_total{" not in generate_latest(router.registry).decode()
    assert decode.channel.of_kind("release") == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
