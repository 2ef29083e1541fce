"""Links over ZeroMQ: one DEALER per outgoing link, one ROUTER for all incoming ones; TCP, or ipc on the same host.

Everything here is used by the KV thread alone, which also builds the context (a context inherited through a fork is
broken); only `wake` comes from other threads. Incoming bytes stay in ZeroMQ's receive buffers until they are handled.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvtransfer.carrier import CarrierEvent, Connected, Disconnected, LinkId
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import Frame, in_host_memory
from kvtransfer.messages import MAX_HEADER_BYTES
from kvtransfer.same_host import IpcDirectory, is_same_host
from kvtransfer.zmq_link import NOTHING_TO_READ, Handle, OutgoingLink
from kvtransfer.zmq_router import IncomingLinks
from splitserve.service.errors import Unavailable

MAX_MESSAGES_PER_POLL = 32
WAKE_ADDRESS = "inproc://wake"


@dataclass(frozen=True)
class ZeroMQSettings:
    """`bind` and `advertise` are hosts; port 0 lets the kernel choose. `max_block_bytes` bounds each received frame."""

    bind: str = "127.0.0.1"
    advertise: str = ""
    port: int = 0
    max_block_bytes: int = 64 * 1024 * 1024
    use_ipc: bool = True
    ipc_parent: Path | None = None


class ZeroMQCarrier:
    def __init__(self, settings: ZeroMQSettings | None = None) -> None:
        self._settings = settings or ZeroMQSettings()
        self._ids = itertools.count()
        self._outgoing: dict[LinkId, OutgoingLink] = {}
        self._wake_lock = threading.Lock()
        # Guarded by the lock.
        self._wake_sender: zmq.Socket[bytes] | None = None
        self._is_awake = False
        self._ipc: IpcDirectory | None = None
        self._endpoint = KVEndpoint(tcp="")

    # Lifetime.

    def start(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._incoming = IncomingLinks(self._context, self._ids, max(self._settings.max_block_bytes, MAX_HEADER_BYTES))
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind(WAKE_ADDRESS)
        with self._wake_lock:
            self._wake_sender = self._context.socket(zmq.PAIR)
            self._wake_sender.connect(WAKE_ADDRESS)
        self._poller = zmq.Poller()
        for socket in (self._incoming.socket, self._incoming.monitor, self._wake_receiver):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._endpoint = self._bind(self._incoming.socket)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise Unavailable(f"cannot bind the KV endpoint on {self._settings.bind}: {error}") from error

    def _bind(self, router: "zmq.Socket[bytes]") -> KVEndpoint:
        settings = self._settings
        if ":" in settings.bind:
            router.setsockopt(zmq.IPV6, 1)
        router.bind(_tcp_address(settings.bind, settings.port or "*"))
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        tcp = _tcp_address(settings.advertise or settings.bind, bound.rpartition(":")[2])
        self._ipc = IpcDirectory.create(settings.ipc_parent) if settings.use_ipc else None
        if self._ipc is None:
            return KVEndpoint(tcp=tcp)
        router.bind(f"ipc://{self._ipc.socket_path}")
        return KVEndpoint(tcp, str(self._ipc.socket_path), str(self._ipc.nonce_path), self._ipc.nonce_digest)

    @property
    def endpoint(self) -> KVEndpoint:
        return self._endpoint

    def close(self) -> None:
        """LINGER is 0: what is queued is dropped. On return ZeroMQ's threads have ended and read no frame any more."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()
        self._incoming.close()
        with self._wake_lock:
            # Before its other end, or a wake in between would find nobody to send to.
            if self._wake_sender is not None:
                self._wake_sender.close(linger=0)
            self._wake_sender = None
        self._wake_receiver.close(linger=0)
        self._context.term()
        if self._ipc is not None:
            self._ipc.remove()

    # Links.

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        link = next(self._ids)
        outgoing = OutgoingLink(self._context, link, MAX_HEADER_BYTES)
        if self._settings.use_ipc and is_same_host(endpoint):
            outgoing.connect(f"ipc://{endpoint.ipc_path}", "ipc")
        else:
            outgoing.connect(endpoint.tcp, "tcp")
        self._outgoing[link] = outgoing
        self._poller.register(outgoing.socket, zmq.POLLIN)
        self._poller.register(outgoing.monitor, zmq.POLLIN)
        return link

    def send(self, link: LinkId, header: bytes, frames: Sequence[Frame]) -> Handle:
        outgoing = self._outgoing.get(link)
        if outgoing is not None:
            return outgoing.send(header, in_host_memory(frames))
        if self._incoming.owns(link):
            self._incoming.send(link, header, in_host_memory(frames))
        return NOTHING_TO_READ

    def disconnect(self, link: LinkId) -> None:
        self._incoming.disconnect(link)
        self._close_outgoing(link)

    def _close_outgoing(self, link: LinkId) -> None:
        outgoing = self._outgoing.pop(link, None)
        if outgoing is not None:
            self._poller.unregister(outgoing.socket)
            self._poller.unregister(outgoing.monitor)
            outgoing.close()

    # Events.

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        soonest = self._incoming.wants_poll_within
        if soonest is not None:
            timeout_s = min(timeout_s, soonest)
        if any(outgoing.broken for outgoing in self._outgoing.values()):
            timeout_s = 0.0
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_receiver in ready:
            self._sleep_again()
        events: list[CarrierEvent] = []
        for outgoing in list(self._outgoing.values()):
            if outgoing.broken or outgoing.socket in ready or outgoing.monitor in ready:
                events += self._outgoing_events(outgoing)
        if self._incoming.socket in ready:
            events += self._incoming.receive(MAX_MESSAGES_PER_POLL)
        events += self._incoming.ended()
        return events

    def _outgoing_events(self, outgoing: OutgoingLink) -> list[CarrierEvent]:
        """In the order connected, messages, disconnected: the last words of a peer are heard."""
        changes = outgoing.changes()
        events: list[CarrierEvent] = [change for change in changes if isinstance(change, Connected)]
        ends = [change for change in changes if isinstance(change, Disconnected)]
        events += outgoing.receive(None if ends else MAX_MESSAGES_PER_POLL)
        if outgoing.broken:
            ends.append(Disconnected(outgoing.link, outgoing.broken))
        if ends:
            self._close_outgoing(outgoing.link)
        return events + ends[:1]

    # Wake-up.

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_sender is not None and not self._is_awake:
                self._is_awake = True
                self._wake_sender.send(b"", zmq.DONTWAIT)

    def _sleep_again(self) -> None:
        with self._wake_lock:
            self._is_awake = False
            self._wake_receiver.recv(zmq.DONTWAIT)


def _tcp_address(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
