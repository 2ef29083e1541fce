"""Two carriers that do not come to an agreement: what is said too late, never, or too often."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from kvtransfer.events import LinkDown, LinkUp, TransferFailed
from kvtransfer.messages import Ping, encode, seal
from kvtransfer.pairs import wire
from kvtransfer.pairs.carrier import LASTING_S, MAX_BREAKS, MAX_STUCK_LANES, PairCarrier, PairSettings
from kvtransfer.pairs.communicator import Communicator, PairPlan
from kvtransfer.pairs.store import PairStore
from kvtransfer.settings import KVSettings
from tests.kvtransfer.test_bad_peers import dealer
from tests.kvtransfer.test_pairs import CPU, NBYTES, FakeRank, Wire, fake, is_moved
from tests.kvtransfer.worlds import Worker, World, connect

Make = Callable[[PairPlan, PairStore], Communicator]
HASTY_S = 0.5


def worker(tcp: World, name: str, make: Make, transports: Sequence[str] = ("gloo", "zmq"), **changes: Any) -> Worker:
    made = PairSettings(tuple(transports), NBYTES, CPU, **changes)
    patient = KVSettings(
        connect_timeout_s=30.0,
        redial_max_s=0.1,
        ping_interval_s=0.3,
        ping_timeout_s=2.0,
        transfer_timeout_s=6.0,
    )
    return tcp.worker(name, wrap=lambda inner: PairCarrier(inner, made, make), settings=patient)


class Hangs:
    """A library that forms no pair before it is told to."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.aborted: list[Communicator] = []

    def make(self, plan: PairPlan, store: PairStore) -> Communicator:
        self.may_go.wait(60)
        return LateRank(self)


class LateRank(FakeRank):
    def __init__(self, hangs: Hangs) -> None:
        self._hangs = hangs

    def abort(self) -> None:
        self._hangs.aborted.append(self)


def up_of(source: Worker) -> LinkUp:
    return source.seen.wait(LinkUp)


