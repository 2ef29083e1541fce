"""One outgoing ZeroMQ link: a DEALER that connects once and never again. Owned by `zeromq.ZeroMQCarrier`'s thread.

A DEALER that reconnects by itself sends what is left to a successor, or loses it without a word; so a lost connection
is a lost link, and the dialler makes a new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtransfer.carrier import ZMQ, Connected, Disconnected, LinkId, Received

HEARTBEAT_INTERVAL_MS = 5_000
# Longer than the largest block takes on the slowest link that is worth using: a heartbeat waits behind it.
HEARTBEAT_TIMEOUT_MS = 30_000

# Two messages between the carriers themselves, told by their empty header: the ROUTER's question whether a connection
# still is, and its request to close it.
PROBE: tuple[bytes, Sequence[memoryview]] = (b"", ())
GOODBYE: tuple[bytes, Sequence[memoryview]] = (b"", (memoryview(b""),))
NUM_GOODBYE_FRAMES = 2

# Events after which this connection will never carry a message again.
_ENDS = {
    zmq.EVENT_DISCONNECTED: "the connection ended",
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_CONNECT_RETRIED: "the connection was refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the peer speaks another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "authentication failed",
}
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED
for _event in _ENDS:
    _MONITORED |= _event


@dataclass(frozen=True)
class Handle:
    """Trackers of one send, one per frame: ZeroMQ's own for a whole message covers the last frame only."""

    trackers: Sequence[zmq.MessageTracker]

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


NOTHING_TO_READ = Handle(())


def watch_half_open(socket: zmq.Socket[bytes]) -> None:
    """Ends connections whose far host is gone without a word, even while no transfer asks after them."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


class OutgoingLink:
    """Raises nothing for the peer's sake: an unsendable message sets `broken`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: LinkId, max_frame_bytes: int) -> None:
        self.link = link
        self.path = ""
        self.broken: str | None = None
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        # Credit bounds what is queued, so that a full queue never has to.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        watch_half_open(self.socket)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self._is_connected = False

    def connect(self, address: str, path: str) -> None:
        self.path = path
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.broken = f"cannot dial {address}: {error}"

    def send(self, header: bytes, frames: Sequence[memoryview]) -> Handle:
        if self.broken is not None or not self._is_connected:
            return NOTHING_TO_READ
        trackers: list[zmq.MessageTracker] = []
        parts: list[bytes | memoryview] = [header, *frames]
        for position, part in enumerate(parts):
            flags = zmq.DONTWAIT | (zmq.SNDMORE if position < len(parts) - 1 else 0)
            try:
                tracker = self._send_part(part, flags)
            except zmq.ZMQError as error:
                self.broken = f"a message could not be sent: {error}"
                break
            if position > 0 and tracker is not None:
                trackers.append(tracker)
        return Handle(trackers)

    def _send_part(self, part: bytes | memoryview, flags: int) -> zmq.MessageTracker | None:
        is_block = isinstance(part, memoryview)
        try:
            return self.socket.send(part, flags, copy=not is_block, track=is_block)
        except zmq.Again:
            # A fresh connection may not have been noticed by the socket yet; asking for its events makes it look.
            self.socket.get(zmq.EVENTS)
            return self.socket.send(part, flags, copy=not is_block, track=is_block)

    def receive(self, limit: int | None) -> list[Received]:
        """Whole messages that have arrived, at most `limit` of them."""
        found: list[Received] = []
        while limit is None or len(found) < limit:
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.ZMQError:
                break
            if not len(parts[0]):
                if len(parts) == NUM_GOODBYE_FRAMES:
                    self.broken = "the peer ended the link"
                    break
                continue  # a probe: it only wanted to know whether we are there
            found.append(Received(self.link, parts[0].buffer, [part.buffer for part in parts[1:]]))
        return found

    def changes(self) -> list[Connected | Disconnected]:
        """What the monitor has reported since the last call."""
        found: list[Connected | Disconnected] = []
        while self.monitor.poll(0):
            event = zmq.Event(parse_monitor_message(self.monitor.recv_multipart())["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                found.append(Connected(self.link, self.path, is_incoming=False, transport=ZMQ))
            elif event in _ENDS:
                found.append(Disconnected(self.link, _ENDS[event]))
                break
        return found

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
