"""KV links between simulated workers: every message waits on its lane until the test lets it through, or worse."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvtransfer.carrier import CarrierEvent, Connected, Disconnected, LinkId, Received
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import digest
from kvtransfer.messages import Blocks, Finish, encode
from tests.kvtransfer.fake_link import Handle, Parcel


@dataclass(eq=False)
class Lane:
    """One direction of a link. `link` is the receiver's name for it, `back` the sender's."""

    receiver: "SimulatedCarrier"
    link: LinkId
    sender: "SimulatedCarrier"
    back: LinkId
    parcels: deque[Parcel] = field(default_factory=deque)
    arrived: list[Parcel] = field(default_factory=list)

    def deliver(self, position: int = 0) -> None:
        parcel = self.parcels[position]
        del self.parcels[position]
        if not parcel.handle.done:  # frames in the sender's memory
            message = parcel.message
            assert isinstance(message, Blocks)
            is_whole = [digest(frame) for frame in parcel.frames] == message.digests
            assert is_whole, "a block was written while the transport was still to read it"
        copied = parcel.copy()
        parcel.handle.done = True
        self.arrived.append(copied)
        self.replay(copied)

    def replay(self, parcel: Parcel) -> None:
        self.receiver.inbox.append(Received(self.link, memoryview(parcel.header), parcel.copy().frames))

    def lose(self, position: int) -> None:
        self.parcels[position].handle.done = True
        del self.parcels[position]

    def duplicate(self, position: int) -> None:
        self.parcels.insert(position + 1, self.parcels[position].copy())

    def forge_finish(self, at: int) -> bool:
        """Lets the first `Finish` under way name another digest, one block more, or one key less."""
        for parcel in self.parcels:
            message = None if parcel.is_damaged else parcel.message
            if isinstance(message, Finish) and message.digests:
                lies: list[dict[str, Any]] = [
                    {"digests": [bytes(len(message.digests[0])), *message.digests[1:]]},
                    {"num_blocks": message.num_blocks + 1},
                    {"keys": message.keys[1:]},
                ]
                parcel.header = encode(msgspec.structs.replace(message, **lies[at % len(lies)]))
                self.receiver.wires.is_spoilt = True
                return True
        return False

    def damage(self, position: int, at: int) -> None:
        """Flips one bit of the header or of a frame, on the way."""
        parcel = self.parcels[position].copy()
        self.parcels[position].handle.done = True
        part = at % (len(parcel.frames) + 1)
        whole = bytearray(parcel.header if part == 0 else parcel.frames[part - 1])
        whole[at % len(whole)] ^= 1
        if part == 0:
            parcel.header = bytes(whole)
        else:
            parcel.frames = [*parcel.frames[: part - 1], memoryview(bytes(whole)), *parcel.frames[part:]]
        parcel.is_damaged = True
        self.parcels[position] = parcel
        self.receiver.wires.is_spoilt = True


class Wires:
    """All carriers by address, and all lanes of links that stand."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.carriers: dict[str, SimulatedCarrier] = {}
        self.lanes: list[Lane] = []
        self.is_spoilt = False  # something has been damaged on its way
        self._links = itertools.count(1)

    def link(self, near: "SimulatedCarrier", endpoint: KVEndpoint) -> LinkId:
        name, far = next(self._links), self.carriers.get(endpoint.tcp)
        if far is None:
            near.inbox.append(Disconnected(name, "nobody listens"))
            return name
        other = next(self._links)
        self.lanes += [Lane(far, other, near, name), Lane(near, name, far, other)]
        near.inbox.append(Connected(name, "loopback", is_incoming=False, transport="loopback"))
        far.inbox.append(Connected(other, "loopback", is_incoming=True, transport="loopback"))
        return name

    def way_back(self, lane: Lane) -> Lane:
        return next(other for other in self.lanes if other.link == lane.back)

    def links_of(self, receiver: "SimulatedCarrier") -> set[LinkId]:
        """Those that stand, whether or not a lost one has been missed."""
        return {lane.link for lane in self.lanes if lane.receiver is receiver}

    def being_read(self, sender: "SimulatedCarrier") -> set[str]:
        """The transfers of which frames are still in the sender's memory alone."""
        parcels = [parcel for lane in self.lanes if lane.sender is sender for parcel in lane.parcels]
        messages = [parcel.message for parcel in parcels if not parcel.handle.done]
        return {message.transfer_id for message in messages if isinstance(message, Blocks)}

    def cut(self, carrier: "SimulatedCarrier", link: LinkId, reason: str, *, is_own_doing: bool) -> None:
        """Ends the link on both sides; whoever ends it himself is not told."""
        for lane in self._take_off(link):
            if lane.receiver is not carrier or not is_own_doing:
                lane.receiver.inbox.append(Disconnected(lane.link, reason))

    def cut_one_side(self, lane: Lane) -> None:
        """Only the receiver of the lane sees that the link is gone: what the other one sends vanishes."""
        self._take_off(lane.link)
        lane.receiver.inbox.append(Disconnected(lane.link, "only this side sees it"))

    def _take_off(self, link: LinkId) -> list[Lane]:
        """Both lanes of the link, with all that is under way on them."""
        lanes = [lane for lane in self.lanes if link in (lane.link, lane.back)]
        for lane in lanes:
            self.lanes.remove(lane)
            for parcel in lane.parcels:
                parcel.handle.done = True
            lane.parcels.clear()
            lane.receiver.forget(lane.link)
        return lanes


class SimulatedCarrier:
    """A `Carrier` whose `poll` never waits."""

    def __init__(self, wires: Wires, address: str) -> None:
        self.wires = wires
        self.address = address
        self.inbox: list[CarrierEvent] = []
        self.lost_links: set[LinkId] = set()

    @property
    def endpoint(self) -> KVEndpoint:
        return KVEndpoint(tcp=self.address)

    def start(self) -> None:
        self.wires.carriers[self.address] = self

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        return self.wires.link(self, endpoint)

    def send(self, link: LinkId, header: bytes, frames: Sequence[memoryview]) -> Handle:
        handle = Handle()
        handle.done = not frames
        for lane in self.wires.lanes:
            if lane.sender is self and lane.back == link:
                lane.parcels.append(Parcel(lane.link, header, frames, handle))
                return handle
        handle.done = True
        return handle

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        events, self.inbox = self.inbox, []
        self.lost_links |= {event.link for event in events if isinstance(event, Disconnected)}
        return events

    def disconnect(self, link: LinkId) -> None:
        self.lost_links.add(link)
        self.wires.cut(self, link, "the peer ended the link", is_own_doing=True)

    def forget(self, link: LinkId) -> None:
        self.inbox = [event for event in self.inbox if event.link != link]

    def wake(self) -> None:
        pass  # nobody sleeps

    def close(self) -> None:
        """The process is gone."""
        self.wires.carriers.pop(self.address, None)
        for lane in [lane for lane in self.wires.lanes if lane.receiver is self]:
            self.wires.cut(self, lane.link, "the peer is gone", is_own_doing=True)
