"""Blocks of one pool arrive in another: whole, in the right place, once, and both sides hear of the end."""

import pytest

from kvtransfer.carrier import ZMQ
from kvtransfer.events import FailureReason, LinkUp, Side, TransferAcked, TransferComplete, TransferFailed
from kvtransfer.ticket import Ticket
from splitserve.service.errors import Internal, InvalidRequest, Unavailable
from tests.kvtransfer.worlds import World, connect, keys_for


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40])
def test_blocks_land_in_the_wrong_place_or_change(net: World, num_blocks: int) -> None:
    """Block ids differ on both sides; logical indices decide."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    source_ids = [63 - i for i in range(num_blocks)]
    sink_ids = [(5 * i + 3) % 64 for i in range(num_blocks)]
    patterns = [source.store.fill(block, f"block {i}") for i, block in enumerate(source_ids)]

    source.push(sink.ticket_for("t", sink_ids), source_ids, payload=b"first token")

    complete = sink.seen.wait(TransferComplete)
    assert (complete.transfer_id, complete.payload, complete.source_worker_id) == ("t", b"first token", "p0")
    assert complete.keys == keys_for(num_blocks)
    assert complete.num_bytes == num_blocks * 1024
    acked = source.seen.wait(TransferAcked)
    assert (acked.sink_worker_id, acked.num_bytes) == ("d0", num_blocks * 1024)
    assert [bytes(sink.store.view(block)) for block in sink_ids] == patterns
    assert len(sink.seen.terminal("t")) == len(source.seen.terminal("t")) == 1


@pytest.mark.parametrize("num_cached", [0, 3])
def test_nothing_to_send_means_no_done(net: World, num_cached: int) -> None:
    """C46: no block has to move, twenty times: completion and release do not depend on payload."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    for i in range(20):
        source.push(sink.ticket_for(f"t{i}", list(range(num_cached)), num_cached), [], payload=b"token")
        assert sink.seen.wait(TransferComplete, f"t{i}").num_bytes == 0
        source.seen.wait(TransferAcked, f"t{i}")
    assert source.agent.stats().bytes_sent == 0


