"""What a way from the source's process to the sink's has at its two ends, and the words they share.

`measure` drives the source's ends, `sink` the others; a transfer is over when its receiver has said so to its sender.
"""

from collections.abc import Sequence
from typing import Protocol

PAIRS = ("gloo", "nccl")
"What blocks take beside ZeroMQ: two ranks of a library."
TRANSPORTS = ("ipc", "tcp", *PAIRS)
PATIENCE_S = 60.0
"Whoever waits longer than this for the other process gives up."


class Sender(Protocol):
    """At the source. Raises Internal, or OSError, where a transfer does not come to its end."""

    def send(self, transfer_id: str, num_blocks: int) -> None:
        """The first `num_blocks` blocks of the pool, into those of the sink's; returns when the sink has them."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """At the sink."""

    def prepare(self, transfer_ids: Sequence[str], num_blocks: int) -> None:
        """These transfers come, one after the other, each of so many blocks."""
        ...

    def receive(self) -> None:
        """Returns when all of them have come. Raises as `Sender` does."""
        ...

    def close(self) -> None: ...
