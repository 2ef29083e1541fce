"""Outgoing links: dials every peer, greets it, dials again with back-off. Without I/O; owned by `node`.

Tells the source machine which links are ready. One link per (us, incarnation of a peer): a worker id names one start
of one process, so a restarted peer is another peer.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtransfer.carrier import Connected, LinkId
from kvtransfer.context import Context
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import LinkDown, LinkRefused, LinkUp
from kvtransfer.health import LinkHealth, Verdict
from kvtransfer.messages import PROTOCOL_VERSION, BadMessageError, Hello, Ping, Refused, Welcome
from kvtransfer.source import Source


class PeerState(enum.Enum):
    WAITING = enum.auto()  # to be dialled at `due`
    CONNECTING = enum.auto()  # until `due`
    GREETING = enum.auto()  # hello sent, answer until `due`
    READY = enum.auto()
    REFUSED = enum.auto()  # final for this incarnation


@dataclass
class Peer:
    worker_id: str
    endpoint: KVEndpoint
    state: PeerState
    due: float
    back_off: float
    health: LinkHealth
    link: LinkId | None = None
    connection: Connected | None = None


class Dialer:
    def __init__(self, context: Context, source: Source, connect: Callable[[KVEndpoint], LinkId]) -> None:
        self._our = context
        self._connect = connect
        self._source = source
        self._peers: dict[str, Peer] = {}
        self._by_link: dict[LinkId, Peer] = {}

    def set_peers(self, endpoints: Mapping[str, KVEndpoint]) -> None:
        """Dials the new ones; ends the links of those that are gone or have moved."""
        for peer in list(self._peers.values()):
            if endpoints.get(peer.worker_id) != peer.endpoint:
                del self._peers[peer.worker_id]
                if peer.link is not None:
                    has_moved = peer.worker_id in endpoints
                    self._our.outbox.cut(peer.link, "the peer has moved" if has_moved else "the peer has left")
        now = self._our.clock()
        for worker_id, endpoint in endpoints.items():
            if worker_id not in self._peers:
                self._peers[worker_id] = Peer(
                    worker_id=worker_id,
                    endpoint=endpoint,
                    state=PeerState.WAITING,
                    due=now,
                    back_off=self._our.settings.redial_min_s,
                    health=LinkHealth(self._our.settings, now),
                )
        self.tick()

    @property
    def is_busy(self) -> bool:
        """Some peer is being dialled or greeted, or waits to be."""
        return any(peer.state not in (PeerState.READY, PeerState.REFUSED) for peer in self._peers.values())

    def owns(self, link: LinkId) -> bool:
        return link in self._by_link

    def heard(self, link: LinkId) -> None:
        self._by_link[link].health.heard(self._our.clock())

    def connected(self, connection: Connected) -> None:
        peer = self._by_link.get(connection.link)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.connection = connection
        peer.state = PeerState.GREETING
        hello = Hello(PROTOCOL_VERSION, self._our.worker_id, peer.worker_id, self._our.fingerprint)
        self._our.outbox.send(connection.link, hello)

    def welcomed(self, link: LinkId, welcome: Welcome) -> None:
        peer = self._by_link[link]
        if peer.state is not PeerState.GREETING:
            self._our.counters.dropped()
            return
        if welcome.worker_id != peer.worker_id:
            raise BadMessageError(f"welcomed by {welcome.worker_id} instead of {peer.worker_id}")
        peer.state = PeerState.READY
        peer.back_off = self._our.settings.redial_min_s
        peer.health = LinkHealth(self._our.settings, self._our.clock())
        made = peer.connection
        assert made is not None
        self._our.counters.linked(peer.worker_id, made.path, made.transport)
        self._our.outbox.emit(LinkUp(peer.worker_id, made.path, made.transport, made.fallback))
        self._source.link_ready(peer.worker_id, made, welcome.window_bytes, welcome.max_message_bytes)

    def refused(self, link: LinkId, refused: Refused) -> None:
        peer = self._by_link[link]
        if peer.state is PeerState.GREETING:
            self._give_up(peer, refused.detail)
        self._our.outbox.cut(link, f"the peer refused: {refused.detail}")

    def _give_up(self, peer: Peer, detail: str) -> None:
        peer.state = PeerState.REFUSED
        self._our.outbox.emit(LinkRefused(peer.worker_id, detail))
        self._source.unreachable(peer.worker_id, detail)

    def lost(self, link: LinkId, reason: str, *, is_final: bool = False) -> None:
        """The link is gone, by whichever side's doing. `is_final`: another would be no better."""
        peer = self._by_link.pop(link, None)
        if peer is None:
            return
        peer.link = None
        self._source.link_lost(link, reason)
        if peer.worker_id not in self._peers:
            return  # dropped by our owner, who would take a report for one of a peer that is still to be linked
        if peer.state is PeerState.REFUSED:
            return
        if is_final:
            self._give_up(peer, reason)
            return
        peer.state = PeerState.WAITING
        peer.due = self._our.clock() + peer.back_off
        peer.back_off = min(peer.back_off * 2, self._our.settings.redial_max_s)
        self._our.outbox.emit(LinkDown(peer.worker_id, reason))

    def tick(self) -> None:
        now = self._our.clock()
        for peer in list(self._peers.values()):
            match peer.state:
                case PeerState.WAITING if peer.due <= now:
                    self._dial(peer, now)
                case PeerState.CONNECTING | PeerState.GREETING if peer.due <= now and peer.link is not None:
                    self._our.outbox.cut(peer.link, f"no handshake within {self._our.settings.connect_timeout_s} s")
                case PeerState.READY:
                    self._check_health(peer, now)

    def _dial(self, peer: Peer, now: float) -> None:
        peer.state = PeerState.CONNECTING
        peer.due = now + self._our.settings.connect_timeout_s
        peer.link = self._connect(peer.endpoint)
        self._by_link[peer.link] = peer

    def _check_health(self, peer: Peer, now: float) -> None:
        assert peer.link is not None
        match peer.health.check(now, is_needed=self._source.depends_on(peer.link)):
            case Verdict.PING:
                self._our.outbox.send(peer.link, Ping())
            case Verdict.SILENT:
                self._our.outbox.cut(peer.link, f"the peer was silent for {self._our.settings.ping_timeout_s} s")
            case Verdict.FINE:
                pass
