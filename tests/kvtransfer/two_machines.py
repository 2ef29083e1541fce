"""Both machines of a transfer with a link between them, and engines on either end. For `test_interleavings`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.carrier import Connected
from kvtransfer.context import Context
from kvtransfer.counters import Counters
from kvtransfer.events import KVEvent, TransferAcked, TransferComplete, TransferFailed
from kvtransfer.messages import Acked, Blocks, BlocksAck, Cancel, Closed, Finish, Open
from kvtransfer.settings import KVSettings
from kvtransfer.sink import Sink
from kvtransfer.source import Source
from tests.kvtransfer.fake_link import FakeClock, FakeOutbox, Parcel
from tests.kvtransfer.worlds import FINGERPRINT, ByteStore, keys_for

NUM_BLOCKS = 24
BLOCK_NBYTES = 64
SETTINGS = KVSettings(
    window_bytes=3 * BLOCK_NBYTES,
    frame_bytes=2 * BLOCK_NBYTES,
    transfer_timeout_s=10.0,
    idle_timeout_s=30.0,
    link_wait_s=5.0,
    closing_timeout_s=4.0,
)
SINK_TIMEOUT_S = 12.0
TO_SINK, TO_SOURCE = "to sink", "to source"


@dataclass
class Transfer:
    """What the test knows: who owns which block, what it has to contain, and how each side ended."""

    transfer_id: str
    num_cached: int
    source_ids: list[int]
    sink_ids: list[int]
    patterns: list[bytes] = field(default_factory=list)
    num_sent: int = 0
    is_finished: bool = False
    source_end: KVEvent | None = None
    sink_end: KVEvent | None = None


class TwoMachines:
    """Engines that reuse every block at once when its transfer has ended, and complain when that is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.counters = Counters()
        self.source_store = ByteStore(NUM_BLOCKS, BLOCK_NBYTES)
        self.sink_store = ByteStore(NUM_BLOCKS, BLOCK_NBYTES)
        self.source_out, self.sink_out = FakeOutbox(), FakeOutbox()
        self.source = Source(self.context("p0", self.source_store, self.source_out))
        self.sink = Sink(self.context("d0", self.sink_store, self.sink_out))
        self.transfers: dict[str, Transfer] = {}
        self.free_source = set(range(NUM_BLOCKS))
        self.free_sink = set(range(NUM_BLOCKS))
        # What a sink's engine has put into blocks that came back: nobody else may touch them.
        self.engine_patterns: dict[int, bytes] = {}
        self.history: list[tuple[str, Parcel]] = []
        self.link: int | None = None
        self.num_links = 0
        self.num_damaged = 0
        self.is_in_order = True
        self.connect()

    def context(self, worker_id: str, store: ByteStore, outbox: FakeOutbox) -> Context:
        return Context(worker_id, FINGERPRINT, store, outbox, SETTINGS, self.counters, self.clock)

    def connect(self) -> None:
        self.num_links += 1
        self.link = self.num_links
        connection = Connected(self.link, "tcp", is_incoming=False, transport="zmq")
        self.source.link_ready("d0", connection, SETTINGS.window_bytes, SETTINGS.frame_bytes)
        self.settle()

    def end_link(self, reason: str) -> None:
        if self.link is None:
            return
        link, self.link = self.link, None
        for way in (TO_SINK, TO_SOURCE):
            for parcel in self.queue(way):
                parcel.handle.done = True
            self.queue(way).clear()
        self.source.link_lost(link, reason)
        self.sink.link_lost(link, reason)
        self.settle()

    def tick(self) -> None:
        self.source.tick()
        self.sink.tick()
        self.settle()

    def queue(self, way: str) -> deque[Parcel]:
        return self.source_out.sent if way == TO_SINK else self.sink_out.sent

    def arrive(self, way: str, parcel: Parcel, *, is_replay: bool = False) -> None:
        arrived = parcel.copy()
        parcel.handle.done = True
        if not is_replay:
            self.history.append((way, arrived))
        message = arrived.message
        if way == TO_SINK:
            assert isinstance(message, Open | Blocks | Finish | Cancel)
            self.sink.receive(arrived.link, "p0", message, arrived.frames)
        else:
            assert isinstance(message, BlocksAck | Acked | Cancel | Closed)
            self.source.receive(arrived.link, message)
        self.settle()

    def settle(self) -> None:
        """Engines act on what the machines say: blocks that come back are reused at once."""
        self.take_events(self.source_out, self.on_source_end)
        self.take_events(self.sink_out, self.on_sink_end)
        cuts = [*self.source_out.cuts, *self.sink_out.cuts]
        self.source_out.cuts.clear()
        self.sink_out.cuts.clear()
        if any(link == self.link for link, _ in cuts):
            self.end_link(cuts[0][1])
            self.connect()

    def take_events(self, outbox: FakeOutbox, act: Callable[[Transfer, KVEvent], None]) -> None:
        events, outbox.events = outbox.events, []
        for event in events:
            assert isinstance(event, TransferAcked | TransferComplete | TransferFailed)
            act(self.transfers[event.transfer_id], event)

    def on_source_end(self, made: Transfer, event: KVEvent) -> None:
        assert made.source_end is None, f"{made.transfer_id} ended twice at the source"
        made.source_end = event
        if isinstance(event, TransferAcked):
            assert isinstance(made.sink_end, TransferComplete), "acknowledged but not complete"
        for block in made.source_ids:
            assert block not in self.free_source
            self.source_store.fill(block, "reused by the source's engine")
        self.free_source.update(made.source_ids)

    def on_sink_end(self, made: Transfer, event: KVEvent) -> None:
        assert made.sink_end is None, f"{made.transfer_id} ended twice at the sink"
        made.sink_end = event
        if isinstance(event, TransferComplete):
            blocks = [bytes(self.sink_store.view(block)) for block in made.sink_ids[made.num_cached :]]
            assert blocks == made.patterns, "complete with a wrong or missing block"
            assert made.is_finished
            assert event.keys == keys_for(len(made.sink_ids))
            assert event.payload == made.transfer_id.encode()
        self.return_to_sink(made)

    def return_to_sink(self, made: Transfer) -> None:
        for block in made.sink_ids:
            assert block not in self.free_sink
            self.engine_patterns[block] = self.sink_store.fill(block, "reused by the sink's engine")
        self.free_sink.update(made.sink_ids)
