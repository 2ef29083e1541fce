"""A worker's side of `Join`: finds every router behind one name, keeps a stream to each, and tells them apart.

Lives on the front's event loop. Workers dial and routers never do, so no client can make a worker dial an address.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import structlog

from splitserve.service.lifecycle import first_of
from splitserve.service.limits import GRPC_MESSAGE_OPTIONS
from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1.cluster_pb2_grpc import ClusterServiceStub

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_WELCOME_TIMEOUT_S = 5.0
_CHANNEL_OPTIONS = [
    *GRPC_MESSAGE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # One connection per stream: routers behind one name must not share a channel of the pool.
    ("grpc.use_local_subchannel_pool", 1),
]


class RouterConnection:
    """One `Join` stream, from hello to its end. `session` is this process's own number for it."""

    def __init__(self, session: int, address: str, hello: pb.WorkerMessage, heartbeat: Callable[[], pb.WorkerMessage]):
        self.session = session
        self.address = address
        self.router_id = ""
        self.peers: list[pb.Peer] = []
        self.has_ended = asyncio.Event()
        self._hello = hello
        self._heartbeat = heartbeat
        self._outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()

    @property
    def is_joined(self) -> bool:
        return bool(self.router_id)

    def send(self, message: pb.WorkerMessage) -> None:
        self._outgoing.put_nowait(message)

    async def run(self, on_message: Callable[["RouterConnection", pb.RouterMessage], None]) -> str:
        """Keeps the stream until it ends, and returns why it did."""
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            call = ClusterServiceStub(channel).Join()
            try:
                async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                    await call.write(self._hello)
                    first = await call.read()
                if not isinstance(first, pb.RouterMessage):
                    return f"{await call.code()}: {await call.details()}"
                if first.WhichOneof("body") != "welcome":
                    return "the router did not answer with a welcome"
                welcome = first.welcome
                self.router_id = welcome.router_id
                log.info("joined", router=self.address, router_id=self.router_id)
                await first_of(
                    self._read(call, welcome.heartbeat_timeout_s, on_message),
                    self._write(call),
                    self._beat(welcome.heartbeat_interval_s),
                )
            except TimeoutError:
                return "no sign of life from the router"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            finally:
                call.cancel()
        return "the router closed the stream"

    async def _read(
        self,
        call: "grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.RouterMessage]",
        timeout_s: float,
        on_message: Callable[["RouterConnection", pb.RouterMessage], None],
    ) -> None:
        while True:
            async with asyncio.timeout(timeout_s):
                message = await call.read()
            if not isinstance(message, pb.RouterMessage):
                return
            on_message(self, message)

    async def _write(self, call: "grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.RouterMessage]") -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError:  # it ended just now, before the reader was told
                return
            self._outgoing.task_done()

    async def flush(self) -> None:
        """Waits until all that was said is on its way."""
        await self._outgoing.join()

    async def _beat(self, interval_s: float) -> None:
        while True:
            self.send(self._heartbeat())
            await asyncio.sleep(interval_s)


class Joiner:
    """Keeps one connection to every address behind the router's name."""

    def __init__(
        self,
        target: str,
        hello: pb.WorkerMessage,
        heartbeat: Callable[[], pb.WorkerMessage],
        on_message: Callable[[RouterConnection, pb.RouterMessage], None],
        on_end: Callable[[RouterConnection], None],
        rejoin_interval_s: float,
    ) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._hello = hello
        self._heartbeat = heartbeat
        self._on_message = on_message
        self._on_end = on_end
        self._rejoin_interval_s = rejoin_interval_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._router_ids: dict[str, str] = {}
        self._next_session = 1
        self._is_dialling = True
        self.connections: dict[int, RouterConnection] = {}

    async def run(self) -> None:
        """Resolves and dials until cancelled."""
        try:
            while True:
                for address in await self._resolve():
                    if self._is_dialling and address not in self._tasks and not self._is_alias(address):
                        self._dial(address)
                await asyncio.sleep(2 * self._rejoin_interval_s)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _dial(self, address: str) -> None:
        task = self._tasks[address] = asyncio.create_task(self._connect(address))
        # However it ends, the address may be dialled again.
        task.add_done_callback(lambda _: self._tasks.pop(address))

    async def _resolve(self) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._host.strip("[]"), self._port, proto=6)
        except OSError as error:
            log.warning("the router's name does not resolve", name=self._host, error=str(error))
            return []
        hosts = {info[4][0]: None for info in found}
        return [f"[{host}]:{self._port}" if ":" in str(host) else f"{host}:{self._port}" for host in hosts]

    def _is_alias(self, address: str) -> bool:
        """Whether this address led to a router that is joined under another one (the same host over IPv4 and IPv6)."""
        known = self._router_ids.get(address)
        return known is not None and any(c.router_id == known for c in self.connections.values())

    async def _connect(self, address: str) -> None:
        connection = RouterConnection(self._next_session, address, self._hello, self._heartbeat)
        self._next_session += 1
        self.connections[connection.session] = connection
        try:
            reason = await connection.run(self._on_message)
            if connection.is_joined:
                self._router_ids[address] = connection.router_id
                log.warning("left", router=address, reason=reason)
            else:
                log.info("cannot join yet", router=address, reason=reason)
        except Exception:
            # A fault of ours on one stream must not cost the others: this address is dialled again.
            log.exception("the connection failed", router=address)
        finally:
            del self.connections[connection.session]
            connection.has_ended.set()
            self._on_end(connection)
        await asyncio.sleep(self._rejoin_interval_s)

    @property
    def _joined(self) -> list[RouterConnection]:
        return [connection for connection in self.connections.values() if connection.is_joined]

    def join_no_more(self) -> None:
        """From now on no router is dialled; where a welcome has not come yet, it is too late."""
        self._is_dialling = False
        for connection in self.connections.values():
            if not connection.is_joined:
                self._tasks[connection.address].cancel()

    def send(self, message: pb.WorkerMessage) -> None:
        """To every router."""
        for connection in self._joined:
            connection.send(message)

    async def leave(self, timeout_s: float) -> None:
        """Says that nothing is left here. Routers answer by ending the stream, which shows that they have read all."""
        joined = self._joined
        self.send(pb.WorkerMessage(leave=pb.Leave()))
        await _within(timeout_s, *(connection.has_ended.wait() for connection in joined))

    async def flush(self, timeout_s: float) -> None:
        """Lets the last words out before the streams are closed, but does not wait long for a router to read them."""
        await _within(timeout_s, *(connection.flush() for connection in self._joined))


async def _within(timeout_s: float, *awaitables: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*awaitables)
