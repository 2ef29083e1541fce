"""The real KV agent of a simulated worker, on the test's thread, and what has to hold whenever it has looked.

Deadlines and links are noted here from outside, so that an agent that forgets one does not forget it for the test too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtransfer.agent import KVAgent
from kvtransfer.carrier import LinkId
from kvtransfer.events import KVEvent, Side, TransferComplete
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.frames import digest
from kvtransfer.settings import KVSettings
from kvtransfer.sink_transfer import SinkTransfer
from splitserve.worker.kv import model_fingerprint
from tests.simulation.hash_model import LAYOUT, MODEL, CheckedPool
from tests.simulation.wires import SimulatedCarrier

FINGERPRINT: Fingerprint = model_fingerprint(MODEL.name, MODEL.revision, LAYOUT)
KV_SETTINGS = KVSettings(
    window_bytes=3 * LAYOUT.block_nbytes, frame_bytes=2 * LAYOUT.block_nbytes, transfer_timeout_s=5.0, idle_timeout_s=60
)


@dataclass
class Expected:
    """What a sink waits for. It may wait `timeout_s` from `armed_at` on, which is when it got anywhere last."""

    transfer: SinkTransfer
    timeout_s: float
    armed_at: float
    progress: tuple[bool, int, bool] = (False, 0, False)
    links: set[LinkId] = field(default_factory=set)
    cut_off_since: float = math.inf

    def look(self, now: float, standing: set[LinkId]) -> None:
        progress = (self.transfer.is_opened, len(self.transfer.received), self.transfer.finish is not None)
        if progress != self.progress:
            self.progress, self.armed_at = progress, now
        if self.transfer.link is not None:
            self.links.add(self.transfer.link)
        if not self.links <= standing:
            self.cut_off_since = min(self.cut_off_since, now)


@dataclass
class Sent:
    """How far a source has got, and since when it has got no further."""

    progress: tuple[object, ...]
    since: float


class SteppedAgent(KVAgent):
    """A KV agent whose thread is the test, and which notes what it has been lent."""

    def __init__(self, worker_id: str, pool: CheckedPool, carrier: SimulatedCarrier, **others: Any) -> None:
        super().__init__(
            worker_id=worker_id,
            fingerprint=FINGERPRINT,
            store=pool,
            carrier=carrier,
            settings=KV_SETTINGS,
            **others,
        )
        self.carrier = carrier
        self._pool = pool
        self._wires = carrier.wires
        self._lent: dict[tuple[Side, str], list[int]] = {}
        self._expected: dict[str, Expected] = {}
        self._sent: dict[str, Sent] = {}

    def start(self) -> None:
        self._carrier.start()
        self._is_open = True

    def step(self) -> None:
        self._step()
        self._check()

    def expect(self, transfer_id: str, block_ids: Sequence[int], num_cached_blocks: int, timeout_s: float) -> None:
        super().expect(transfer_id, block_ids, num_cached_blocks, timeout_s)
        self._submit(partial(self._note_expected, transfer_id, timeout_s))
        wanted = list(block_ids[num_cached_blocks:])
        assert self._pool.receiving.isdisjoint(wanted), "two transfers receive the same block"
        self._pool.receiving.update(wanted)
        self._lent[Side.SINK, transfer_id] = wanted

    def _note_expected(self, transfer_id: str, timeout_s: float) -> None:
        transfer = self._node.sink._transfers[transfer_id]
        self._expected[transfer_id] = Expected(transfer, timeout_s, armed_at=self._wires.now())

    def send(self, transfer_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        super().send(transfer_id, blocks)
        if (Side.SOURCE, transfer_id) in self._live:
            sent = [block for _, block in blocks]
            self._pool.sending.update(sent)
            self._lent.setdefault((Side.SOURCE, transfer_id), []).extend(sent)

    def _emit(self, event: KVEvent) -> None:
        if isinstance(event, TransferComplete):
            self._check_complete(self._expected[event.transfer_id].transfer)
        super()._emit(event)

    def _end(self, side: Side, transfer_id: str) -> None:
        super()._end(side, transfer_id)
        blocks = self._lent.pop((side, transfer_id), [])
        if side is Side.SINK:
            self._pool.receiving.difference_update(blocks)
        else:
            self._pool.sending.subtract(blocks)
            assert transfer_id not in self._wires.being_read(self.carrier), "unpinned while the transport reads"

    # What has to hold

    def _check_complete(self, transfer: SinkTransfer) -> None:
        """Decode starts only after `Finish`, with the right blocks."""
        finish = transfer.finish
        assert finish is not None, "complete without Finish"
        arrived = [digest(self._pool.view(block)) for block in transfer.block_ids[transfer.num_cached_blocks :]]
        assert finish.digests == arrived, "the blocks that arrived are not those that Finish names"
        assert len(finish.keys) == finish.num_blocks == len(transfer.block_ids), "Finish names more or fewer blocks"

    def _check(self) -> None:
        """Nothing waits past its deadline, or for a link that is gone, when the KV thread has looked."""
        now, lost, standing = self._wires.now(), self.carrier.lost_links, self._wires.links_of(self.carrier)
        waiting = self._node.sink._transfers
        self._expected = {key: expected for key, expected in self._expected.items() if key in waiting}
        for expected in self._expected.values():
            expected.look(now, standing)
            assert now < expected.armed_at + expected.timeout_s, "a sink waits past its deadline"
            assert expected.links.isdisjoint(lost), "a sink waits for a link that is gone"
            assert now - expected.cut_off_since < KV_SETTINGS.ping_timeout_s, "a sink does not miss a silent source"
        self._check_sources(now, lost)

    def _check_sources(self, now: float, lost: set[LinkId]) -> None:
        sent, self._sent = self._sent, {}
        for key, transfer in self._node.source._transfers.items():
            if transfer.is_ended or transfer.link is None:
                continue
            assert transfer.link not in lost, "a source waits for a link that is gone"
            finish = transfer.finish is not None, transfer.is_finish_sent
            progress = (len(transfer.accepted), frozenset(transfer.in_flight), *finish)
            before = sent.get(key)
            self._sent[key] = before if before and before.progress == progress else Sent(progress, now)
            is_late = now - self._sent[key].since >= KV_SETTINGS.transfer_timeout_s
            assert not (is_late and transfer.waits_for_peer), "a source waits for a silent sink"

    def check_idle(self) -> None:
        assert not self._live
        assert not self._node.source.is_waiting
        assert not self._node.sink.is_waiting
