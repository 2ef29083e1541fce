"""The loopback twin of the network: agents of one process joined by a hub. For tests and single-process set-ups.

As faithful as it has to be: frames are read from the sender's memory only when the receiver polls, links end on both
sides, what was queued on an ended link is lost.
"""

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.carrier import CarrierEvent, Connected, Disconnected, LinkId, Received
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.frames import Frame, copy_of
from splitserve.service.errors import Unavailable

SCHEME = "memory://"
MAX_EVENTS_PER_POLL = 64


@dataclass(eq=False)
class _Handle:
    done: bool = False


@dataclass(eq=False)
class _Parcel:
    """One message between two carriers; `handle` is done once its frames have been copied or dropped."""

    link: LinkId
    header: bytes
    frames: Sequence[Frame]
    handle: _Handle


@dataclass(eq=False)
class _Pair:
    """One link: a different id on each side."""

    near: "MemoryCarrier"
    near_link: LinkId
    far: "MemoryCarrier"
    far_link: LinkId


@dataclass
class MemoryHub:
    """Joins the carriers of one process. One lock for all: this is a twin, not a transport."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    carriers: "dict[str, MemoryCarrier]" = field(default_factory=dict)
    addresses: "itertools.count[int]" = field(default_factory=itertools.count)
    links: "itertools.count[int]" = field(default_factory=itertools.count)

    def carrier(self) -> "MemoryCarrier":
        return MemoryCarrier(self)


class MemoryCarrier:
    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._address = ""
        self._changed = threading.Condition(hub.lock)
        self._inbox: deque[CarrierEvent | _Parcel] = deque()
        self._pairs: dict[LinkId, _Pair] = {}
        self._is_awake = False
        self._is_closed = False

    def start(self) -> None:
        with self._hub.lock:
            if self._is_closed:
                raise Unavailable("this carrier has been closed")
            self._address = f"{SCHEME}{next(self._hub.addresses)}"
            self._hub.carriers[self._address] = self

    @property
    def endpoint(self) -> KVEndpoint:
        return KVEndpoint(tcp=self._address)

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        with self._hub.lock:
            link = next(self._hub.links)
            far = self._hub.carriers.get(endpoint.tcp)
            if far is None:
                self._push(Disconnected(link, f"nobody listens at {endpoint.tcp}"))
                return link
            far_link = next(self._hub.links)
            self._pairs[link] = _Pair(self, link, far, far_link)
            far._pairs[far_link] = _Pair(far, far_link, self, link)
            self._push(Connected(link, "loopback", is_incoming=False, transport="loopback"))
            far._push(Connected(far_link, "loopback", is_incoming=True, transport="loopback"))
            return link

    def send(self, link: LinkId, header: bytes, frames: Sequence[Frame]) -> _Handle:
        with self._hub.lock:
            pair = self._pairs.get(link)
            if pair is None:
                return _Handle(done=True)
            handle = _Handle(done=not frames)
            pair.far._push(_Parcel(pair.far_link, header, frames, handle))
            return handle

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        with self._hub.lock:
            self._changed.wait_for(lambda: self._inbox or self._is_awake, timeout_s)
            self._is_awake = False
            count = min(len(self._inbox), MAX_EVENTS_PER_POLL)
            return [self._unpack(self._inbox.popleft()) for _ in range(count)]

    def _unpack(self, item: CarrierEvent | _Parcel) -> CarrierEvent:
        if not isinstance(item, _Parcel):
            return item
        frames = [copy_of(frame) for frame in item.frames]
        item.handle.done = True
        return Received(item.link, memoryview(item.header), frames)

    def disconnect(self, link: LinkId) -> None:
        with self._hub.lock:
            pair = self._pairs.pop(link, None)
            if pair is None:
                return
            self._discard(link)
            if pair.far._pairs.pop(pair.far_link, None) is not None:
                # What the far side has not read of a closed link it may still read; its frames go with us.
                pair.far._detach(pair.far_link)
                pair.far._push(Disconnected(pair.far_link, "the peer ended the link"))

    def wake(self) -> None:
        with self._hub.lock:
            self._is_awake = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._hub.lock:
            for link in list(self._pairs):
                self.disconnect(link)
            self._hub.carriers.pop(self._address, None)
            self._is_closed = True

    def _push(self, item: CarrierEvent | _Parcel) -> None:
        self._inbox.append(item)
        self._changed.notify_all()

    def _discard(self, link: LinkId) -> None:
        """Drops everything that the inbox holds of a link."""
        for item in self._inbox:
            if isinstance(item, _Parcel) and item.link == link:
                item.handle.done = True
        self._inbox = deque(item for item in self._inbox if item.link != link)

    def _detach(self, link: LinkId) -> None:
        """Drops messages with frames of a link whose sender is gone: their memory is no longer ours to read."""
        kept: deque[CarrierEvent | _Parcel] = deque()
        for item in self._inbox:
            if isinstance(item, _Parcel) and item.link == link and item.frames:
                item.handle.done = True
            else:
                kept.append(item)
        self._inbox = kept
