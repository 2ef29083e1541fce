"""Two carriers agree on a pair or on its absence, in the open; what a pair does wrong ends its own link."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.carrier import Carrier
from kvtransfer.events import (
    FailureReason,
    LinkDown,
    LinkRefused,
    LinkUp,
    TransferAcked,
    TransferComplete,
    TransferFailed,
)
from kvtransfer.frames import digest, digests
from kvtransfer.messages import Ping, encode
from kvtransfer.pairs import wire
from kvtransfer.pairs.carrier import PairCarrier, PairSettings
from kvtransfer.pairs.communicator import Communicator, PairPlan
from kvtransfer.pairs.nccl import way_of
from kvtransfer.pairs.store import PairStore
from kvtransfer.settings import KVSettings
from tests.kvtransfer.test_bad_peers import dealer
from tests.kvtransfer.worlds import ByteStore, Worker, World, connect

NBYTES = 1024
CPU = torch.device("cpu")
PATIENT = KVSettings(redial_min_s=30.0)


@dataclass
class Wire:
    """What two fake ranks share: the blocks under way, and a gate that a test may close."""

    blocks: "queue.SimpleQueue[torch.Tensor]" = field(default_factory=queue.SimpleQueue)
    is_open: threading.Event = field(default_factory=threading.Event)
    num_received: int = 0

    def __post_init__(self) -> None:
        self.is_open.set()


class FakeRank:
    """Meets the other rank through the store, then moves blocks through a queue."""

    def __init__(self, plan: PairPlan, store: PairStore, between: Wire) -> None:
        store.set(f"rank {plan.rank}", b"here")
        assert store.get(f"rank {1 - plan.rank}") == b"here"
        self._between = between
        self._is_aborted = False

    @property
    def path(self) -> str:
        return "fake"

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        for block in blocks:
            self._between.blocks.put(block.clone())

    def receive(self, count: int) -> torch.Tensor:
        while not self._between.is_open.wait(0.01):
            if self._is_aborted:
                raise RuntimeError("aborted")
        self._between.num_received += count
        return torch.stack([self._between.blocks.get(timeout=30) for _ in range(count)])

    def abort(self) -> None:
        self._is_aborted = True


def fake(between: Wire) -> Callable[[PairPlan, PairStore], Communicator]:
    return lambda plan, store: FakeRank(plan, store, between)


def refuses(word: str) -> Callable[[PairPlan, PairStore], Communicator]:
    def make(plan: PairPlan, store: PairStore) -> Communicator:
        raise RuntimeError(f"{plan.transport} {word}")

    return make


def paired(
    *transports: str, make: Callable[[PairPlan, PairStore], Communicator] | None = None
) -> Callable[[Carrier], Carrier]:
    made = PairSettings(transports, NBYTES, CPU, timeout_s=4.0)

    def wrap(inner: Carrier) -> Carrier:
        return PairCarrier(inner, made) if make is None else PairCarrier(inner, made, make)

    return wrap


def is_moved(source: Worker, sink: Worker, name: str = "t") -> bool:
    """Three blocks, there and compared."""
    patterns = [source.store.fill(block, f"{name} {block}") for block in range(3)]
    source.push(sink.ticket_for(name, [7, 8, 9]), [0, 1, 2])
    sink.seen.wait(TransferComplete, name)
    source.seen.wait(TransferAcked, name)
    return [bytes(sink.store.view(block)) for block in (7, 8, 9)] == patterns


def test_pair_that_cannot_be_formed_stops_the_link(tcp: World) -> None:
    """The next of the list is taken, and who looks is told why."""
    source = tcp.worker("p0", wrap=paired("gloo", "zmq", make=refuses("is out of order")))
    sink = tcp.worker("d0", wrap=paired("gloo", "zmq"))
    connect(source, sink)
    up = source.seen.wait(LinkUp)
    assert up.path == "tcp"
    assert "gloo is out of order" in up.fallback
    assert is_moved(source, sink)


def test_sinks_failure_is_the_sources_riddle(tcp: World) -> None:
    source = tcp.worker("p0", wrap=paired("gloo", "zmq"))
    sink = tcp.worker("d0", wrap=paired("gloo", "zmq", make=refuses("is out of order")))
    connect(source, sink)
    assert "the peer: gloo is out of order" in source.seen.wait(LinkUp).fallback
    assert is_moved(source, sink)


@pytest.mark.parametrize(
    ("ours", "theirs", "complaint"),
    [
        (("gloo",), ("zmq",), "the sink: it takes zmq"),
        (("zmq",), ("gloo",), "the sink: it takes gloo"),
        (("nccl",), ("nccl", "zmq"), "not on a GPU"),
    ],
)
def test_something_is_used_that_nobody_asked_for(
    tcp: World, ours: tuple[str, ...], theirs: tuple[str, ...], complaint: str
) -> None:
    """Without a transport in common there is no link, and the reason is told; never a silent third way."""
    source = tcp.worker("p0", wrap=paired(*ours), settings=PATIENT)
    sink = tcp.worker("d0", wrap=paired(*theirs))
    source.agent.set_peers({"d0": sink.agent.endpoint})
    # What the sink was told to take it will not take later either; a GPU of our own may be a matter of the driver.
    told = source.seen.wait(LinkDown if ours == ("nccl",) else LinkRefused)
    assert complaint in str(told)
    assert not [event for event in source.seen.events if isinstance(event, LinkUp)]


def test_order_of_preference_is_the_sinks(tcp: World) -> None:
    source = tcp.worker("p0", wrap=paired("zmq", "gloo"))
    sink = tcp.worker("d0", wrap=paired("gloo", "zmq"))
    connect(source, sink)
    assert source.seen.wait(LinkUp) == LinkUp("d0", "tcp", "zmq")
    assert is_moved(source, sink)


def test_missing_gpu_is_not_told(tcp: World) -> None:
    source, sink = (tcp.worker(name, wrap=paired("nccl", "gloo", "zmq")) for name in ("p0", "d0"))
    connect(source, sink)
    up = source.seen.wait(LinkUp)
    assert (up.path, up.transport, up.fallback) == ("gloo", "gloo", "nccl: the pool is on cpu, not on a GPU")
    assert source.agent.stats().peers["d0"].path == "gloo"
    assert is_moved(source, sink)


def test_finish_overtakes_the_blocks_it_ends(tcp: World) -> None:
    """Headers are faster than blocks: what came behind a message waits until its blocks are there."""
    between = Wire()
    source, sink = (tcp.worker(name, wrap=paired("gloo", make=fake(between))) for name in ("p0", "d0"))
    connect(source, sink)
    between.is_open.clear()
    pattern = source.store.fill(0, "late")
    source.push(sink.ticket_for("t", [5]), [0])
    source.push(sink.ticket_for("behind", []), [])
    assert not sink.seen.terminal("t")
    assert not sink.seen.terminal("behind")
    between.is_open.set()
    sink.seen.wait(TransferComplete, "t")
    sink.seen.wait(TransferComplete, "behind")
    assert bytes(sink.store.view(5)) == pattern


def test_cancelled_block_is_written(tcp: World) -> None:
    """It was announced, so it is received: into memory of its own, and dropped."""
    between = Wire()
    source, sink = (tcp.worker(name, wrap=paired("gloo", make=fake(between))) for name in ("p0", "d0"))
    connect(source, sink)
    between.is_open.clear()
    source.store.fill(0, "cancelled")
    own = sink.store.fill(5, "somebody else's by now")
    ticket = sink.ticket_for("t", [5])
    source.agent.open(ticket)
    source.agent.send("t", [(0, 0)])
    while between.blocks.empty():
        assert not source.seen.terminal("t")
    sink.agent.cancel("t", "the client is gone")
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.CANCELLED
    between.is_open.set()
    source.seen.wait(TransferFailed, "t")
    assert is_moved(source, sink, "next")
    assert bytes(sink.store.view(5)) == own


def test_blocks_of_another_size_are_posted() -> None:
    """A receive is posted for the agreed size alone: in Gloo a larger message ends the process."""
    for nbytes in (1, NBYTES - 1, NBYTES + 1, 1 << 40):
        with pytest.raises(ValueError, match="agreed were 1024"):
            wire.announced(memoryview(wire.announce(3, nbytes)), NBYTES)
    assert wire.announced(memoryview(wire.announce(3, NBYTES)), NBYTES) == 3
    damaged = bytearray(wire.announce(3, NBYTES))
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        wire.announced(memoryview(damaged), NBYTES)


@pytest.mark.parametrize(
    "message",
    [
        [b"\x07" + encode(Ping())],
        [b""],
        [wire.PAIRED + encode(Ping()), wire.announce(1, NBYTES)],
        [wire.OWN + b"nonsense"],
        [wire.OWN + encode(Ping())],
        [wire.encode(wire.Ready(0)), b"surplus"],
        [wire.encode(wire.Answer(0, "zmq"))],
        [wire.encode(wire.Offer(wire.VERSION, 1, ["zmq"], NBYTES))],
        [wire.encode(wire.Ready(0))],
    ],
    ids=["kind", "empty", "pair that is none", "garbage", "other", "frames", "answer", "offer", "ready"],
)
def test_message_that_makes_no_sense_ends_the_worker(tcp: World, message: list[bytes]) -> None:
    """It ends its own link, whose peer is told; others go on."""
    source, sink = (tcp.worker(name, wrap=paired("zmq")) for name in ("p0", "d0"))
    connect(source, sink)
    with dealer(sink.agent.endpoint) as stranger:
        stranger.send(wire.encode(wire.Offer(wire.VERSION, 0, ["zmq"], NBYTES)))
        assert isinstance(wire.decode(memoryview(stranger.recv())[1:]), wire.Answer)
        stranger.send_multipart(message)
        said = wire.decode(memoryview(stranger.recv())[1:])
        assert isinstance(said, wire.Ended)
        assert "bad message" in said.detail
        assert stranger.recv_multipart() == [b"", b""]  # asked to close
    assert is_moved(source, sink)  # and so the KV thread has turned since
    assert sink.agent.stats().links_rejected == 1


def test_more_is_posted_than_credit_allows(tcp: World) -> None:
    """Who announces blocks for ever fills nobody's memory."""
    between = Wire()
    small = PairSettings(("gloo",), NBYTES, CPU, timeout_s=4.0, max_pending_bytes=4 * NBYTES)
    source = tcp.worker("p0", wrap=paired("gloo", make=fake(between)), settings=PATIENT)
    sink = tcp.worker("d0", wrap=lambda inner: PairCarrier(inner, small, fake(between)))
    connect(source, sink)
    between.is_open.clear()
    for block in range(5):
        source.agent.open(sink.ticket_for(f"t{block}", [block]))
        source.agent.send(f"t{block}", [(0, block)])
    assert "5 blocks under way are more than the credit allows" in source.seen.wait(LinkDown).reason
    assert between.num_received <= 1


