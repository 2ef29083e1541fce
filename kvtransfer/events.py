"""What the KV thread tells its owner. Called back in the KV thread; a transfer ends in exactly one terminal event."""

import enum
from dataclasses import dataclass


class Side(enum.Enum):
    SOURCE = "source"
    SINK = "sink"


class FailureReason(enum.Enum):
    """Why a transfer ended without its blocks. Stable words for programs and metric labels."""

    CANCELLED = "CANCELLED"  # an owner, on either side, gave up
    TIMEOUT = "TIMEOUT"  # a deadline passed, on either side
    UNREACHABLE = "UNREACHABLE"  # no link to the sink in time
    LINK_LOST = "LINK_LOST"  # the link ended, or its peer fell silent
    CORRUPT = "CORRUPT"  # bytes that do not match their digest
    PROTOCOL = "PROTOCOL"  # the two sides disagree about the transfer
    CLOSED = "CLOSED"  # the sink does not expect this transfer, or no longer
    INVALID = "INVALID"  # our own side asked for something impossible
    SHUTDOWN = "SHUTDOWN"  # our own KV thread is closing


OUR_SIDE = frozenset({FailureReason.INVALID, FailureReason.SHUTDOWN})
"Reasons for which another peer would be no help."


def reason_from_peer(word: str) -> FailureReason:
    """Why a peer gave up. A newer one may know more reasons than we do; what it says of its own side is not ours."""
    try:
        reason = FailureReason(word)
    except ValueError:
        return FailureReason.CANCELLED
    return FailureReason.CANCELLED if reason in OUR_SIDE else reason


@dataclass(frozen=True)
class TransferComplete:
    """Sink, terminal: every block is verified and Finish agreed. The blocks belong to the engine again.

    `seconds` runs from the source's first message.
    """

    transfer_id: str
    keys: list[bytes]
    payload: bytes
    source_worker_id: str
    num_bytes: int
    seconds: float
    traceparent: str = ""
    transport: str = ""


@dataclass(frozen=True)
class TransferAcked:
    """Source, terminal: the sink has every block. The source blocks may be unpinned. `seconds` runs from Open."""

    transfer_id: str
    sink_worker_id: str
    num_bytes: int
    seconds: float
    transport: str = ""


@dataclass(frozen=True)
class TransferFailed:
    """Either side, terminal: ownership or pins return. On the source no transport reads the blocks any more.

    `transport` is "" where it had met no peer yet.
    """

    transfer_id: str
    side: Side
    reason: FailureReason
    detail: str
    transport: str = ""


@dataclass(frozen=True)
class LinkUp:
    """We can send blocks to `worker_id`; the rest is as in `carrier.Connected`."""

    worker_id: str
    path: str
    transport: str
    fallback: str = ""


@dataclass(frozen=True)
class LinkMeasured:
    """Blocks travel to `worker_id` at another speed than was told before, or enough have travelled to tell one."""

    worker_id: str
    path: str
    bytes_per_s: float
    fallback: str = ""


@dataclass(frozen=True)
class LinkDown:
    """The link is gone, or could not be made. It is dialled again with back-off.

    Not given for a peer that `set_peers` no longer names: its links end without a word.
    """

    worker_id: str
    reason: str


@dataclass(frozen=True)
class LinkRefused:
    """The peer refused our hello: `detail` names the field and both values. Not dialled again."""

    worker_id: str
    detail: str


@dataclass(frozen=True)
class AgentStopped:
    """The KV thread ended by an error of its own; every transfer has been failed before this."""

    detail: str


TransferEvent = TransferComplete | TransferAcked | TransferFailed
KVEvent = TransferEvent | LinkUp | LinkMeasured | LinkDown | LinkRefused | AgentStopped
