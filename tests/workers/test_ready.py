"""A worker that is called ready although its engine could compute nothing, or unhealthy although it could (C69)."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from splitserve.worker.clock import Signs
from splitserve.worker.engine_setup import ready_report
from splitserve.worker.http import WorkerHttp
from tests.workers.pair import Pair

STALL_TIMEOUT_S = 10.0

IDLE = Signs(7, 0.0, 0.2)
COMPUTING = Signs(7, 4.9, 4.9)
STUCK_IN_A_STEP = Signs(7, 5.1, 5.1)
FROZEN_WHILE_IDLE = Signs(7, 0.0, 5.1)


class Worker:
    """What the page asks for."""

    def __init__(self) -> None:
        self.routers = ["router:50052"]
        self.signs = IDLE
        self.is_draining = False


async def ask(pair: Pair, worker: Worker) -> tuple[int, Any, bool]:
    """The status code, the word, and whether it is others that are missing."""
    http = WorkerHttp(
        ready_report(pair.decode.engine._context),
        lambda: worker.routers,
        lambda: worker.is_draining,
        lambda: worker.signs,
        STALL_TIMEOUT_S,
    )
    transport = httpx.ASGITransport(http._app())
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        answer = await client.get("/health/ready")
        assert (await client.get("/health/live")).status_code == 200
    return answer.status_code, answer.json()["status"], "retry-after" in answer.headers


async def test_engine_that_stands_still_is_called_ready(make_pair: Callable[..., Pair]) -> None:
    pair, worker = make_pair(), Worker()
    for signs in (IDLE, COMPUTING):
        worker.signs = signs
        assert await ask(pair, worker) == (200, "ready", False)
    for signs in (STUCK_IN_A_STEP, FROZEN_WHILE_IDLE):
        worker.signs = signs
        assert await ask(pair, worker) == (503, "the engine has stood still for 5.1 s", False)


@pytest.mark.parametrize(
    ("change", "status", "waits"),
    [({"routers": []}, "no router has been joined", True), ({"is_draining": True}, "draining", False)],
    ids=["alone", "draining"],
)
async def test_worker_that_takes_no_work_is_called_ready(
    make_pair: Callable[..., Pair], change: dict[str, Any], status: str, waits: bool
) -> None:
    worker = Worker()
    for name, value in change.items():
        setattr(worker, name, value)
    assert await ask(make_pair(), worker) == (503, status, waits)
