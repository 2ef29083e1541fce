"""The floor of what goes through a socket: `sendall` on one side, `recv_into` on the other, and nothing else.

The bytes land where they belong; nobody checks them.
"""

import socket
from collections.abc import Sequence

from splitserve.bench.kv.pool import HostPool
from splitserve.bench.kv.ways import PATIENCE_S
from splitserve.service.errors import Internal
from splitserve.service.ports import LOOPBACK

_ACK = b"."


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Connected over loopback."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), PATIENCE_S)
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


class SocketReceiver:
    def __init__(self, pool: HostPool, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self._pool = pool
        self._socket = sock
        self._num_due, self._num_blocks = 0, 0

    @property
    def address(self) -> bytes:
        """None is needed: the pair is connected."""
        return b""

    def prepare(self, transfer_ids: Sequence[str], num_blocks: int) -> None:
        self._num_due, self._num_blocks = len(transfer_ids), num_blocks

    def receive(self) -> None:
        for _ in range(self._num_due):
            rest = self._pool.part(self._num_blocks)
            while rest:
                num_bytes = self._socket.recv_into(rest)
                if not num_bytes:
                    raise Internal("the source has ended")
                rest = rest[num_bytes:]
            self._socket.sendall(_ACK)

    def close(self) -> None:
        self._socket.close()


class SocketSender:
    def __init__(self, pool: HostPool, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self._pool = pool
        self._socket = sock

    def send(self, transfer_id: str, num_blocks: int) -> None:
        self._socket.sendall(self._pool.part(num_blocks))
        if self._socket.recv(len(_ACK)) != _ACK:
            raise Internal("the sink has ended")

    def close(self) -> None:
        self._socket.close()
