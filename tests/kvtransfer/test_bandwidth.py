"""How fast a link is said to be: what is no matter of the link counts, or what has changed is not told."""

import pytest

from kvtransfer.bandwidth import HALF_LIFE_BYTES, MAX_RUN_BYTES, MIB, Bandwidth
from kvtransfer.carrier import Connected
from kvtransfer.context import Context
from kvtransfer.counters import Counters
from kvtransfer.events import LinkMeasured, TransferAcked
from kvtransfer.messages import Acked, Blocks, BlocksAck, Closed, Finish
from kvtransfer.settings import KVSettings
from kvtransfer.source import Source
from kvtransfer.ticket import Ticket
from tests.kvtransfer.fake_link import FakeClock, FakeOutbox
from tests.kvtransfer.worlds import FINGERPRINT, ByteStore, keys_for


def run(bandwidth: Bandwidth, num_bytes: int, seconds: float, began: float = 0.0) -> None:
    bandwidth.sent(began)
    bandwidth.acknowledged(num_bytes, began + seconds, is_idle=True)


def test_pause_between_two_runs_counts() -> None:
    bandwidth = Bandwidth()
    run(bandwidth, 2 * MIB, 0.5)
    run(bandwidth, 2 * MIB, 0.5, began=100.0)
    assert bandwidth.bytes_per_s == pytest.approx(4 * MIB)


def test_second_message_begins_the_run_anew() -> None:
    bandwidth = Bandwidth()
    bandwidth.sent(0.0)
    bandwidth.sent(3.0)
    bandwidth.acknowledged(MIB, 3.5, is_idle=False)
    bandwidth.acknowledged(MIB, 4.0, is_idle=True)
    assert bandwidth.bytes_per_s == pytest.approx(MIB / 2)


def test_short_run_counts_as_slow() -> None:
    """What a single small message takes is the way there and back."""
    bandwidth = Bandwidth()
    for index in range(100):
        run(bandwidth, MIB - 1, 1.0, began=10.0 * index)
    assert bandwidth.bytes_per_s == 0.0
    assert bandwidth.news() is None


def test_link_that_is_never_idle_is_never_measured() -> None:
    bandwidth = Bandwidth()
    bandwidth.sent(0.0)
    for second in range(1, 3 * MAX_RUN_BYTES // MIB):
        bandwidth.acknowledged(MIB, float(second), is_idle=False)
    assert bandwidth.bytes_per_s == pytest.approx(MIB)


def test_lost_bytes_make_a_link_slow() -> None:
    bandwidth = Bandwidth()
    bandwidth.sent(0.0)
    bandwidth.acknowledged(2 * MIB, 1.0, is_idle=False)
    bandwidth.interrupted()
    assert bandwidth.bytes_per_s == 0.0
    run(bandwidth, 2 * MIB, 0.5, began=60.0)
    assert bandwidth.bytes_per_s == pytest.approx(4 * MIB)


def test_small_run_counts_as_much_as_a_large_one() -> None:
    bandwidth = Bandwidth()
    run(bandwidth, 32 * MIB, 1.0)
    run(bandwidth, MIB, 1.0, began=10.0)
    assert bandwidth.bytes_per_s > 16 * MIB


def test_old_speed_is_kept_or_a_new_one_is_not_told() -> None:
    bandwidth = Bandwidth()
    run(bandwidth, HALF_LIFE_BYTES, 1.0)
    first = bandwidth.news()
    assert first == pytest.approx(HALF_LIFE_BYTES)
    assert bandwidth.news() is None
    run(bandwidth, MIB, 0.9 * MIB / HALF_LIFE_BYTES)
    assert bandwidth.news() is None
    for _ in range(10):
        run(bandwidth, HALF_LIFE_BYTES, 4.0)
    assert bandwidth.news() == pytest.approx(HALF_LIFE_BYTES / 4, rel=0.01)


# On a link


class OneLink:
    """A source with one link, whose sink is the test."""

    def __init__(self, block_nbytes: int) -> None:
        self.clock, self.outbox = FakeClock(), FakeOutbox()
        self.counters = Counters()
        settings = KVSettings(frame_bytes=block_nbytes)
        self.frame_bytes = block_nbytes
        store = ByteStore(8, block_nbytes)
        self.source = Source(Context("p0", FINGERPRINT, store, self.outbox, settings, self.counters, self.clock))
        self.connect()

    def connect(self) -> None:
        connection = Connected(1, "ipc", is_incoming=False, transport="zmq")
        self.source.link_ready("d0", connection, 64 * MIB, self.frame_bytes)

    def send(self, transfer_id: str, num_blocks: int) -> list[Blocks]:
        self.source.open(Ticket(transfer_id, "d0", 0, num_blocks))
        self.source.send(transfer_id, [(index, index) for index in range(num_blocks)])
        self.source.finish(transfer_id, keys_for(num_blocks), b"")
        sent = [parcel.message for parcel in self.outbox.sent]
        for parcel in self.outbox.sent:
            parcel.handle.done = True
        self.outbox.sent.clear()
        assert isinstance(sent[-1], Finish)
        return [message for message in sent if isinstance(message, Blocks)]

    def acknowledge(self, blocks: list[Blocks], seconds: float) -> None:
        """Each after so long."""
        for message in blocks:
            self.clock.now += seconds
            self.source.receive(1, BlocksAck(message.transfer_id, message.sequence))

    def measured(self) -> list[LinkMeasured]:
        return [event for event in self.outbox.events if isinstance(event, LinkMeasured)]


def test_speed_of_a_link_is_not_told_or_that_of_another_time() -> None:
    """The time before the first block, and after the last, in which a prompt is computed, is not the link's."""
    link = OneLink(MIB)
    link.clock.now += 50
    blocks = link.send("t1", 4)
    link.acknowledge(blocks, 0.25)
    link.clock.now += 50
    link.source.receive(1, Acked("t1"))
    assert link.measured() == [LinkMeasured("d0", "ipc", pytest.approx(4 * MIB))]
    assert any(isinstance(event, TransferAcked) for event in link.outbox.events)
    # As fast as before: nothing new.
    link.acknowledge(link.send("t2", 4), 0.25)
    link.source.receive(1, Acked("t2"))
    # Another link, for which the first one says nothing.
    link.source.link_lost(1, "cut")
    link.connect()
    link.acknowledge(link.send("t3", 4), 0.5)
    assert [event.bytes_per_s for event in link.measured()[1:]] == [pytest.approx(2 * MIB)]


def test_transfers_at_once_are_measured_as_slow_ones() -> None:
    """They share the link: it carries what all of them have."""
    link = OneLink(MIB)
    first, second = link.send("t1", 2), link.send("t2", 2)
    link.acknowledge([first[0], second[0], first[1], second[1]], 0.25)
    assert [event.bytes_per_s for event in link.measured()] == [pytest.approx(4 * MIB)]


def test_transfer_that_came_to_nothing_is_measured() -> None:
    link = OneLink(MIB)
    blocks = link.send("t1", 4)
    link.acknowledge(blocks[:2], 0.25)
    link.source.cancel("t1", "the client left")
    link.clock.now += 3
    link.source.receive(1, Closed("t1", "cancelled", is_answer=True))
    assert link.measured() == []
    link.acknowledge(link.send("t2", 4), 0.25)
    assert [event.bytes_per_s for event in link.measured()] == [pytest.approx(4 * MIB)]
