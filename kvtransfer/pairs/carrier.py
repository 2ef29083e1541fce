"""A carrier whose links may have a pair beside them: headers stay on the inner carrier, block bytes take the pair.

Every worker's, whatever its `--kv-transport`: so that two workers can agree. To the protocol machines it is a carrier
as any other: messages of a link come in order, whichever way their frames took, and a link ends as a whole.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch

from kvtransfer.carrier import Carrier, CarrierEvent, Connected, Disconnected, Heard, LinkId, Received, SendHandle
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import Frame
from kvtransfer.messages import BadMessageError, shorten
from kvtransfer.pairs import wire
from kvtransfer.pairs.agreement import Able, Agreement
from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan, make_communicator
from kvtransfer.pairs.lane import Arrived, Broken, Formed, Lane, LaneHandle, LaneNews, MakeCommunicator, Published
from kvtransfer.pairs.link import Held, PairLink, PairState

# Messages of one link that may wait behind blocks, and their headers' bytes: far more than a correct source has there.
MAX_HELD = 16_384
MAX_HELD_BYTES = 256 * 1024 * 1024
# More threads that a library does not let go of are more than bad luck.
MAX_STUCK_LANES = 16
# A pair that breaks sooner did not last; after so many of them in a row another transport is taken, if there is one.
LASTING_S = 60.0
MAX_BREAKS = 3
MAX_ADDRESSES = 1024
_LAST_WORD_S = 0.05

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PairSettings:
    """`transports` in order of preference; nothing else is ever used. `host` is what Gloo listens on."""

    transports: tuple[str, ...]
    block_nbytes: int
    device: torch.device
    host: str = "127.0.0.1"
    form_timeout_s: float = 20.0
    timeout_s: float = 10.0
    close_timeout_s: float = 1.0
    # What a correct source may have under way towards us: its credit, and one message that began within it.
    max_pending_bytes: int = 96 * 1024 * 1024


class PairCarrier:
    def __init__(self, inner: Carrier, settings: PairSettings, make: MakeCommunicator = make_communicator) -> None:
        self._inner = inner
        self._settings = settings
        self._make = make
        able = Able(settings.transports, settings.block_nbytes, settings.device)
        self._agreement = Agreement(able, self, settings.form_timeout_s, time.monotonic)
        self._links: dict[LinkId, PairLink] = {}
        # From the lanes' threads, read after each poll.
        self._news: deque[tuple[LinkId, Lane, LaneNews]] = deque()
        self._lanes: set[Lane] = set()  # whose threads may still be there
        self._addresses: dict[LinkId, str] = {}
        # By address and transport: how often in a row a pair did not last.
        self._breaks: Counter[tuple[str, str]] = Counter()
        # Links that have ended for our owner, but for a last word on its way, and when they are closed.
        self._closing: dict[LinkId, float] = {}
        self._events: list[CarrierEvent] = []

    # Lifetime.

    def start(self) -> None:
        self._inner.start()

    @property
    def endpoint(self) -> KVEndpoint:
        return self._inner.endpoint

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        """A library that waits for a frozen peer lets go at its own time limit, and nobody waits for that here: see
        `lane.are_any_left`."""
        for pair in list(self._links.values()):
            self._forget(pair, "this worker's KV thread is closing")
        self._inner.close()
        deadline = time.monotonic() + self._settings.close_timeout_s
        stuck = [lane for lane in self._lanes if not lane.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            log.warning("threads of pairs still wait for their peers", count=len(stuck))

    # Links.

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        link = self._inner.connect(endpoint)
        self._addresses[link] = endpoint.tcp
        return link

    def disconnect(self, link: LinkId) -> None:
        self._closing.pop(link, None)
        self._addresses.pop(link, None)
        self._inner.disconnect(link)
        pair = self._links.get(link)
        if pair is not None:
            self._forget(pair, "the link ended")

    def send(self, link: LinkId, header: bytes, frames: Sequence[Frame]) -> SendHandle:
        pair = self._links.get(link)
        tensors = [frame for frame in frames if not isinstance(frame, memoryview)]
        if not tensors:
            return self._inner.send(link, wire.PLAIN + header, frames)
        if pair is None or pair.lane is None:
            return LaneHandle(done=True)
        announcement = wire.announce(len(tensors), self._settings.block_nbytes)
        self._inner.send(link, wire.PAIRED + header, [memoryview(announcement)])
        return pair.lane.send(tensors)

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        self._lanes = {lane for lane in self._lanes if not lane.join(0.0)}
        now = time.monotonic()
        for link in [link for link, due in self._closing.items() if due <= now]:
            self.disconnect(link)
        if self._closing:
            timeout_s = min(timeout_s, _LAST_WORD_S)
        for event in self._inner.poll(0.0 if self._events else timeout_s):
            self._on_inner(event)
        while self._news:
            # In the order in which the lanes said it: a key that was published before a pair had formed goes first.
            link, lane, news = self._news.popleft()
            pair = self._links.get(link)
            if pair is not None and pair.lane is lane:
                self._on_news(pair, news)
        for pair in list(self._links.values()):
            self._agreement.tick(pair)
        events, self._events = self._events, []
        return events

    def _on_inner(self, event: CarrierEvent) -> None:
        if event.link in self._closing:
            if isinstance(event, Disconnected):
                del self._closing[event.link]
            return
        match event:
            case Connected():
                address = self._addresses.get(event.link, "")
                pair = PairLink(event.link, not event.is_incoming, event.path, address)
                self._links[event.link] = pair
                self._agreement.begin(pair)
            case Disconnected():
                self._addresses.pop(event.link, None)
                known = self._links.get(event.link)
                if known is not None:
                    self._forget(known, event.reason)
                self._events.append(event)
            case Received():
                known = self._links.get(event.link)
                try:
                    if known is not None:
                        self._receive(known, event)
                except BadMessageError as error:
                    assert known is not None
                    self._close(known, Disconnected(known.link, f"bad message: {error}", is_rejected=True))

    def _receive(self, pair: PairLink, event: Received) -> None:
        kind, header = bytes(event.header[:1]), event.header[1:]
        match kind:
            case wire.PLAIN if pair.state is PairState.UP and not (pair.lane is not None and event.frames):
                self._deliver(pair, Held(header, event.frames))
                if pair.held:
                    self._events.append(Heard(pair.link))
            case wire.PAIRED if pair.is_paired and not pair.is_source and len(event.frames) == 1:
                assert pair.lane is not None
                frame = event.frames[0]
                assert isinstance(frame, memoryview)
                count = wire.announced(frame, self._settings.block_nbytes)
                waiting = sum(held.num_expected for held in pair.held)
                if (waiting + count) * self._settings.block_nbytes > self._settings.max_pending_bytes:
                    raise BadMessageError(f"{waiting + count} blocks under way are more than the credit allows")
                pair.lane.receive(count)
                self._deliver(pair, Held(header, None, count))
            case wire.OWN if not event.frames:
                self._agreement.hear(pair, wire.decode(header))
            case _:
                raise BadMessageError(f"a message of kind {kind.hex()} with {len(event.frames)} frames, now")

    def _deliver(self, pair: PairLink, message: Held) -> None:
        pair.hold(message)
        self._events += pair.released()
        if len(pair.held) > MAX_HELD or pair.held_nbytes > MAX_HELD_BYTES:
            raise BadMessageError(f"{len(pair.held)} messages wait behind blocks that do not come")

    def _on_news(self, pair: PairLink, news: LaneNews) -> None:
        match news:
            case Published(key=key, value=value):
                self.say(pair, wire.Rendezvous(pair.attempt, key, value))
            case Formed(path=path):
                self._agreement.formed(pair, path)
            case Arrived(frames=frames):
                pair.arrived(frames)
                self._events += pair.released()
            case Broken(reason=reason) if pair.state is PairState.UP:
                self.end(pair, f"{pair.transport}: {reason}")
            case Broken(reason=reason):
                self._agreement.failed(pair, reason)

    # What the agreement asks.

    def say(self, pair: PairLink, message: wire.AnyPairMessage) -> None:
        self._inner.send(pair.link, wire.encode(message), ())

    def form(self, pair: PairLink) -> None:
        settings, link = self._settings, pair.link
        plan = PairPlan(
            transport=pair.transport,
            rank=SOURCE if pair.is_source else SINK,
            block_nbytes=settings.block_nbytes,
            device=settings.device,
            host=settings.host,
            timeout_s=settings.timeout_s,
        )

        def tell(lane: Lane, news: LaneNews) -> None:
            self._news.append((link, lane, news))
            self._inner.wake()

        pair.lane = Lane(plan, tell, self._make, settings.form_timeout_s)
        self._lanes.add(pair.lane)

    def objection(self, pair: PairLink, transport: str) -> str | None:
        stuck = len(self._lanes) - sum(other.lane is not None for other in self._links.values())
        if stuck >= MAX_STUCK_LANES:
            return f"{stuck} threads of pairs that were given up still wait for the library"
        # With nothing else to try it is tried again and again, as any link is.
        if pair.offered[-1:] != [transport] and self._breaks[pair.address, transport] >= MAX_BREAKS:
            return f"{MAX_BREAKS} pairs in a row broke within {LASTING_S:g} s"
        return None

    def up(self, pair: PairLink) -> None:
        made = pair.connection
        if made.fallback:
            wanted = ", ".join(self._settings.transports)
            log.warning("kv transport falls back", wanted=wanted, used=made.path, why=made.fallback)
        self._events.append(made)

    def end(self, pair: PairLink, reason: str, *, is_peers: bool = False, is_final: bool = False) -> None:
        if pair.is_source and pair.is_paired:
            self._count_break(pair)
        self._close(pair, Disconnected(pair.link, reason, is_final=is_final), is_told=is_peers)

    def _close(self, pair: PairLink, event: Disconnected, *, is_told: bool = False) -> None:
        """For our owner at once, for the inner carrier when the last word has had its time to leave."""
        if not is_told:
            self.say(pair, wire.Ended(shorten(event.reason)))
        self._forget(pair, event.reason)
        self._closing[pair.link] = time.monotonic() + _LAST_WORD_S
        self._events.append(event)

    def _count_break(self, pair: PairLink) -> None:
        if len(self._breaks) >= MAX_ADDRESSES:
            self._breaks.clear()
        if time.monotonic() - pair.up_at < LASTING_S:
            self._breaks[pair.address, pair.transport] += 1
        else:
            self._breaks[pair.address, pair.transport] = 1

    def _forget(self, pair: PairLink, reason: str) -> None:
        self._links.pop(pair.link, None)
        pair.end_lane(reason)
