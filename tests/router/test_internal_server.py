"""The port where workers join, after the router's name has got another address: nobody listens there, or nowhere."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from router import internal_server
from router.internal_server import InternalServer, resolve
from splitserve.v1 import cluster_pb2_grpc as pb_grpc

# Loopback has them all; the last one is reserved for documents, so that no machine has it.
OLD, NEW, ELSEWHERE = "127.0.0.1", "127.0.0.2", "192.0.2.1"


class Names:
    """What the name stands for; None: for nothing."""

    def __init__(self) -> None:
        self.addresses: frozenset[str] | None = frozenset({OLD})
        self._looks: asyncio.Queue[None] = asyncio.Queue()

    async def resolve(self, host: str) -> frozenset[str]:
        assert host == "router-on-cluster"
        self._looks.put_nowait(None)
        if self.addresses is None:
            raise socket.gaierror("no such name")
        return self.addresses

    async def become(self, *addresses: str) -> None:
        """Returns when the server has acted on it."""
        self.addresses = frozenset(addresses) or None
        for _ in range(self._looks.qsize() + 2):
            await self._looks.get()


async def is_open(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    monkeypatch.setattr(internal_server, "_LOOK_UP_INTERVAL_S", 0.01)
    return Names()


@pytest.fixture
async def server(names: Names) -> AsyncIterator[InternalServer]:
    server = InternalServer(pb_grpc.ClusterServiceServicer(), "router-on-cluster", 0, names.resolve)
    yield server
    await server.stop()


async def test_router_is_deaf_at_its_new_address_or_listens_at_the_old_one(
    server: InternalServer, names: Names
) -> None:
    port = await server.start()
    following = asyncio.create_task(server.follow())
    assert (await is_open(OLD, port), await is_open(NEW, port)) == (True, False)
    await names.become(NEW)
    assert (await is_open(OLD, port), await is_open(NEW, port)) == (False, True)
    # One of them stays: its port is taken for a moment.
    await names.become(NEW, OLD)
    assert (await is_open(OLD, port), await is_open(NEW, port)) == (True, True)
    following.cancel()


@pytest.mark.parametrize("addresses", [(), (ELSEWHERE,)], ids=["none", "elsewhere"])
async def test_name_that_is_gone_or_leads_elsewhere_closes_the_port(
    server: InternalServer, names: Names, addresses: tuple[str, ...]
) -> None:
    port = await server.start()
    following = asyncio.create_task(server.follow())
    await names.become(*addresses)
    assert await is_open(OLD, port)
    await names.become(NEW)
    assert await is_open(NEW, port)
    following.cancel()


async def test_router_starts_where_it_cannot_listen(server: InternalServer, names: Names) -> None:
    names.addresses = frozenset({ELSEWHERE})
    with pytest.raises(OSError, match=ELSEWHERE):
        await server.start()


async def test_address_has_no_name() -> None:
    assert await resolve("0.0.0.0") == {"0.0.0.0"}
    assert await resolve("::1") == {"::1"}