def test_agent_waits_for_a_library_that_does_not_let_go(tcp: World) -> None:
    """A peer that is frozen in mid-transfer keeps its thread, not this process."""
    between = Wire()
    stuck = threading.Event()

    class StuckRank(FakeRank):
        def receive(self, count: int) -> torch.Tensor:
            stuck.set()
            between.is_open.wait(60)
            raise RuntimeError("let go at last")

    hasty = PairSettings(("gloo",), NBYTES, CPU, close_timeout_s=0.1)
    source = tcp.worker("p0", wrap=paired("gloo", make=fake(between)))
    sink = tcp.worker("d0", wrap=lambda inner: PairCarrier(inner, hasty, lambda *made: StuckRank(*made, between)))
    connect(source, sink)
    between.is_open.clear()
    source.push(sink.ticket_for("t", [0]), [0])
    assert stuck.wait(30)
    sink.agent.close()
    assert sink.seen.wait(TransferFailed, "t").reason is FailureReason.SHUTDOWN
    between.is_open.set()


def test_pools_of_two_sizes_form_a_pair(tcp: World) -> None:
    source = tcp.worker("p0", wrap=paired("gloo"), settings=PATIENT)
    other = PairSettings(("gloo",), 2 * NBYTES, CPU)
    sink = tcp.worker("d0", wrap=lambda inner: PairCarrier(inner, other), store=ByteStore(8, 2 * NBYTES))
    source.agent.set_peers({"d0": sink.agent.endpoint})
    assert "blocks of 2048 bytes here, 1024 there" in source.seen.wait(LinkRefused).detail


