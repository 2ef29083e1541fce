"""Serves the internal gRPC port, where workers join. Run by the composition root, which gives it the servicer.

It listens on the addresses that a name has, and follows them: a container that is cut off from a network and connected
again has another one there, on which nobody would listen.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

import grpc.aio
import structlog

from router.grpc_server import SERVER_OPTIONS, add_port
from splitserve.v1 import cluster_pb2_grpc as pb_grpc

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# As often as workers look it up.
_LOOK_UP_INTERVAL_S = 2.0

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""Gives the addresses of a name, or of an address itself; OSError where it has none."""


async def resolve(host: str) -> frozenset[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return frozenset(str(address[0]) for *_, address in found)


class InternalServer:
    """`bind` is a name or an address, `port` may be 0 for a free one."""

    def __init__(
        self, servicer: pb_grpc.ClusterServiceServicer, bind: str, port: int, resolve: Resolve = resolve
    ) -> None:
        self._servicer = servicer
        self._bind = bind
        self._port = port
        self._resolve = resolve
        self._addresses: frozenset[str] = frozenset()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Returns the bound port; OSError if no address can be bound."""
        await self._listen(await self._resolve(self._bind))
        return self._port

    async def follow(self) -> None:
        """Listens elsewhere when the name has other addresses of this machine, until cancelled. What came in over the
        old ones ends."""
        while True:
            await asyncio.sleep(_LOOK_UP_INTERVAL_S)
            try:
                addresses = await self._resolve(self._bind)
                if addresses == self._addresses or not _are_ours(addresses):
                    continue
                await self.stop()
                await self._listen(addresses)
            except OSError as error:
                log.warning("cannot listen for workers now", name=self._bind, reason=str(error))
            else:
                log.warning("listening for workers elsewhere", name=self._bind, addresses=sorted(addresses))

    async def stop(self) -> None:
        """Ends every worker's stream at once. Idempotent."""
        server, self._server, self._addresses = self._server, None, frozenset()
        if server is not None:
            await server.stop(0)

    async def _listen(self, addresses: frozenset[str]) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_ClusterServiceServicer_to_server(self._servicer, server)
        errors = []
        for address in sorted(addresses):
            try:
                self._port = add_port(server, address, self._port)
            except OSError as error:
                errors.append(error)
        if len(errors) == len(addresses):
            raise errors[0]
        await server.start()
        self._server, self._addresses = server, addresses


def _are_ours(addresses: Iterable[str]) -> bool:
    """Whether an interface of this machine has one of them."""
    return any(_is_ours(address) for address in addresses)


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
