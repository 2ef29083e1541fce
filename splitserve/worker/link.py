"""The local socket between a worker's front and its engine: length-prefixed msgpack, `commands` down, `reports` up.

The engine side is blocking and used from plain threads; the front side is asyncio. Both refuse a frame above the limit,
and for both the end of the socket is the end of the other process.
"""

import asyncio
import socket
import struct
import threading

import msgspec

from splitserve.worker.commands import Command
from splitserve.worker.messages import MAX_MESSAGE_BYTES
from splitserve.worker.reports import Report

_LENGTH = struct.Struct("<I")
# A front that does not read for this long is taken for dead.
_SEND_TIMEOUT_S = 10
_SOCKET_BUFFER_BYTES = 4 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair (front's, engine's) with room for many steps, so that a busy front never stops the engine."""
    front, engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (front, engine):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return front, engine


def _frame(payload: bytes) -> bytes:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class EngineLink:
    """The engine's end: `send` from any thread, `receive` from one reader thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        seconds = struct.pack("ll", _SEND_TIMEOUT_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._reader = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Raises OSError when the front is gone or does not read."""
        with self._lock:
            self._socket.sendall(_frame(self._encoder.encode(report)))

    def receive(self) -> Command | None:
        """Blocks for the next command; None when the front is gone."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            return None
        payload = self._reader.read(length)
        return self._decoder.decode(payload) if len(payload) == length else None


class FrontLink:
    """The front's end, on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

    @classmethod
    async def open(cls, sock: socket.socket) -> "FrontLink":
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, command: Command) -> None:
        """Queues the command; commands are small and the engine always reads. To an engine that is gone it is lost."""
        if self._writer.is_closing():
            return
        self._writer.write(_frame(self._encoder.encode(command)))

    async def receive(self) -> Report | None:
        """The next report; None when the engine is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                return None
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
