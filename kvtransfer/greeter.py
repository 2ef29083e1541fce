"""Incoming links: hears each source's hello and admits or refuses it. Without I/O; owned by `node`.

A link has no rights before a good hello, and loses them with the first message that no correct source sends.
"""

from dataclasses import dataclass

from kvtransfer.carrier import Connected, LinkId
from kvtransfer.context import Context
from kvtransfer.fingerprint import mismatch
from kvtransfer.health import LinkHealth, Verdict
from kvtransfer.messages import PROTOCOL_VERSION, Hello, Ping, Refused, Welcome, shorten
from kvtransfer.sink import Sink


@dataclass
class Guest:
    """An admitted source."""

    worker_id: str
    health: LinkHealth


class Greeter:
    def __init__(self, context: Context, sink: Sink) -> None:
        self._our = context
        self._sink = sink
        # Links that have connected; nobody until their hello.
        self._connections: dict[LinkId, Connected] = {}
        self._guests: dict[LinkId, Guest] = {}

    def connected(self, connection: Connected) -> None:
        self._connections[connection.link] = connection

    def guest(self, link: LinkId) -> str | None:
        """The admitted source on this link."""
        guest = self._guests.get(link)
        if guest is None:
            return None
        guest.health.heard(self._our.clock())
        return guest.worker_id

    def greeted(self, link: LinkId, hello: Hello) -> None:
        """Answers a hello. A repeated one changes nothing and gets the same answer."""
        refusal = self._refusal(hello)
        if refusal is not None:
            self.refuse(link, refusal)
            return
        self._guests.setdefault(link, Guest(hello.worker_id, LinkHealth(self._our.settings, self._our.clock())))
        made = self._connections.get(link)
        if made is not None:
            self._our.counters.linked(hello.worker_id, made.path, made.transport)
        max_message_bytes = max(self._our.settings.frame_bytes, self._our.store.block_nbytes)
        self._our.outbox.send(link, Welcome(self._our.worker_id, self._our.settings.window_bytes, max_message_bytes))

    def refuse(self, link: LinkId, detail: str) -> None:
        """Tells the source why, and ends the link."""
        self._our.outbox.send(link, Refused(shorten(detail)))
        self._our.outbox.cut(link, detail)

    def _refusal(self, hello: Hello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return f"version: ours {PROTOCOL_VERSION}, theirs {hello.version}"
        if hello.sink_worker_id != self._our.worker_id:
            return f"worker_id: ours {self._our.worker_id}, theirs {hello.sink_worker_id}"
        return mismatch(self._our.fingerprint, hello.fingerprint)

    def lost(self, link: LinkId, reason: str) -> None:
        self._connections.pop(link, None)
        if self._guests.pop(link, None) is not None:
            self._sink.link_lost(link, reason)

    def tick(self) -> None:
        now = self._our.clock()
        for link, guest in list(self._guests.items()):
            match guest.health.check(now, is_needed=self._sink.depends_on(link)):
                case Verdict.PING:
                    self._our.outbox.send(link, Ping())
                case Verdict.SILENT:
                    self._our.outbox.cut(link, f"the source was silent for {self._our.settings.ping_timeout_s} s")
                case Verdict.FINE:
                    pass
