"""The front process of a worker: joins routers, answers health and metrics, and watches its engine process.

One event loop and no torch, so that heartbeats never wait for a step. The engine's reports go up to the router that
each belongs to; the routers' commands go down. When the engine ends or stands still, the front ends too: every `Join`
stream closes, which is how routers learn of a death.
"""

import asyncio
import contextlib
import enum
import os
import socket
import uuid

import structlog
from msgspec.structs import replace

from splitserve.service.lifecycle import StopRequest, first_of, run_loop
from splitserve.service.logging import configure_logging
from splitserve.service.startup import process_age_s, startup_line
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import commands, reports, translate
from splitserve.worker.child import EngineProcess
from splitserve.worker.config import WorkerConfig
from splitserve.worker.http import WorkerHttp
from splitserve.worker.join import Joiner, RouterConnection

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_WATCH_INTERVAL_S = 0.5
# Beyond its interval the watchdog comes late by this much only if it could not run itself.
_OWN_STANDSTILL_S = 1.0
_LAST_WORDS_S = 0.5
# An engine whose drain is over still waits for the transfers that it has ended.
_DRAIN_SLACK_S = 2.0
_LEAVE_S = 1.0


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def proto(self) -> pb.Role.ValueType:
        return pb.ROLE_PREFILL if self is Role.PREFILL else pb.ROLE_DECODE


def run_front(role: Role, config: WorkerConfig) -> int:
    """The whole life of a worker; returns its exit status (of a start that failed: `exit_status_of` why)."""
    configure_logging(f"{role.value}_worker")
    return run_loop(lambda stop: Front(role, config).run(stop), config.parent_fd)


