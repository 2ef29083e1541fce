"""All incoming ZeroMQ links: a ROUTER whose every connection gets an identity of its own. Owned by `zeromq`'s thread.

A ROUTER does not say whose connection ended, so a sign that one has makes every link be tried: with ROUTER_MANDATORY a
message to a connection that is gone fails instead of vanishing.
"""

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtransfer.carrier import ZMQ, CarrierEvent, Connected, Disconnected, LinkId, Received
from kvtransfer.messages import MAX_BLOCKS_PER_MESSAGE
from kvtransfer.zmq_link import GOODBYE, PROBE, watch_half_open

# Whole messages that may wait to be read, per source: reached, it slows that source down and loses nothing.
RECEIVE_QUEUE_MESSAGES = 1024
# Answers that may wait for one source; one that never reads them is cut off.
SEND_QUEUE_MESSAGES = 100_000
# A sign of an ended connection comes before the ROUTER knows of it, so links are tried several times.
PROBE_INTERVAL_S = 0.05
NUM_PROBES = 10
# Ended links whose last messages may still be queued; one that is forgotten has to say hello again.
NUM_DEAD_REMEMBERED = 4096
MAX_FRAMES = MAX_BLOCKS_PER_MESSAGE + 1


class IncomingLinks:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], ids: "itertools.count[int]", max_frame_bytes: int
    ) -> None:
        self._ids = ids
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        self.socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        watch_half_open(self.socket)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._identities: dict[LinkId, bytes] = {}
        self._links: dict[bytes, LinkId] = {}
        self._dead: OrderedDict[bytes, None] = OrderedDict()
        self._failed: deque[Disconnected] = deque()
        self._probes_left = 0
        self._next_probe = 0.0

    @property
    def wants_poll_within(self) -> float | None:
        """Seconds until there is something to do without a message, if there is."""
        if self._failed:
            return 0.0
        return PROBE_INTERVAL_S if self._probes_left else None

    def owns(self, link: LinkId) -> bool:
        return link in self._identities

    def receive(self, limit: int) -> Iterator[CarrierEvent]:
        """At most `limit` messages; a link's first is preceded by Connected."""
        for _ in range(limit):
            try:
                identity = self.socket.recv(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            frames = self._rest_of_message()
            if identity in self._dead:
                continue
            link = self._links.get(identity)
            if link is None:
                link = next(self._ids)
                self._links[identity] = link
                self._identities[link] = identity
                yield Connected(link, _path_of(frames), is_incoming=True, transport=ZMQ)
            if not 0 < len(frames) <= MAX_FRAMES:
                # No message of ours has so few or so many frames; an empty header says so to the protocol.
                yield Received(link, memoryview(b""), ())
            else:
                yield Received(link, frames[0].buffer, [frame.buffer for frame in frames[1:]])

    def _rest_of_message(self) -> list[zmq.Frame]:
        frames: list[zmq.Frame] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
        return frames

    def send(self, link: LinkId, header: bytes, frames: Sequence[memoryview]) -> None:
        """Copies; a sink only ever sends headers. A link that cannot take it has ended."""
        try:
            self.socket.send_multipart([self._identities[link], header, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self._failed.append(Disconnected(link, f"the connection ended: {error}"))
            self.forget(link)

    def ended(self) -> list[Disconnected]:
        """Links found to be gone since the last call."""
        while self.monitor.poll(0):
            parse_monitor_message(self.monitor.recv_multipart())
            self._probes_left, self._next_probe = NUM_PROBES, 0.0
        if self._probes_left and time.monotonic() >= self._next_probe:
            self._probes_left -= 1
            self._next_probe = time.monotonic() + PROBE_INTERVAL_S
            for link in list(self._identities):
                self.send(link, *PROBE)
        found = list(self._failed)
        self._failed.clear()
        return found

    def disconnect(self, link: LinkId) -> None:
        """A ROUTER cannot close one connection, so the other side is asked to; see `zmq_link.GOODBYE`."""
        if link in self._identities:
            self.send(link, *GOODBYE)
            self._failed = deque(failed for failed in self._failed if failed.link != link)
            self.forget(link)

    def forget(self, link: LinkId) -> None:
        """From now on whatever this link still brings is dropped."""
        identity = self._identities.pop(link, None)
        if identity is None:
            return
        del self._links[identity]
        self._dead[identity] = None
        while len(self._dead) > NUM_DEAD_REMEMBERED:
            self._dead.popitem(last=False)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def _path_of(frames: Sequence[zmq.Frame]) -> str:
    """How this message came: over ipc the peer's address is its process, as "localhost:uid:gid:pid"."""
    try:
        return "ipc" if str(frames[0].get("Peer-Address")).startswith("localhost:") else "tcp"
    except (IndexError, zmq.ZMQError):
        return ""  # not every system tells who is at the other end of a local socket
