"""The seam between protocol and transport: links that carry (header, raw frames) in order, and say when they end.

Called by the KV thread alone, except `wake`. Implemented by `memory` (loopback twin), `zeromq` and, around either,
`pairs` (block bytes over NCCL or Gloo) and `faults`. A link id is never reused in a carrier's life: a new connection is
a new link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import Frame

LinkId = int

ZMQ = "zmq"
"The transport of blocks that travel beside their headers, over ZeroMQ."


class SendHandle(Protocol):
    """Tells when the transport has read the frames of one send for the last time."""

    @property
    def done(self) -> bool: ...


@dataclass(frozen=True)
class Connected:
    """An outgoing link can carry messages, or an incoming one (`is_incoming`) brought its first.

    `path` is "ipc", "tcp", "loopback" or that of a pair ("gloo", "nccl P2P/CUMEM"); "" where an incoming link does not
    show it. `transport` is what blocks travel by: "zmq", "nccl", "gloo", "loopback". `has_tensors`: frames are tensors
    on this link, not host memory. `fallback` says why a transport that was preferred is not used.
    """

    link: LinkId
    path: str
    is_incoming: bool
    transport: str
    has_tensors: bool = False
    fallback: str = ""


@dataclass(frozen=True)
class Received:
    """One whole message. `header` and `frames` are views of a receive buffer, never of a pool."""

    link: LinkId
    header: memoryview
    frames: Sequence[Frame]


@dataclass(frozen=True)
class Disconnected:
    """The link is gone for good; whatever was queued on it is lost.

    `is_rejected`: we ended it, because of what its peer sent. `is_final`: dialling this peer again cannot help.
    """

    link: LinkId
    reason: str
    is_rejected: bool = False
    is_final: bool = False


@dataclass(frozen=True)
class Heard:
    """The peer of a link is alive: it has sent a message whose turn has not come."""

    link: LinkId


CarrierEvent = Connected | Received | Disconnected | Heard


class Carrier(Protocol):
    def start(self) -> None:
        """Binds. Called once, in the thread that will poll. Raises Unavailable when it cannot."""
        ...

    @property
    def endpoint(self) -> KVEndpoint:
        """Where peers reach us; known after `start`."""
        ...

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        """Begins to dial. The outcome arrives as Connected or Disconnected; never raises for the peer's sake."""
        ...

    def send(self, link: LinkId, header: bytes, frames: Sequence[Frame]) -> SendHandle:
        """Queues one message without copying `frames`, which must not change until the handle is done.

        On a link that cannot take it the message is lost, the handle is done, and Disconnected follows.
        """
        ...

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        """Waits for the first event, a wake, or the timeout."""
        ...

    def disconnect(self, link: LinkId) -> None:
        """Ends the link; no further event will name it. Unknown links are ignored."""
        ...

    def wake(self) -> None:
        """Makes a running or the next `poll` return at once. From any thread; harmless after close."""
        ...

    def close(self) -> None:
        """Ends all links and frees the endpoint; on return no frame is being read any more, but for what a library does
        not let go of (see `pairs.carrier`), which nobody may write to as long as this process lives."""
        ...
