"""The dialler's table of peers, and what its owner hears about them."""

import pytest

from kvtransfer.carrier import Connected
from kvtransfer.context import Context
from kvtransfer.counters import Counters
from kvtransfer.dialer import Dialer
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import KVEvent, LinkDown, LinkUp
from kvtransfer.messages import Hello, Welcome
from kvtransfer.settings import KVSettings
from kvtransfer.source import Source
from tests.kvtransfer.fake_link import FakeClock, FakeOutbox
from tests.kvtransfer.worlds import FINGERPRINT, ByteStore, World, connect

HERE, THERE = KVEndpoint(tcp="tcp://127.0.0.1:1"), KVEndpoint(tcp="tcp://127.0.0.1:2")


class Dialled:
    """A dialler without a network: link ids count up, cuts take effect when asked."""

    def __init__(self) -> None:
        self.outbox = FakeOutbox()
        self.num_links = 0
        context = Context("p0", FINGERPRINT, ByteStore(1), self.outbox, KVSettings(), Counters(), FakeClock())
        self.dialer = Dialer(context, Source(context), self._connect)

    def _connect(self, endpoint: KVEndpoint) -> int:
        self.num_links += 1
        return self.num_links

    def set_peers(self, **endpoints: KVEndpoint) -> None:
        self.dialer.set_peers(endpoints)
        for link, reason in self.outbox.cuts:
            self.dialer.lost(link, reason)
        self.outbox.cuts.clear()

    def connected(self) -> None:
        """The newest link comes as far as its hello."""
        self.dialer.connected(Connected(self.num_links, "tcp", is_incoming=False, transport="zmq"))
        assert isinstance(self.outbox.sent.pop().message, Hello)

    def ready(self) -> None:
        self.connected()
        self.dialer.welcomed(self.num_links, Welcome("d0", 1024, 1024))

    def events(self) -> list[KVEvent]:
        events, self.outbox.events = self.outbox.events, []
        return events


@pytest.mark.parametrize("stage", ["dialled", "greeted", "ready"])
def test_a_peer_that_was_dropped_is_reported_down(stage: str) -> None:
    """Its owner would keep a worker in its table that nobody will ever take out again."""
    made = Dialled()
    made.set_peers(d0=HERE)
    if stage == "greeted":
        made.connected()
    elif stage == "ready":
        made.ready()
    made.events()
    made.set_peers()
    assert made.events() == []
    assert not made.dialer.is_busy


def test_a_peer_whose_link_was_lost_before_it_was_dropped_is_dialled_again() -> None:
    made = Dialled()
    made.set_peers(d0=HERE)
    made.ready()
    made.dialer.lost(1, "the connection ended")
    assert made.events() == [LinkUp("d0", "tcp", "zmq"), LinkDown("d0", "the connection ended")]
    made.set_peers()
    assert made.events() == []
    assert made.num_links == 1


def test_a_peer_that_moved_looks_connected() -> None:
    """It is still a peer of ours, for a while without a link."""
    made = Dialled()
    made.set_peers(d0=HERE)
    made.ready()
    made.set_peers(d0=THERE)
    made.ready()
    assert made.events() == [
        LinkUp("d0", "tcp", "zmq"),
        LinkDown("d0", "the peer has moved"),
        LinkUp("d0", "tcp", "zmq"),
    ]


def test_an_agent_reports_a_peer_down_that_it_dropped(net: World) -> None:
    """The same with threads and sockets; the link to the other peer is the sign that the first is done with."""
    source, first, second = net.worker("p0"), net.worker("d0"), net.worker("d1")
    connect(source, first)
    source.agent.set_peers({"d1": second.agent.endpoint})
    source.seen.wait(LinkUp, count=2)
    assert [event for event in source.seen.events if isinstance(event, LinkDown)] == []
