"""A carrier whose links may have a pair beside them: headers stay on the inner carrier, block bytes take the pair.

Every worker's, whatever its `--kv-transport`: so that two workers can agree. To the protocol machines it is a carrier
as any other: messages of a link come in order, whichever way their frames took, and a link ends as a whole.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch

from kvtransfer.carrier import Carrier, CarrierEvent, Connected, Disconnected, LinkId, Received, SendHandle
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import Frame
from kvtransfer.messages import BadMessageError, shorten
from kvtransfer.pairs import wire
from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan, make_communicator, why_not
from kvtransfer.pairs.lane import Arrived, Broken, Formed, Lane, LaneHandle, LaneNews, MakeCommunicator
from kvtransfer.pairs.link import ZMQ, Held, PairLink, PairState

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_NO_FRAMES: Sequence[memoryview] = ()


@dataclass(frozen=True)
class PairSettings:
    """`transports` in order of preference; nothing else is ever used. `host` is what Gloo listens on."""

    transports: Sequence[str]
    block_nbytes: int
    device: torch.device
    host: str = "127.0.0.1"
    form_timeout_s: float = 20.0
    timeout_s: float = 10.0
    # What a correct source may have under way towards us: its credit, and one message that began within it.
    max_pending_bytes: int = 96 * 1024 * 1024


class PairCarrier:
    def __init__(self, inner: Carrier, settings: PairSettings, make: MakeCommunicator = make_communicator) -> None:
        self._inner = inner
        self._settings = settings
        self._make = make
        self._links: dict[LinkId, PairLink] = {}
        # From the lanes' threads, read after each poll.
        self._news: deque[tuple[LinkId, Lane, LaneNews]] = deque()
        self._rendezvous: deque[tuple[LinkId, wire.Rendezvous]] = deque()
        self._lanes: set[Lane] = set()  # whose threads may still be there
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
        for pair in list(self._links.values()):
            self._forget(pair, "this worker's KV thread is closing")
        self._inner.close()
        for lane in self._lanes:
            if not lane.join(self._settings.timeout_s + self._settings.form_timeout_s):
                log.error("a pair's thread did not end: the library does not let go")

    # Links.

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        return self._inner.connect(endpoint)

    def disconnect(self, link: LinkId) -> None:
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
        for event in self._inner.poll(timeout_s):
            self._on_inner(event)
        while self._rendezvous:
            link, message = self._rendezvous.popleft()
            if link in self._links:
                self._say(link, message)
        while self._news:
            link, lane, news = self._news.popleft()
            pair = self._links.get(link)
            if pair is not None and pair.lane is lane:
                self._on_news(pair, news)
        events, self._events = self._events, []
        return events

    def _on_inner(self, event: CarrierEvent) -> None:
        match event:
            case Connected():
                pair = PairLink(event.link, not event.is_incoming, event.path)
                self._links[event.link] = pair
                if pair.is_source:
                    pair.offered = list(self._settings.transports)
                    self._offer(pair)
            case Disconnected():
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
                    self._end(known, f"bad message: {error}")

    def _receive(self, pair: PairLink, event: Received) -> None:
        kind, header = bytes(event.header[:1]), event.header[1:]
        match kind:
            case wire.PLAIN if pair.state is PairState.UP:
                self._deliver(pair, Held(header, event.frames))
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
                self._on_own(pair, wire.decode(header))
            case _:
                raise BadMessageError(f"a message of kind {kind.hex()} with {len(event.frames)} frames, now")

    def _deliver(self, pair: PairLink, message: Held) -> None:
        pair.held.append(message)
        self._events += pair.released()

    # How two ends agree and form a pair.

    def _offer(self, pair: PairLink) -> None:
        """The source's: what it can, of what is left."""
        able = []
        for transport in pair.offered:
            reason = None if transport == ZMQ else why_not(transport, self._settings.device)
            if reason is None:
                able.append(transport)
            else:
                pair.detours.append(f"{transport}: {reason}")
        pair.offered = able
        if not able:
            self._end(pair, f"no transport is left: {'; '.join(pair.detours)}")
            return
        pair.state = PairState.AGREEING
        self._say(pair.link, wire.Offer(wire.VERSION, pair.attempt, able, self._settings.block_nbytes))

    def _on_own(self, pair: PairLink, message: wire.AnyPairMessage) -> None:
        match message:
            case wire.Offer() if not pair.is_source and pair.state is not PairState.UP:
                self._on_offer(pair, message)
            case wire.Answer() if pair.is_source and pair.state is PairState.AGREEING:
                self._on_answer(pair, message)
            case wire.Rendezvous():
                if pair.lane is not None and message.attempt == pair.attempt:
                    pair.lane.store.put(message.key, message.value)
            case wire.Ready() if message.attempt == pair.attempt:
                pair.is_peer_ready = True
                self._settle(pair)
            case wire.Failed():
                if message.attempt == pair.attempt and pair.state is PairState.FORMING:
                    self._failed(pair, f"the peer: {message.detail}")
            case _:
                raise BadMessageError(f"{type(message).__name__} while {pair.state.name.lower()}")

    def _on_offer(self, pair: PairLink, offer: wire.Offer) -> None:
        if offer.version != wire.VERSION:
            raise BadMessageError(f"version of pairs: ours {wire.VERSION}, theirs {offer.version}")
        detours = []
        chosen = ""
        for transport in offer.transports:
            problem = self._problem(transport, offer.block_nbytes)
            if problem is None:
                chosen = transport
                break
            detours.append(f"{transport}: the sink: {problem}")
        if pair.lane is not None:
            pair.lane.end("another try has begun")
            pair.lane = None
        pair.begin(offer.attempt, chosen)
        self._say(pair.link, wire.Answer(offer.attempt, chosen, shorten("; ".join(detours))))
        if chosen:
            self._form(pair)

    def _problem(self, transport: str, block_nbytes: int) -> str | None:
        if transport not in self._settings.transports:
            return f"it takes {', '.join(self._settings.transports)}"
        if transport == ZMQ:
            return None
        if block_nbytes != self._settings.block_nbytes:
            return f"blocks of {self._settings.block_nbytes} bytes here, {block_nbytes} there"
        return why_not(transport, self._settings.device)

    def _on_answer(self, pair: PairLink, answer: wire.Answer) -> None:
        if answer.attempt != pair.attempt:
            return
        if answer.detail:
            pair.detours.append(answer.detail)
        if answer.transport not in pair.offered:
            self._end(pair, f"the sink takes none of {', '.join(pair.offered)}: {answer.detail}")
            return
        pair.offered = pair.offered[pair.offered.index(answer.transport) + 1 :]
        pair.begin(answer.attempt, answer.transport)
        self._form(pair)

    def _form(self, pair: PairLink) -> None:
        if pair.transport == ZMQ:
            pair.is_formed = pair.is_peer_ready = True
            self._settle(pair)
            return
        pair.state = PairState.FORMING
        settings, link, attempt = self._settings, pair.link, pair.attempt
        plan = PairPlan(
            transport=pair.transport,
            rank=SOURCE if pair.is_source else SINK,
            block_nbytes=settings.block_nbytes,
            device=settings.device,
            host=settings.host,
            timeout_s=settings.timeout_s,
        )

        def publish(key: str, value: bytes) -> None:
            self._rendezvous.append((link, wire.Rendezvous(attempt, key, value)))
            self._inner.wake()

        def tell(lane: Lane, news: LaneNews) -> None:
            self._news.append((link, lane, news))
            self._inner.wake()

        pair.lane = Lane(plan, publish, tell, self._make, settings.form_timeout_s)
        self._lanes.add(pair.lane)

    def _on_news(self, pair: PairLink, news: LaneNews) -> None:
        match news:
            case Formed(path=path):
                pair.is_formed, pair.lane_path = True, path
                self._say(pair.link, wire.Ready(pair.attempt))
                self._settle(pair)
            case Arrived(frames=frames):
                pair.arrived(frames)
                self._events += pair.released()
            case Broken(reason=reason) if pair.state is PairState.UP:
                self._end(pair, f"{pair.transport}: {reason}")
            case Broken(reason=reason):
                self._say(pair.link, wire.Failed(pair.attempt, shorten(reason)))
                self._failed(pair, reason)

    def _settle(self, pair: PairLink) -> None:
        """Up, once both ranks are: the link carries messages from now on."""
        if not (pair.is_formed and pair.is_peer_ready) or pair.state is PairState.UP:
            return
        pair.state = PairState.UP
        detail = "; ".join(pair.detours)
        if detail:
            log.warning("kv transport falls back", wanted=self._settings.transports[0], used=pair.path, why=detail)
        self._events.append(
            Connected(pair.link, pair.path, not pair.is_source, has_tensors=pair.lane is not None, detail=detail)
        )

    def _failed(self, pair: PairLink, reason: str) -> None:
        if pair.lane is not None:
            pair.lane.end(reason)
            pair.lane = None
        pair.lane_path = ""
        if pair.is_source:
            pair.detours.append(f"{pair.transport}: {reason}")
            pair.attempt += 1
            self._offer(pair)

    # The end.

    def _end(self, pair: PairLink, reason: str) -> None:
        self.disconnect(pair.link)
        self._events.append(Disconnected(pair.link, reason))

    def _forget(self, pair: PairLink, reason: str) -> None:
        self._links.pop(pair.link, None)
        if pair.lane is not None:
            pair.lane.end(reason)

    def _say(self, link: LinkId, message: wire.AnyPairMessage) -> None:
        self._inner.send(link, wire.encode(message), _NO_FRAMES)