@pytest.mark.parametrize("who", ["p0", "d0", "both"])
def test_pair_that_forms_for_ever_is_waited_for(tcp: World, who: str) -> None:
    """Whichever side hangs: the next transport is taken, and what is formed too late is taken apart."""
    hangs, between = Hangs(), Wire()
    source, sink = (
        worker(tcp, name, hangs.make if who in (name, "both") else fake(between), form_timeout_s=HASTY_S)
        for name in ("p0", "d0")
    )
    connect(source, sink)
    assert f"{HASTY_S:g} s" in up_of(source).fallback
    assert is_moved(source, sink)
    hangs.may_go.set()
    deadline = time.monotonic() + 30
    while len(hangs.aborted) < 1 + (who == "both"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_word_of_a_try_that_was_given_up_ends_the_link(tcp: World) -> None:
    """The source fails at the moment in which the sink is ready: neither knows of the other's word yet."""
    both = threading.Barrier(2)

    def make(plan: PairPlan, store: PairStore) -> Communicator:
        rank = FakeRank(plan, store, Wire())
        both.wait(30)
        if plan.rank == 0:
            raise RuntimeError("out of order")
        return rank

    for trial in range(12):
        source, sink = (worker(tcp, f"{name}.{trial}", make) for name in ("p", "d"))
        connect(source, sink)
        assert "out of order" in up_of(source).fallback
        assert not [event for event in source.seen.events if isinstance(event, LinkDown)]
        source.agent.close()


def test_stranger_that_never_gets_ready_keeps_a_thread(tcp: World) -> None:
    sink = worker(tcp, "d0", fake(Wire()), form_timeout_s=HASTY_S)
    with dealer(sink.agent.endpoint) as stranger:
        stranger.send(wire.encode(wire.Offer(wire.VERSION, 0, ["gloo"], NBYTES)))
        answer, rendezvous, failed, ended = (wire.decode(memoryview(stranger.recv())[1:]) for _ in range(4))
        assert isinstance(answer, wire.Answer)
        assert isinstance(rendezvous, wire.Rendezvous)
        assert isinstance(failed, wire.Failed)
        assert isinstance(ended, wire.Ended)
        assert "no word" in ended.detail


def test_silent_stranger_keeps_a_link(tcp: World) -> None:
    sink = worker(tcp, "d0", fake(Wire()), form_timeout_s=HASTY_S)
    with dealer(sink.agent.endpoint) as stranger:
        stranger.send(wire.encode(wire.Ready(0)))
        ended = wire.decode(memoryview(stranger.recv())[1:])
        assert isinstance(ended, wire.Ended)


@pytest.mark.parametrize("what", ["keys", "offers", "an empty key"])
def test_stranger_fills_the_memory(tcp: World, what: str) -> None:
    sink = worker(tcp, "d0", fake(Wire()), form_timeout_s=30.0)
    flood = {
        "keys": [wire.encode(wire.Rendezvous(0, f"key {index}", b"v")) for index in range(wire.MAX_VALUES + 1)],
        "offers": [wire.encode(wire.Offer(wire.VERSION, 0, ["gloo"], NBYTES))],
        "an empty key": [wire.OWN + seal(msgspec.msgpack.encode(["Rendezvous", 0, "0/0", b""]))],
    }
    with dealer(sink.agent.endpoint) as stranger:
        stranger.send(wire.encode(wire.Offer(wire.VERSION, 0, ["gloo"], NBYTES)))
        for message in flood[what]:
            stranger.send(message)
        while not isinstance(heard := wire.decode(memoryview(stranger.recv())[1:]), wire.Ended):
            pass
        assert "bad message" in heard.detail


@pytest.mark.parametrize("error", [MemoryError("full"), ImportError("no such library"), AttributeError("renamed")])
def test_error_that_nobody_expects_leaves_a_link_that_looks_well(tcp: World, error: Exception) -> None:
    def make(plan: PairPlan, store: PairStore) -> Communicator:
        raise error

    source, sink = worker(tcp, "p0", make), worker(tcp, "d0", fake(Wire()))
    connect(source, sink)
    assert str(error) in up_of(source).fallback

    class Breaks(FakeRank):
        def send(self, blocks: Sequence[torch.Tensor]) -> None:
            raise error

    between = Wire()
    other = worker(tcp, "p1", lambda *made: Breaks(*made, between), transports=["gloo"])
    far = worker(tcp, "d1", fake(between), transports=["gloo"])
    connect(other, far)
    other.push(far.ticket_for("t", [0]), [0])
    other.seen.wait(TransferFailed, "t")
    assert str(error) in other.seen.wait(LinkDown).reason
    # The other side hears the reason, too.
    assert str(error) in far.seen.wait(TransferFailed, "t").detail


def test_pair_that_never_lasts_is_formed_again_for_ever(tcp: World) -> None:
    class Breaks(FakeRank):
        def send(self, blocks: Sequence[torch.Tensor]) -> None:
            raise RuntimeError("broken in use")

    between = Wire()
    source = worker(tcp, "p0", lambda *made: Breaks(*made, between))
    sink = worker(tcp, "d0", fake(between))
    connect(source, sink)
    for trial in range(MAX_BREAKS):
        assert source.seen.wait(LinkUp, count=trial + 1).transport == "gloo"
        source.push(sink.ticket_for(f"t{trial}", [0]), [0])
        source.seen.wait(TransferFailed, f"t{trial}")
    last = source.seen.wait(LinkUp, count=MAX_BREAKS + 1)
    assert (last.transport, last.fallback) == ("zmq", f"gloo: {MAX_BREAKS} pairs in a row broke within {LASTING_S:g} s")
    assert is_moved(source, sink, "after")


def test_threads_that_hang_pile_up(tcp: World) -> None:
    hangs = Hangs()
    source = worker(tcp, "p0", hangs.make, transports=["gloo"], form_timeout_s=0.02)
    sink = worker(tcp, "d0", fake(Wire()), transports=["gloo"], form_timeout_s=5.0)
    source.agent.set_peers({"d0": sink.agent.endpoint})
    while not any("still wait" in event.reason for event in source.seen.events if isinstance(event, LinkDown)):
        source.seen.wait(LinkDown, count=1 + sum(isinstance(event, LinkDown) for event in source.seen.events))
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("kv-gloo-0") <= MAX_STUCK_LANES
    hangs.may_go.set()


def test_waiting_blocks_make_a_living_peer_look_silent(tcp: World) -> None:
    """Messages behind blocks that are slow are signs of life, and who asks meanwhile is answered."""
    between = Wire()
    source, sink = (worker(tcp, name, fake(between), transports=["gloo"]) for name in ("p0", "d0"))
    connect(source, sink)
    between.is_open.clear()
    pattern = source.store.fill(0, "slow")
    source.push(sink.ticket_for("t", [5]), [0])
    time.sleep(3.0)  # longer than the patience with a silent peer, and less than that with a transfer
    assert not [event for event in (*source.seen.events, *sink.seen.events) if isinstance(event, LinkDown)]
    assert not source.seen.terminal("t")
    between.is_open.set()
    assert is_moved(source, sink, "next")
    assert bytes(sink.store.view(5)) == pattern


def test_more_waits_behind_a_block_than_fits(tcp: World) -> None:
    sink = worker(tcp, "d0", fake(Wire()), transports=["gloo"], form_timeout_s=30.0)
    with dealer(sink.agent.endpoint) as stranger:
        stranger.send(wire.encode(wire.Offer(wire.VERSION, 0, ["gloo"], NBYTES)))
        stranger.send(wire.encode(wire.Rendezvous(0, "rank 0", b"here")))
        stranger.send(wire.encode(wire.Ready(0)))
        while not isinstance(wire.decode(memoryview(stranger.recv())[1:]), wire.Ready):
            pass
        stranger.send_multipart([wire.PAIRED + encode(Ping()), wire.announce(1, NBYTES)])
        # With frames beside it a message is none that this link carries.
        stranger.send_multipart([wire.PLAIN + encode(Ping()), b"x" * NBYTES])
        ended = wire.decode(memoryview(stranger.recv())[1:])
        assert isinstance(ended, wire.Ended)
        assert "bad message" in ended.detail
