"""A sink that stops without a word: the source's memory stays bounded, nobody else suffers, the successor works."""

import dataclasses

import pytest

from kvtransfer.carrier import Connected
from kvtransfer.events import FailureReason, LinkDown, LinkUp, TransferAcked, TransferComplete, TransferFailed
from kvtransfer.messages import Ping, encode
from kvtransfer.settings import MIB, KVSettings
from kvtransfer.ticket import Ticket
from kvtransfer.zeromq import ZeroMQCarrier
from tests.kvtransfer.sink_process import WINDOW_BYTES, sink_process
from tests.kvtransfer.worlds import ByteStore, Worker, World, connect, keys_for

HASTY = KVSettings(frame_bytes=16 * 1024, ping_interval_s=0.2, ping_timeout_s=1.0, transfer_timeout_s=2.0)
# Only the transport's own word can end a transfer within the test's patience.
PATIENT = KVSettings(ping_interval_s=3600.0, ping_timeout_s=3600.0, transfer_timeout_s=3600.0, idle_timeout_s=3600.0)
NUM_MANY = 3000


class RepeatingStore(ByteStore):
    """More block ids than memory, for a prompt of 3,000 blocks."""

    def view(self, block_id: int) -> memoryview:
        return super().view(block_id % self.num_blocks)


def test_a_frozen_receiver_fills_the_senders_memory(real_net: World) -> None:
    """C77: 3,000 blocks for a receiver that is frozen; another one gets its own meanwhile."""
    source = real_net.worker("p0", settings=HASTY, store=RepeatingStore(64, 4096))
    other = real_net.worker("d1", num_blocks=8, block_nbytes=4096)
    with sink_process("d0", block_nbytes=4096, transport=real_net.transport) as frozen:
        source.agent.set_peers({"d0": frozen.endpoint, "d1": other.agent.endpoint})
        source.seen.wait(LinkUp, count=2)
        many = frozen.ticket_for("many", NUM_MANY)
        frozen.freeze()
        source.push(many, list(range(NUM_MANY)))
        pattern = source.store.fill(5, "for the other one")
        source.push(other.ticket_for("small", [3]), [5])
        other.seen.wait(TransferComplete, "small")
        source.seen.wait(TransferAcked, "small")
        assert bytes(other.store.view(3)) == pattern
        failed = source.seen.wait(TransferFailed, "many")
        assert failed.reason in (FailureReason.LINK_LOST, FailureReason.TIMEOUT)
        stats = source.agent.stats().peers["d0"]
        assert 0 < stats.peak_in_flight_bytes <= WINDOW_BYTES
        assert stats.in_flight_bytes == 0
        frozen.thaw()
        source.seen.wait(LinkUp, count=3)
        source.push(frozen.ticket_for("after", 4), [0, 1, 2, 3])
        source.seen.wait(TransferAcked, "after")


def test_a_cancel_unpins_what_the_transport_still_reads(real_net: World) -> None:
    """C02, C76: a block larger than any socket buffer is stuck in a frozen link; its pin outlives the cancel."""
    block_nbytes = 16 * 1024 * 1024
    source = real_net.worker("p0", settings=HASTY, num_blocks=1, block_nbytes=block_nbytes)
    with sink_process("d0", block_nbytes=block_nbytes, transport=real_net.transport) as frozen:
        source.agent.set_peers({"d0": frozen.endpoint})
        source.seen.wait(LinkUp)
        ticket = frozen.ticket_for("t", 1)
        frozen.freeze()
        source.agent.open(ticket)
        source.agent.send("t", [(0, 0)])
        source.agent.cancel("t", "the client is gone")
        failed = source.seen.wait(TransferFailed, "t")
        assert (failed.reason, failed.detail) == (FailureReason.CANCELLED, "the client is gone")
        order = [type(event) for event in source.seen.events]
        assert order.index(LinkDown) < order.index(TransferFailed), "unpinned while the link could still read"