def test_store_waits_for_ever_or_forgets() -> None:
    published: list[tuple[str, bytes]] = []
    store = PairStore(lambda key, value: published.append((key, value)), 0.05)
    store.set("ours", "text")
    store.put("theirs", b"\x00bytes")
    assert published == [("ours", b"text")]
    assert (store.get("ours"), store.get("theirs")) == (b"text", b"\x00bytes")
    with pytest.raises(RuntimeError, match="did not set 'absent'"):
        store.get("absent")
    patient = PairStore(lambda key, value: None, 60.0)
    threading.Timer(0.05, patient.end, ["the link ended"]).start()
    with pytest.raises(RuntimeError, match="the link ended"):
        patient.get("absent")


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=2, max_size=200), st.data())
def test_changed_block_has_the_same_sum(data: bytes, draw: st.DataObject) -> None:
    """One bit, or two words that changed places."""
    block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    place = draw.draw(st.integers(0, len(data) - 1))
    flipped = block.clone()
    flipped[place] ^= 1 << draw.draw(st.integers(0, 7))
    assert digest(flipped) != digest(block)
    assert digests([block.clone(), flipped]) == [digest(block), digest(flipped)]
    if len(data) >= 16 and data[:8] != data[8:16]:
        swapped = torch.cat([block[8:16], block[:8], block[16:]])
        assert digest(swapped) != digest(block)


def test_way_that_nccl_took_is_not_read() -> None:
    log = """
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO Connected all rings
"""
    assert way_of(log) == "P2P/CUMEM"
    assert way_of(
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\nChannel 00 : 1[1] -> 0[0] via SHM/direct/direct"
    ) == ("NET/Socket/0, SHM/direct/direct")
    assert way_of("Channel 00 : 2[2] -> 3[3] via P2P/IPC\nnothing") == ""
