"""Raw ZeroMQ sockets over TCP, in the clear or with CURVE: what encryption costs, without the protocol around it.

DEALER to ROUTER, a frame for each block, as many in a message as a KV agent sends, copied into the pool on arrival.
"""

from collections.abc import Sequence

import msgspec
import zmq

from kvtransfer.messages import MAX_BLOCKS_PER_MESSAGE
from kvtransfer.settings import KVSettings
from splitserve.bench.kv.pool import HostPool
from splitserve.bench.kv.ways import PATIENCE_S
from splitserve.service.errors import Internal
from splitserve.service.ports import LOOPBACK

_ACK = b"."
_Socket = zmq.Socket[bytes]


class _Address(msgspec.Struct, frozen=True):
    endpoint: str
    server_key: bytes = b""


class ZmqReceiver:
    def __init__(self, pool: HostPool, is_encrypted: bool) -> None:
        self._pool = pool
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._socket = _new_socket(self._context, zmq.ROUTER)
        public_key = b""
        if is_encrypted:
            public_key, secret_key = zmq.curve_keypair()
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret_key
        # As an agent's credit does: what may wait here unread.
        self._socket.set(zmq.RCVHWM, max(1, KVSettings.window_bytes // _message_nbytes(pool)))
        self._socket.bind(f"tcp://{LOOPBACK}:*")
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.address = msgspec.json.encode(_Address(endpoint, public_key))
        self._num_due, self._num_blocks = 0, 0

    def prepare(self, transfer_ids: Sequence[str], num_blocks: int) -> None:
        self._num_due, self._num_blocks = len(transfer_ids), num_blocks

    def receive(self) -> None:
        try:
            for _ in range(self._num_due):
                self._receive_one()
        except zmq.Again:
            raise Internal(f"nothing came for {PATIENCE_S:g} s") from None

    def _receive_one(self) -> None:
        block_id = 0
        while block_id < self._num_blocks:
            identity, *frames = self._socket.recv_multipart(copy=False)
            for frame in frames:
                self._pool.store.write(block_id, frame.buffer)
                block_id += 1
        self._socket.send_multipart([identity.bytes, _ACK])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZmqSender:
    def __init__(self, pool: HostPool, address: bytes) -> None:
        there = msgspec.json.decode(address, type=_Address)
        self._pool = pool
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._socket = _new_socket(self._context, zmq.DEALER)
        if there.server_key:
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = there.server_key
        self._socket.connect(there.endpoint)
        self._num_per_message = _message_nbytes(pool) // pool.block_nbytes

    def send(self, transfer_id: str, num_blocks: int) -> None:
        view, size = self._pool.store.view, self._num_per_message
        try:
            for first in range(0, num_blocks, size):
                frames = [view(block_id) for block_id in range(first, min(first + size, num_blocks))]
                self._socket.send_multipart(frames, copy=False)
            self._socket.recv()
        except zmq.Again:
            raise Internal(f"the sink took nothing for {PATIENCE_S:g} s") from None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _new_socket(context: "zmq.Context[_Socket]", kind: int) -> _Socket:
    made = context.socket(kind)
    made.set(zmq.LINGER, 0)
    for wait in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        made.set(wait, int(PATIENCE_S * 1000))
    return made


def _message_nbytes(pool: HostPool) -> int:
    """Whole blocks, at least one."""
    count = max(1, min(KVSettings.frame_bytes // pool.block_nbytes, MAX_BLOCKS_PER_MESSAGE))
    return count * pool.block_nbytes