@pytest.mark.parametrize("sizes", [(16 * MIB, 1024), (1024, 16 * MIB)])
def test_a_small_frame_speaks_for_a_large_one(sizes: tuple[int, int]) -> None:
    """C76: ZeroMQ copies a small frame and calls it sent at once; the large one beside it is still being read."""
    carrier = ZeroMQCarrier()
    carrier.start()
    try:
        with sink_process("d0", block_nbytes=16 * MIB) as frozen:
            link = carrier.connect(frozen.endpoint)
            while not [event for event in carrier.poll(1.0) if isinstance(event, Connected)]:
                assert frozen.process.poll() is None
            frozen.freeze()
            handle = carrier.send(link, encode(Ping()), [memoryview(bytearray(size)) for size in sizes])
            for _ in range(20):
                carrier.poll(0.01)
                assert not handle.done
            frozen.thaw()
            while not handle.done:
                carrier.poll(0.01)
    finally:
        carrier.close()


def test_a_restarted_sink_poisons_its_peers(real_net: World) -> None:
    """C33, C78: killed and restarted at the same address three times; each successor gets its blocks at once."""
    source = real_net.worker("p0", num_blocks=16, block_nbytes=4096, settings=PATIENT)
    survivor = real_net.worker("d1", num_blocks=16, block_nbytes=4096)
    port = 0
    for life in range(3):
        with sink_process(f"d0.{life}", block_nbytes=4096, port=port, transport=real_net.transport) as sink:
            port = int(sink.endpoint.tcp.rpartition(":")[2])
            source.agent.set_peers({sink.worker_id: sink.endpoint, "d1": survivor.agent.endpoint})
            _send(source, sink.ticket_for(f"first.{life}", 4))
            source.seen.wait(TransferAcked, f"first.{life}")
            assert sink.line() == f"complete first.{life}"
            source.agent.open(sink.ticket_for(f"victim.{life}", 4))
            source.agent.send(f"victim.{life}", [(0, 0), (1, 1)])
            sink.kill()
            failed = source.seen.wait(TransferFailed, f"victim.{life}")
            assert failed.reason is FailureReason.LINK_LOST
            _send(source, survivor.ticket_for(f"other.{life}", [0, 1, 2, 3]))
            source.seen.wait(TransferAcked, f"other.{life}")


def test_a_killed_source_leaves_its_sink_waiting(real_net: World) -> None:
    """The sink hears of the end of a link at once, long before the transfer's own deadline."""
    source, sink = real_net.worker("p0", settings=PATIENT), real_net.worker("d0", settings=PATIENT)
    connect(source, sink)
    source.agent.open(sink.ticket_for("t", [0, 1], timeout_s=3600.0))
    source.agent.send("t", [(0, 0)])
    while sink.agent.stats().bytes_received < 1024:
        assert not sink.seen.terminal("t")
    source.agent.close()
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.LINK_LOST


def test_a_peer_that_left_is_still_written_to(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    source.agent.open(sink.ticket_for("t", [0, 1]))
    source.agent.set_peers({})
    assert source.seen.wait(TransferFailed, "t").reason is FailureReason.LINK_LOST
    hurried = net.worker("p1", settings=dataclasses.replace(HASTY, link_wait_s=0.1))
    hurried.push(sink.ticket_for("nobody", [2]), [0])
    failed = hurried.seen.wait(TransferFailed, "nobody")
    assert failed.reason is FailureReason.UNREACHABLE
    assert "d0" in failed.detail


def test_an_absent_peer_is_dialled_until_it_is_there(real_net: World) -> None:
    source = real_net.worker("p0")
    with sink_process("gone", block_nbytes=1024, transport=real_net.transport) as sink:
        absent = sink.endpoint
    source.agent.set_peers({"gone": absent})
    source.seen.wait(LinkDown, count=3)


def _send(source: Worker, ticket: Ticket) -> None:
    source.agent.open(ticket)
    source.agent.send(ticket.transfer_id, [(i, i) for i in range(ticket.num_blocks)])
    source.agent.finish(ticket.transfer_id, keys_for(ticket.num_blocks), b"")