def test_a_cached_prefix_is_sent_again(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    sink_ids = [10, 11, 12, 13]
    cached = [sink.store.fill(block, f"cached {block}") for block in sink_ids[:2]]
    fresh = [source.store.fill(block, f"fresh {block}") for block in (1, 2)]

    source.push(sink.ticket_for("t", sink_ids, num_cached=2), [1, 2])

    assert sink.seen.wait(TransferComplete).num_bytes == 2 * 1024
    assert [bytes(sink.store.view(block)) for block in sink_ids] == cached + fresh
    stats = source.agent.stats()
    assert (stats.bytes_sent, stats.peers["d0"].blocks_sent) == (2048, 2)


def test_a_chunk_waits_for_the_last_one(net: World) -> None:
    """Blocks of a finished chunk arrive while the next one is still being computed."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    patterns = [source.store.fill(block, block) for block in range(6)]
    source.agent.open(sink.ticket_for("t", [0, 1, 2, 3, 4, 5]))
    for chunk in range(3):
        source.agent.send("t", [(2 * chunk, 2 * chunk), (2 * chunk + 1, 2 * chunk + 1)])
        while sink.agent.stats().bytes_received < (chunk + 1) * 2048:
            assert not sink.seen.terminal("t")
    source.agent.finish("t", keys_for(6), b"")
    sink.seen.wait(TransferComplete)
    assert [bytes(sink.store.view(block)) for block in range(6)] == patterns


def test_a_transfer_opened_before_its_link_is_lost(net: World) -> None:
    """C77: a message sent before the connection exists would vanish; the transfer waits for the link instead."""
    source, sink = net.worker("p0"), net.worker("d0")
    pattern = source.store.fill(4, "early")
    source.push(sink.ticket_for("t", [9]), [4])
    source.agent.set_peers({"d0": sink.agent.endpoint})
    sink.seen.wait(TransferComplete)
    source.seen.wait(TransferAcked)
    assert bytes(sink.store.view(9)) == pattern


def test_both_ways_between_two_workers(net: World) -> None:
    """Any worker may be source and sink at once."""
    a, b = net.worker("a"), net.worker("b")
    connect(a, b)
    connect(b, a)
    there, back = a.store.fill(0, "there"), b.store.fill(0, "back")
    a.push(b.ticket_for("there", [1]), [0])
    b.push(a.ticket_for("back", [1]), [0])
    b.seen.wait(TransferComplete, "there")
    a.seen.wait(TransferComplete, "back")
    assert (bytes(b.store.view(1)), bytes(a.store.view(1))) == (there, back)


def test_the_path_in_use_is_hidden(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    assert source.seen.wait(LinkUp) == LinkUp(
        "d0", net.transport, ZMQ if net.transport in ("tcp", "ipc") else net.transport
    )
    source.push(sink.ticket_for("t", [0]), [0])
    source.seen.wait(TransferAcked)
    assert source.agent.stats().peers["d0"].path == net.transport
    assert sink.agent.stats().peers["p0"].path == net.transport


@pytest.mark.parametrize(
    ("blocks", "keys", "complaint"),
    [
        ([(0, 0), (0, 1)], 2, "twice"),
        ([(0, 0), (2, 1)], 2, "outside"),
        ([(0, 0)], 2, "1 of 2"),
        ([(0, 0), (1, 1)], 1, "1 keys"),
        ([(0, 0), (1, 99)], 2, "no block 99"),
    ],
)
def test_an_impossible_request_stops_the_thread(
    loopback: World, blocks: list[tuple[int, int]], keys: int, complaint: str
) -> None:
    """C03: an inconsistent hand-off fails on both sides, with the reason; the next transfer works."""
    source, sink = loopback.worker("p0"), loopback.worker("d0")
    connect(source, sink)
    source.agent.open(sink.ticket_for("t", [5, 6]))
    source.agent.send("t", blocks)
    source.agent.finish("t", keys_for(keys), b"")
    failed = source.seen.wait(TransferFailed)
    assert (failed.side, failed.reason) == (Side.SOURCE, FailureReason.INVALID)
    assert complaint in failed.detail
    assert complaint in sink.seen.wait(TransferFailed).detail
    source.push(sink.ticket_for("next", [5]), [0])
    sink.seen.wait(TransferComplete, "next")


def test_two_transfers_of_one_id(loopback: World) -> None:
    """C40: the transfer id is the only name; it must be unique while it lives."""
    source, sink = loopback.worker("p0"), loopback.worker("d0")
    sink.agent.expect("t", [0], 0, 30.0)
    source.agent.open(Ticket("t", "d0", 0, 1))
    with pytest.raises(Internal, match="already open"):
        sink.agent.expect("t", [1], 0, 30.0)
    with pytest.raises(Internal, match="already open"):
        source.agent.open(Ticket("t", "d0", 0, 1))


@pytest.mark.parametrize(("block_ids", "num_cached"), [([1, 1], 0), ([1], 2), ([1], -1)])
def test_an_expectation_that_cannot_be_met(loopback: World, block_ids: list[int], num_cached: int) -> None:
    sink = loopback.worker("d0")
    with pytest.raises(InvalidRequest):
        sink.agent.expect("t", block_ids, num_cached, 30.0)


def test_closing_leaves_a_transfer_without_an_end(net: World) -> None:
    """Every open transfer of either side has had its terminal event when close returns; later requests are refused."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    source.agent.open(sink.ticket_for("open", [0, 1]))
    source.agent.send("open", [(0, 0)])
    sink.agent.expect("silent", [2], 0, 30.0)
    sink.agent.close()
    ends = [sink.seen.terminal(name) for name in ("open", "silent")]
    assert all(isinstance(end, TransferFailed) and end.reason is FailureReason.SHUTDOWN for (end,) in ends)
    assert source.seen.wait(TransferFailed, "open").reason is FailureReason.LINK_LOST
    source.agent.open(Ticket("unlinked", "d9", 0, 1))
    source.agent.close()
    (end,) = source.seen.terminal("unlinked")
    assert isinstance(end, TransferFailed)
    assert end.reason is FailureReason.SHUTDOWN
    with pytest.raises(Unavailable):
        sink.agent.expect("late", [3], 0, 30.0)
    sink.agent.cancel("open", "too late")
    sink.agent.close()
