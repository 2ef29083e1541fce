"""What the KV thread counts. Written by the KV thread, read as a snapshot from any thread."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtransfer.events import Side

# Every restart of a worker is another peer; the longest unused ones are forgotten.
MAX_PEERS = 1024


@dataclass(frozen=True)
class PeerStats:
    """One peer, both directions. Bytes are block bytes, without headers; received ones are those written to blocks.

    `path` and `transport` are as in `carrier.Connected`, "" while unknown.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    blocks_sent: int = 0
    blocks_received: int = 0
    in_flight_bytes: int = 0
    peak_in_flight_bytes: int = 0
    path: str = ""
    transport: str = ""


@dataclass(frozen=True)
class KVStats:
    """`transfers` counts outcomes by (side, "OK" or failure reason); `transfer_seconds` sums the good ones' time."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_dropped: int = 0
    messages_dropped: int = 0
    links_rejected: int = 0
    transfers: Mapping[tuple[Side, str], int] = field(default_factory=dict)
    transfer_seconds: Mapping[Side, float] = field(default_factory=dict)
    peers: Mapping[str, PeerStats] = field(default_factory=dict)


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The most recently used last; totals are apart, so that a forgotten peer's bytes still count.
        self._peers: OrderedDict[str, PeerStats] = OrderedDict()
        self._bytes_sent = 0
        self._bytes_received = 0
        self._bytes_dropped = 0
        self._messages_dropped = 0
        self._links_rejected = 0
        self._transfers: Counter[tuple[Side, str]] = Counter()
        self._seconds = dict.fromkeys(Side, 0.0)

    def sent(self, worker_id: str, num_blocks: int, num_bytes: int) -> None:
        with self._lock:
            self._bytes_sent += num_bytes
            peer = self._peers.get(worker_id, PeerStats())
            self._update(worker_id, bytes_sent=peer.bytes_sent + num_bytes, blocks_sent=peer.blocks_sent + num_blocks)

    def received(self, worker_id: str, num_bytes: int) -> None:
        """One block was verified and written."""
        with self._lock:
            self._bytes_received += num_bytes
            peer = self._peers.get(worker_id, PeerStats())
            self._update(
                worker_id, bytes_received=peer.bytes_received + num_bytes, blocks_received=peer.blocks_received + 1
            )

    def in_flight(self, worker_id: str, used: int, peak: int) -> None:
        with self._lock:
            before = self._peers.get(worker_id, PeerStats()).peak_in_flight_bytes
            self._update(worker_id, in_flight_bytes=used, peak_in_flight_bytes=max(before, peak))

    def linked(self, worker_id: str, path: str, transport: str) -> None:
        with self._lock:
            self._update(worker_id, path=path, transport=transport)

    def peer(self, worker_id: str) -> PeerStats:
        """All zeros for one that is not known, or forgotten."""
        with self._lock:
            return self._peers.get(worker_id, PeerStats())

    def _update(self, worker_id: str, **changes: Any) -> None:
        self._peers[worker_id] = replace(self._peers.get(worker_id, PeerStats()), **changes)
        self._peers.move_to_end(worker_id)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def dropped(self, num_bytes: int = 0) -> None:
        """A late, repeated or unknown message (or block of one) was dropped."""
        with self._lock:
            self._messages_dropped += 1
            self._bytes_dropped += num_bytes

    def rejected(self) -> None:
        """A link was ended because of what its peer sent."""
        with self._lock:
            self._links_rejected += 1

    def ended(self, side: Side, outcome: str, seconds: float = 0.0) -> None:
        with self._lock:
            self._transfers[side, outcome] += 1
            self._seconds[side] += seconds

    def snapshot(self) -> KVStats:
        with self._lock:
            return KVStats(
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                bytes_dropped=self._bytes_dropped,
                messages_dropped=self._messages_dropped,
                links_rejected=self._links_rejected,
                transfers=dict(self._transfers),
                transfer_seconds=dict(self._seconds),
                peers=dict(self._peers),
            )
