"""A link between a Source and a Sink machine without threads or sockets: the test decides about each message."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.carrier import LinkId
from kvtransfer.events import KVEvent
from kvtransfer.messages import AnyMessage, decode, encode


class Handle:
    """The transport reads the frames until it is done."""

    def __init__(self) -> None:
        self.done = False


@dataclass
class Parcel:
    """A message under way. `frames` are the sender's memory until `copy` puts bytes in their place; one that is damaged
    may have no `message`."""

    link: LinkId
    header: bytes
    frames: Sequence[memoryview]
    handle: Handle
    is_damaged: bool = False

    @property
    def message(self) -> AnyMessage:
        return decode(self.header)

    def copy(self) -> "Parcel":
        """Its bytes as they are now, held by nobody."""
        handle = Handle()
        handle.done = True
        return Parcel(
            self.link, self.header, [memoryview(bytes(frame)) for frame in self.frames], handle, self.is_damaged
        )


@dataclass
class FakeOutbox:
    """Records what a machine asks."""

    sent: deque[Parcel] = field(default_factory=deque)
    events: list[KVEvent] = field(default_factory=list)
    cuts: list[tuple[LinkId, str]] = field(default_factory=list)

    def send(self, link: LinkId, message: AnyMessage, frames: Sequence[memoryview] = ()) -> Handle:
        handle = Handle()
        handle.done = not frames
        self.sent.append(Parcel(link, encode(message), frames, handle))
        return handle

    def emit(self, event: KVEvent) -> None:
        self.events.append(event)

    def cut(self, link: LinkId, reason: str) -> None:
        self.cuts.append((link, reason))


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
