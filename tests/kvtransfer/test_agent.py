"""The KV thread outlives its owner's mistakes, and says so when it cannot."""

import dataclasses
import subprocess
import sys
from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog
import zmq
from structlog.testing import LogCapture

from kvtransfer import agent
from kvtransfer.carrier import CarrierEvent, Connected
from kvtransfer.counters import MAX_PEERS, Counters
from kvtransfer.events import (
    AgentStopped,
    FailureReason,
    KVEvent,
    LinkDown,
    LinkUp,
    Side,
    TransferAcked,
    TransferComplete,
    TransferFailed,
)
from kvtransfer.health import LinkHealth, Verdict
from kvtransfer.memory import MemoryCarrier, MemoryHub
from kvtransfer.settings import KVSettings
from kvtransfer.zeromq import ZeroMQCarrier
from splitserve.service.errors import Unavailable
from tests.kvtransfer.worlds import ByteStore, World, connect, keys_for, world


def test_a_failing_event_handler_ends_the_thread(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0")

    def fail(event: KVEvent) -> None:
        if isinstance(event, TransferAcked) and event.transfer_id == "first":
            raise RuntimeError("the owner's mistake")

    source.seen.react = fail
    connect(source, sink)
    source.push(sink.ticket_for("first", [0]), [0])
    source.push(sink.ticket_for("second", [1]), [1])
    source.seen.wait(TransferAcked, "second")


class BrokenStore(ByteStore):
    """Fails in a way that nobody foresaw."""

    def write(self, block_id: int, data: memoryview) -> None:
        raise RuntimeError("the pool is gone")


def test_a_thread_dies_in_silence(net: World) -> None:
    """Its transfers fail, its owner is told, its peers see the link end."""
    source, sink = net.worker("p0"), net.worker("d0", store=BrokenStore(4, 1024))
    connect(source, sink)
    sink.agent.expect("waiting", [3], 0, 3600.0)
    source.push(sink.ticket_for("t", [0]), [0])
    assert "the pool is gone" in sink.seen.wait(AgentStopped).detail
    for name in ("t", "waiting"):
        (failed,) = sink.seen.terminal(name)
        assert isinstance(failed, TransferFailed)
        assert failed.reason is FailureReason.SHUTDOWN
    assert source.seen.wait(TransferFailed, "t").reason is FailureReason.LINK_LOST


class UnreadableStore(ByteStore):
    """Fails in a way that nobody foresaw, at the source."""

    def view(self, block_id: int) -> memoryview:
        raise RuntimeError("the pool is gone")


def test_requests_behind_a_fatal_one_are_never_answered(net: World) -> None:
    """Each of them has its terminal event before the owner hears that the thread has ended."""
    source, sink = net.worker("p0", store=UnreadableStore(4, 1024)), net.worker("d0")
    connect(source, sink)
    names = [f"t{i}" for i in range(20)]
    tickets = [sink.ticket_for(name, [i]) for i, name in enumerate(names)]
    opened = []
    for ticket in tickets:
        try:
            source.push(ticket, [0])
        except Unavailable:
            break  # it has ended already
        opened.append(ticket.transfer_id)
    source.seen.wait(AgentStopped)
    assert opened
    assert [len(source.seen.terminal(name)) for name in opened] == [1] * len(opened)


def test_a_block_that_cannot_be_written_stops_the_sink(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0", num_blocks=4)
    connect(source, sink)
    source.push(sink.ticket_for("t", [2, 77]), [0, 1])
    assert sink.seen.wait(TransferFailed).reason is FailureReason.INVALID
    failed = source.seen.wait(TransferFailed)
    assert failed.reason is FailureReason.CANCELLED, "the source takes the sink's fault for its own"
    assert "cannot be written" in failed.detail
    source.push(sink.ticket_for("next", [2, 3]), [0, 1])
    source.seen.wait(TransferAcked, "next")


def test_a_reservation_without_a_source_is_kept_for_ever(net: World) -> None:
    """C32, C40: an id that nobody sends; the failure names what was missing."""
    sink = net.worker("d0")
    sink.agent.expect("never/sent #1", [0, 1], 0, 0.1)
    failed = sink.seen.wait(TransferFailed, "never/sent #1")
    assert (failed.side, failed.reason) == (Side.SINK, FailureReason.TIMEOUT)
    assert "0 of 2 blocks arrived, without Finish" in failed.detail


def test_a_source_that_stops_half_way_is_decoded(net: World) -> None:
    """C03: half of the blocks and no Finish; neither side may take it for done."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    source.agent.open(sink.ticket_for("t", [0, 1], timeout_s=0.3))
    source.agent.send("t", [(0, 0)])
    assert "1 of 2 blocks arrived" in sink.seen.wait(TransferFailed).detail
    failed = source.seen.wait(TransferFailed)
    assert failed.reason is FailureReason.TIMEOUT
    assert failed.detail.startswith("the sink gave up")


def test_a_forgotten_source_transfer_is_kept_for_ever(net: World) -> None:
    settings = dataclasses.replace(KVSettings(), idle_timeout_s=0.1)
    source, sink = net.worker("p0", settings=settings), net.worker("d0")
    connect(source, sink)
    source.agent.open(sink.ticket_for("t", [0], timeout_s=3600.0))
    assert source.seen.wait(TransferFailed).reason is FailureReason.TIMEOUT
    assert sink.seen.wait(TransferFailed).reason is FailureReason.TIMEOUT


@pytest.mark.parametrize("canceller", ["source", "sink"])
@pytest.mark.parametrize("stage", ["expected", "opened", "half sent", "all sent"])
def test_a_cancel_reaches_one_side_only(net: World, canceller: str, stage: str) -> None:
    """C01, C25: at any stage; both sides end once, the sink's blocks are its own at once."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    ticket = sink.ticket_for("t", [0, 1])
    if stage != "expected":
        source.agent.open(ticket)
    if stage in ("half sent", "all sent"):
        source.agent.send("t", [(0, 0), (1, 1)] if stage == "all sent" else [(0, 0)])
    (source if canceller == "source" else sink).agent.cancel("t", "the client is gone")
    if stage == "expected":
        # A source that has not opened yet has nothing to cancel; it learns when it does.
        if canceller == "source":
            sink.agent.cancel("t", "the client is gone")
        sink.seen.wait(TransferFailed, "t")
        source.agent.open(ticket)
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.CANCELLED
    own = sink.store.fill(0, "the next owner's")
    reason = source.seen.wait(TransferFailed, "t").reason
    assert reason in (FailureReason.CANCELLED, FailureReason.CLOSED)
    source.push(sink.ticket_for("next", [5]), [5])
    source.seen.wait(TransferAcked, "next")
    assert bytes(sink.store.view(0)) == own
    assert len(source.seen.terminal("t")) == len(sink.seen.terminal("t")) == 1


def test_the_end_is_reported_twice_or_not_counted(net: World) -> None:
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    for name in ("a", "b"):
        source.push(sink.ticket_for(name, [0, 1]), [0, 1])
        sink.seen.wait(TransferComplete, name)
        source.seen.wait(TransferAcked, name)
    source.agent.open(sink.ticket_for("c", [0]))
    source.agent.cancel("c", "enough")
    sink.seen.wait(TransferFailed, "c")
    source.seen.wait(TransferFailed, "c")
    assert source.agent.stats().transfers == {(Side.SOURCE, "OK"): 2, (Side.SOURCE, "CANCELLED"): 1}
    assert sink.agent.stats().transfers == {(Side.SINK, "OK"): 2, (Side.SINK, "CANCELLED"): 1}
    assert sink.agent.stats().bytes_received == source.agent.stats().bytes_sent == 4096
    assert sink.agent.stats().transfer_seconds[Side.SINK] > 0
    source.agent.cancel("c", "again")
    sink.agent.cancel("a", "long done")
    source.push(sink.ticket_for("last", []), [])
    source.seen.wait(TransferAcked, "last")
    assert [len(worker.seen.terminal("c")) for worker in (source, sink)] == [1, 1]


def test_a_dropped_link_is_never_dialled_again(net: World) -> None:
    """The sink closes and another one takes its place under its own id."""
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    sink.agent.close()
    source.seen.wait(LinkDown)
    successor = net.worker("d0b")
    source.agent.set_peers({"d0b": successor.agent.endpoint})
    source.seen.wait(LinkUp, count=2)
    source.agent.open(successor.ticket_for("t", [0]))
    source.agent.send("t", [(0, 0)])
    source.agent.finish("t", keys_for(1), b"")
    source.seen.wait(TransferAcked, "t")


def test_a_busy_peer_is_taken_for_a_silent_one() -> None:
    """Silence counts only while an answer is due, and only from then on."""
    health = LinkHealth(KVSettings(ping_interval_s=1.0, ping_timeout_s=3.0), now=0.0)
    assert health.check(100.0, is_needed=False) is Verdict.FINE
    assert health.check(200.0, is_needed=True) is Verdict.FINE
    assert health.check(201.0, is_needed=True) is Verdict.PING
    assert health.check(201.5, is_needed=True) is Verdict.FINE
    health.heard(202.0)
    assert health.check(204.9, is_needed=True) is Verdict.PING
    assert health.check(205.0, is_needed=True) is Verdict.SILENT


def test_restarts_fill_the_counters() -> None:
    counters = Counters()
    for i in range(MAX_PEERS + 10):
        counters.sent(f"d{i}", 1, 10)
    stats = counters.snapshot()
    assert len(stats.peers) == MAX_PEERS
    assert stats.bytes_sent == (MAX_PEERS + 10) * 10


class NamelessCarrier(MemoryCarrier):
    """Cannot tell how an incoming link reaches it."""

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        return [
            dataclasses.replace(event, path="") if isinstance(event, Connected) and event.is_incoming else event
            for event in super().poll(timeout_s)
        ]


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[MutableMapping[str, Any]]:
    """What the agents log from now on."""
    captured = LogCapture()
    monkeypatch.setattr(agent, "log", structlog.wrap_logger(structlog.ReturnLogger(), processors=[captured]))
    return captured.entries


def test_the_log_hides_the_path(net: World, log_lines: list[MutableMapping[str, Any]]) -> None:
    source, sink = net.worker("p0"), net.worker("d0")
    connect(source, sink)
    source.push(sink.ticket_for("t", [0]), [0])
    sink.seen.wait(TransferComplete)
    source.seen.wait(TransferAcked)
    paths = {line["event"]: line["path"] for line in log_lines if line["event"].startswith("kv blocks")}
    assert paths == {"kv blocks received": net.transport, "kv blocks sent": net.transport}


def test_the_log_shows_an_empty_path(log_lines: list[MutableMapping[str, Any]]) -> None:
    hub = MemoryHub()
    with world("loopback") as made:
        source = made.worker("p0", wrap=lambda _: hub.carrier())
        sink = made.worker("d0", wrap=lambda _: NamelessCarrier(hub))
        connect(source, sink)
        source.push(sink.ticket_for("t", [0]), [0])
        sink.seen.wait(TransferComplete)
    (line,) = [line for line in log_lines if line["event"] == "kv blocks received"]
    assert (line["peer"], "path" in line) == ("p0", False)
    assert sink.agent.stats().peers["p0"].path == ""


def test_a_request_during_close_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread wakes the carrier at the worst moment: when the receiving end has just gone."""
    carrier = ZeroMQCarrier()
    carrier.start()
    receiver = carrier._wake_receiver

    class WakesWhenClosed:
        def close(self, linger: int) -> None:
            receiver.close(linger=linger)
            while carrier._wake_sender is not None and carrier._wake_sender.poll(0, zmq.POLLOUT):
                pass  # until the sending end has noticed
            carrier.wake()

    monkeypatch.setattr(carrier, "_wake_receiver", WakesWhenClosed())
    carrier.close()
    carrier.wake()


def test_transfers_need_torch() -> None:
    """The package is used by processes that must start fast."""
    code = "import sys, kvtransfer.agent, kvtransfer.zeromq, kvtransfer.faults; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
