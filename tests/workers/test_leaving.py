"""A worker's front that drains: who it tells, in which order, and what it joins no more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from splitserve.service.lifecycle import StopRequest
from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1 import cluster_pb2_grpc as pb_grpc
from splitserve.worker import commands, reports
from splitserve.worker.child import EngineProcess
from splitserve.worker.config import WorkerConfig
from splitserve.worker.front import Front, Role
from splitserve.worker.join import Joiner, RouterConnection

PATIENCE_S = 30.0


class FakeRouter(pb_grpc.ClusterServiceServicer):
    """Welcomes every worker, unless told to keep silent, notes what each says and lets it go when it leaves."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.num_sessions = 0
        self.may_welcome = asyncio.Event()
        self.may_welcome.set()
        self.server: grpc.aio.Server

    async def Join(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.num_sessions += 1
        await context.read()
        await self.may_welcome.wait()
        welcome = pb.Welcome(router_id="r", session=1, heartbeat_interval_s=60.0, heartbeat_timeout_s=60.0)
        await context.write(pb.RouterMessage(welcome=welcome))
        while isinstance(message := await context.read(), pb.WorkerMessage):
            self.heard.append(str(message.WhichOneof("body")))
            if message.HasField("leave"):
                return


@contextlib.asynccontextmanager
async def joined(router: FakeRouter) -> AsyncIterator[Joiner]:
    """A worker's side of the stream to `router`, dialling all the time."""
    router.server = grpc.aio.server()
    pb_grpc.add_ClusterServiceServicer_to_server(router, router.server)
    port = router.server.add_insecure_port("127.0.0.1:0")
    await router.server.start()
    joiner = Joiner(
        f"127.0.0.1:{port}",
        pb.WorkerMessage(hello=pb.Hello(worker_id="w")),
        lambda: pb.WorkerMessage(load=pb.Load()),
        lambda connection, message: None,
        lambda connection: None,
        rejoin_interval_s=0.01,
    )
    running = asyncio.create_task(joiner.run())
    try:
        yield joiner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await router.server.stop(0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_joined(joiner: Joiner) -> bool:
    return any(connection.is_joined for connection in joiner.connections.values())


async def test_last_words_are_lost_when_a_worker_leaves() -> None:
    """`leave` is read behind everything else, and the stream is the router's to end."""
    router = FakeRouter()
    async with joined(router) as joiner:
        await until(lambda: is_joined(joiner))
        joiner.join_no_more()
        for _ in range(500):
            joiner.send(pb.WorkerMessage(step_tokens=pb.StepTokens()))
        await joiner.leave(PATIENCE_S)
        assert router.heard[-1] == "leave"
        assert router.heard.count("step_tokens") == 500
        assert not joiner.connections


async def test_router_that_does_not_listen_keeps_a_worker() -> None:
    router = FakeRouter()
    async with joined(router) as joiner:
        await until(lambda: is_joined(joiner))
        (connection,) = joiner.connections.values()
        connection.send = lambda message: None  # type: ignore[method-assign]
        await joiner.leave(0.05)
        assert joiner.connections


async def test_router_that_starts_anew_is_joined_by_a_worker_that_drains() -> None:
    """Neither dialled again after its end, nor joined where the welcome was still to come."""
    router = FakeRouter()
    async with joined(router) as joiner:
        await until(lambda: is_joined(joiner))
        joiner.join_no_more()
        await joiner.leave(PATIENCE_S)
        await asyncio.sleep(0.1)  # ten times as long as a worker waits before it dials again
        assert router.num_sessions == 1


async def test_router_that_is_late_with_its_welcome_is_joined_by_a_worker_that_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitserve.worker.join._WELCOME_TIMEOUT_S", 3600.0)
    router = FakeRouter()
    router.may_welcome.clear()
    async with joined(router) as joiner:
        await until(lambda: router.num_sessions == 1)
        joiner.join_no_more()
        await until(lambda: not joiner.connections)
        router.may_welcome.set()
        await asyncio.sleep(0.1)
        assert not joiner.connections


# The front's part


class FakeLink:
    def __init__(self) -> None:
        self.commands: list[commands.Command] = []

    def send(self, command: commands.Command) -> None:
        self.commands.append(command)


class FakeJoiner:
    """Notes what it is asked, together with whether the engine had drained by then."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.connections: dict[int, RouterConnection] = {}
        self.asked: list[tuple[str, bool]] = []

    def _note(self, what: str) -> None:
        self.asked.append((what, self._front._drained.is_set()))

    def join_no_more(self) -> None:
        self._note("join no more")

    def send(self, message: pb.WorkerMessage) -> None:
        self._note(str(message.WhichOneof("body")))

    async def leave(self, timeout_s: float) -> None:
        self._note("leave")


def front_with_fakes(drain_timeout: float) -> tuple[Front, FakeLink, FakeJoiner]:
    front = Front(Role.DECODE, WorkerConfig(drain_timeout=drain_timeout))
    unused: Any = None
    link, joiner = FakeLink(), FakeJoiner(front)
    front._engine = EngineProcess(unused, link, unused)  # type: ignore[arg-type]
    front._joiner = joiner  # type: ignore[assignment]
    return front, link, joiner


async def test_worker_leaves_before_its_engine_is_empty() -> None:
    front, link, joiner = front_with_fakes(60.0)
    stop = StopRequest()
    draining = asyncio.create_task(front._drain(stop))
    await asyncio.sleep(0)
    assert not link.commands
    stop.drain("SIGTERM")
    for _ in range(5):
        await asyncio.sleep(0)
    assert link.commands == [commands.Drain(60.0)]
    assert joiner.asked == [("join no more", False), ("draining", False)]
    assert not stop.is_set()
    front._on_report(reports.Drained())
    await draining
    assert joiner.asked[2:] == [("leave", True)]
    assert stop.is_set()
    assert stop.status == 0


async def test_engine_that_never_drains_keeps_its_worker(monkeypatch: Any) -> None:
    monkeypatch.setattr("splitserve.worker.front._DRAIN_SLACK_S", 0.0)
    front, _, joiner = front_with_fakes(0.01)
    stop = StopRequest()
    stop.drain("SIGTERM")
    await front._drain(stop)
    assert joiner.asked[-1] == ("leave", False)
    assert stop.status == 0


async def test_second_sigterm_is_ignored() -> None:
    stop = StopRequest()
    stop.drain("SIGTERM")
    assert not stop.is_set()
    stop.drain("SIGTERM")
    assert stop.is_set()
    assert stop.status == 0


async def test_stream_that_ends_while_something_is_written_is_a_failure_of_ours() -> None:
    class Ended:
        async def write(self, message: pb.WorkerMessage) -> None:
            raise asyncio.InvalidStateError("RPC already finished.")

    connection = RouterConnection(1, "router:50052", pb.WorkerMessage(), pb.WorkerMessage)
    connection.send(pb.WorkerMessage(leave=pb.Leave()))
    call: Any = Ended()
    async with asyncio.timeout(PATIENCE_S):
        await connection._write(call)
