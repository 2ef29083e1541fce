"""The whole protocol of one worker without I/O: source, sink, dialler and greeter behind one door.

Driven by the agent's KV thread: carrier events in, then a tick; what it wants done goes to the outbox.
"""

from collections.abc import Callable

from kvtransfer.carrier import CarrierEvent, Connected, Disconnected, Heard, LinkId, Received
from kvtransfer.context import Context
from kvtransfer.dialer import Dialer
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.greeter import Greeter
from kvtransfer.messages import (
    Acked,
    AnyMessage,
    BadMessageError,
    Blocks,
    BlocksAck,
    Cancel,
    Closed,
    Finish,
    Hello,
    Open,
    Ping,
    Pong,
    Refused,
    Welcome,
    decode,
)
from kvtransfer.sink import Sink
from kvtransfer.source import Source

# How long the KV thread may sleep: the coarseness of every deadline, and what letting go of blocks may lag.
SETTLING_POLL_S = 0.002
BUSY_POLL_S = 0.05
IDLE_POLL_S = 0.5


class Node:
    def __init__(self, context: Context, connect: Callable[[KVEndpoint], LinkId]) -> None:
        self._our = context
        self.source = Source(context)
        self.sink = Sink(context)
        self.dialer = Dialer(context, self.source, connect)
        self.greeter = Greeter(context, self.sink)

    def handle(self, event: CarrierEvent) -> None:
        match event:
            case Connected(is_incoming=False):
                self.dialer.connected(event)
            case Connected():
                self.greeter.connected(event)
            case Disconnected(link=link, reason=reason):
                if event.is_rejected:
                    self._our.counters.rejected()
                self.lost(link, reason, is_final=event.is_final)
            case Heard(link=link):
                self._note_life(link)
            case Received():
                self._receive(event)

    def _note_life(self, link: LinkId) -> None:
        """A source that asks whether we live cannot be answered in turn: it is told at once."""
        if self.dialer.owns(link):
            self.dialer.heard(link)
        elif self.greeter.guest(link) is not None:
            self._our.outbox.send(link, Pong())

    def lost(self, link: LinkId, reason: str, *, is_final: bool = False) -> None:
        self.dialer.lost(link, reason, is_final=is_final)
        self.greeter.lost(link, reason)

    def tick(self) -> None:
        self.dialer.tick()
        self.greeter.tick()
        self.source.tick()
        self.sink.tick()

    def poll_interval(self) -> float:
        if self.source.is_settling:
            return SETTLING_POLL_S
        if self.source.is_waiting or self.sink.is_waiting or self.dialer.is_busy:
            return BUSY_POLL_S
        return IDLE_POLL_S

    def _receive(self, event: Received) -> None:
        try:
            message = decode(event.header)
            if self.dialer.owns(event.link):
                self._from_sink(event, message)
            else:
                self._from_source(event, message)
        except BadMessageError as error:
            self._our.counters.rejected()
            detail = f"bad message: {error}"
            if self.dialer.owns(event.link):
                self._our.outbox.cut(event.link, detail)
            else:
                self.greeter.refuse(event.link, detail)

    def _from_sink(self, event: Received, message: AnyMessage) -> None:
        if event.frames:
            raise BadMessageError(f"{type(message).__name__} with {len(event.frames)} raw frames")
        self.dialer.heard(event.link)
        match message:
            case Welcome():
                self.dialer.welcomed(event.link, message)
            case Refused():
                self.dialer.refused(event.link, message)
            case Ping():
                self._our.outbox.send(event.link, Pong())
            case Pong():
                pass  # it was heard
            case BlocksAck() | Acked() | Cancel() | Closed():
                self.source.receive(event.link, message)
            case _:
                raise BadMessageError(f"a sink does not send {type(message).__name__}")

    def _from_source(self, event: Received, message: AnyMessage) -> None:
        if isinstance(message, Hello) and not event.frames:
            self.greeter.greeted(event.link, message)
            return
        worker_id = self.greeter.guest(event.link)
        if worker_id is None:
            raise BadMessageError(f"{type(message).__name__} before hello")
        match message:
            case Ping() if not event.frames:
                self._our.outbox.send(event.link, Pong())
            case Pong() if not event.frames:
                pass  # it was heard
            case Open() | Blocks() | Finish() | Cancel():
                self.sink.receive(event.link, worker_id, message, event.frames)
            case _:
                raise BadMessageError(f"a source does not send {type(message).__name__}")
