"""What the protocol machines ask of the world. The agent carries it out; tests record it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.carrier import LinkId, SendHandle
from kvtransfer.events import KVEvent
from kvtransfer.frames import Frame
from kvtransfer.messages import AnyMessage

Clock = Callable[[], float]


class Outbox(Protocol):
    def send(self, link: LinkId, message: AnyMessage, frames: Sequence[Frame] = ()) -> SendHandle: ...

    def emit(self, event: KVEvent) -> None: ...

    def cut(self, link: LinkId, reason: str) -> None:
        """Ends the link. Takes effect after the running call: machines hear of it through `link_lost`."""
        ...