class Front:
    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self._role = role
        self._config = config
        # Random per start: a restarted worker is never taken for its predecessor.
        self._worker_id = f"{role.value}-{uuid.uuid4().hex[:12]}"
        self._engine: EngineProcess
        self._joiner: Joiner
        self._http: WorkerHttp
        self._load: reports.Load
        self._links: dict[str, reports.LinkReport] = {}
        self._is_draining = False
        self._drained = asyncio.Event()

    async def run(self, stop: StopRequest) -> int:
        before_engine_s = process_age_s()
        self._engine = await EngineProcess.start(f"{self._role.value}_worker.engine")
        try:
            ready = await self._start_engine(stop)
            if ready is None:
                return stop.status
            await self._serve(replace(ready, startup={"front": before_engine_s} | ready.startup), stop)
            log.info("stopping", reason=stop.reason)
            return stop.status
        finally:
            await self._engine.stop()

    async def _start_engine(self, stop: StopRequest) -> reports.Ready | None:
        """Waits for the model to be loaded; None when the engine cannot serve or `stop` came first."""
        self._engine.link.send(commands.Configure(worker_id=self._worker_id, config=self._config))
        ready: reports.Ready | None = None

        async def await_ready() -> None:
            nonlocal ready
            while True:
                match await self._engine.link.receive():
                    case reports.Progress(text=text):
                        log.info("starting", step=text)
                    case reports.Ready() as report:
                        ready = report
                        return
                    case reports.StartFailed(message=message, status=status):
                        log.error("cannot serve", reason=message)
                        stop.set(message, status)
                        return
                    case None:
                        stop.set("the engine process ended during start-up", 1)
                        return

        await first_of(await_ready(), stop.wait(), stop.wait_for_drain())
        if ready is None and stop.status:
            log.error("start-up failed", reason=stop.reason)
        return ready

    async def _serve(self, ready: reports.Ready, stop: StopRequest) -> None:
        self._load = reports.Load(ready.num_blocks, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        hello = translate.hello_message(
            ready, worker_id=self._worker_id, role=self._role.proto, host_id=_host_id(), pid=os.getpid()
        )
        self._joiner = Joiner(
            self._config.router,
            hello,
            self._load_message,
            self._on_router_message,
            self._on_router_end,
            rejoin_interval_s=self._config.rejoin_interval,
        )
        self._http = WorkerHttp(
            ready,
            self._joined_routers,
            lambda: self._is_draining,
            self._engine.clock.read,
            self._config.stall_timeout,
        )
        async with self._http.serving(self._config.bind, self._config.http_port) as port:
            log.info(
                "ready",
                worker_id=self._worker_id,
                blocks=ready.num_blocks,
                http_port=port,
                kv=ready.kv_endpoint.tcp,
                startup=startup_line(process_age_s(), ready.startup, _details(ready)),
            )
            await first_of(
                self._joiner.run(), self._read_reports(stop), self._watch(stop), self._drain(stop), stop.wait()
            )

    async def _drain(self, stop: StopRequest) -> None:
        """When asked to: no new work, what is here goes on for a while, and every router hears that it is over."""
        await stop.wait_for_drain()
        timeout_s = self._config.drain_timeout
        log.info("draining", timeout_s=timeout_s)
        self._is_draining = True
        self._joiner.join_no_more()
        self._engine.link.send(commands.Drain(timeout_s=timeout_s))
        self._joiner.send(pb.WorkerMessage(draining=pb.Draining(timeout_s=timeout_s)))
        try:
            async with asyncio.timeout(timeout_s + _DRAIN_SLACK_S):
                await self._drained.wait()
        except TimeoutError:
            log.warning("the engine does not let go of all that it has")
        await self._joiner.leave(_LEAVE_S)
        stop.set("drained")

    # From the engine

    async def _read_reports(self, stop: StopRequest) -> None:
        while (report := await self._engine.link.receive()) is not None:
            self._on_report(report)
        await self._joiner.flush(_LAST_WORDS_S)
        stop.set("the engine process ended", 1)

    def _on_report(self, report: reports.Report) -> None:
        match report:
            case reports.Load():
                self._load = report
                self._http.set_load(report)
                self._joiner.send(self._load_message())
            case reports.LinkReport():
                self._links[report.peer] = report
                self._joiner.send(translate.to_worker_message(report))
            case (
                reports.TransferReport()
                | reports.TransportFallback()
                | reports.CacheLookup()
                | reports.Ignored()
                | reports.Step()
                | reports.Slots()
            ):
                self._http.count(report)
            case reports.Progress(text=text):
                log.info("engine", step=text)
            case reports.Drained():
                self._drained.set()
            case reports.Ready() | reports.StartFailed():
                log.error("unexpected report", type=type(report).__name__)
            case _:
                self._pass_on(report)

    def _pass_on(self, report: reports.AttemptReport) -> None:
        """To the router whose attempt it is about, if that is still there."""
        if isinstance(report, reports.FirstTokens | reports.StepTokens):
            self._http.count(report)
        receiver = self._joiner.connections.get(report.session)
        if receiver is not None:
            receiver.send(translate.to_worker_message(report))

    async def _watch(self, stop: StopRequest) -> None:
        """Ends the worker when a step makes no progress for its limit, or an idle engine shows no sign of life. The
        engine watches this loop by its beats."""
        limit = self._config.stall_timeout
        now = asyncio.get_running_loop().time
        judged_from, looked_at = 0.0, now()
        while True:
            self._engine.clock.beat_front()
            if now() - looked_at > _WATCH_INTERVAL_S + _OWN_STANDSTILL_S:
                # This process was stopped or swapped out, and the engine may have been with it.
                judged_from = now() + limit
            looked_at = now()
            signs = self._engine.clock.read()
            if signs.standstill_s > limit and looked_at >= judged_from:
                log.error("the engine stands still", step_age_s=signs.step_age_s, silence_s=signs.silence_s)
                with contextlib.suppress(ProcessLookupError):
                    self._engine.process.kill()
                stop.set("the engine stands still", 1)
                return
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _joined_routers(self) -> list[str]:
        return [connection.address for connection in self._joiner.connections.values() if connection.is_joined]

    def _load_message(self) -> pb.WorkerMessage:
        return translate.load_message(self._load, self._engine.clock.read())

    # From routers

    def _on_router_message(self, connection: RouterConnection, message: pb.RouterMessage) -> None:
        if message.WhichOneof("body") == "peers":
            connection.peers = list(message.peers.peers)
            self._set_peers()
            for report in self._links.values():
                connection.send(translate.to_worker_message(report))
            return
        command = translate.to_command(message, connection.session)
        if command is not None:
            self._engine.link.send(command)

    def _on_router_end(self, connection: RouterConnection) -> None:
        self._engine.link.send(commands.EndSession(session=connection.session))
        self._set_peers()

    def _set_peers(self) -> None:
        """Blocks flow from prefill to decode workers, so that is who dials: the sinks of every router together."""
        if self._role is not Role.PREFILL:
            return
        endpoints = {
            peer.worker_id: translate.to_endpoint(peer.kv_endpoint)
            for connection in self._joiner.connections.values()
            for peer in connection.peers
            if peer.role == pb.ROLE_DECODE
        }
        self._links = {peer: report for peer, report in self._links.items() if peer in endpoints}
        self._engine.link.send(commands.SetPeers(endpoints=endpoints))


def _details(ready: reports.Ready) -> str:
    memory = ready.memory
    sizes = {"weights": memory.weights, "packed weights": memory.packed_weights, "KV pool": memory.kv_pool}
    sizes |= {"in huge pages": memory.huge_pages}
    in_mib = ", ".join(f"{what} {nbytes / (1 << 20):,.0f}" for what, nbytes in sizes.items())
    backends = f"linear layers by {ready.linear}, attention by {ready.attention}, layers {ready.layers}"
    return f"memory in MiB: {in_mib}; {backends}"


def _host_id() -> str:
    """Stable per machine and boot, and alike in all containers there; for placement and display, never for trust."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
