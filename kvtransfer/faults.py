"""A carrier around a carrier that loses, delays, repeats and damages messages by plan. For tests, on loopback only.

Used by the KV thread like any carrier. What it holds back it holds in the sender's memory, as a slow network would.
"""

import heapq
import itertools
import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from kvtransfer.carrier import Carrier, CarrierEvent, Disconnected, Heard, LinkId, Received, SendHandle
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.fault_plan import FaultPlan, FaultPlanFile, FaultRule, check_testing
from kvtransfer.frames import Frame, copy_of, num_bytes
from kvtransfer.memory import SCHEME
from kvtransfer.messages import AnyMessage, BadMessageError, decode
from splitserve.service.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# How soon a replaced plan lets go what the last one held.
_PLAN_INTERVAL_S = 0.01
_Bytes = TypeVar("_Bytes", bytearray, "torch.Tensor")
_LOOPBACK = (SCHEME, "tcp://127.", "tcp://[::1]:", "tcp://localhost:")


@dataclass
class _HeldHandle:
    """Not done while the message is held back; then as the inner carrier says."""

    inner: SendHandle | None = None
    is_lost: bool = False

    @property
    def done(self) -> bool:
        return self.is_lost or (self.inner is not None and self.inner.done)


@dataclass(order=True)
class _Held:
    """A message on its way, in either direction; one that leaves has a handle."""

    due: float
    number: int
    link: LinkId = field(compare=False)
    header: bytes = field(compare=False)
    frames: Sequence[Frame] = field(compare=False)
    handle: _HeldHandle | None = field(compare=False)


@dataclass
class _Lane:
    """One direction of one link: nothing leaves it before these times."""

    frozen_until: float = 0.0
    free_at: float = 0.0


@dataclass
class _Fate:
    """What the plan makes of one message."""

    header: bytes
    frames: Sequence[Frame]
    is_lost: bool
    is_repeated: bool = False
    delay: float = 0.0


class FaultyCarrier:
    def __init__(
        self, inner: Carrier, plan: FaultPlan | FaultPlanFile, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises InvalidRequest outside of tests."""
        check_testing()
        self._inner = inner
        self._file = plan if isinstance(plan, FaultPlanFile) else None
        self._clock = clock
        self._begin(plan.plan if isinstance(plan, FaultPlanFile) else plan)
        self._numbers = itertools.count()
        self._lanes: defaultdict[tuple[LinkId, str], _Lane] = defaultdict(_Lane)
        self._held: list[_Held] = []
        self._ended: deque[Disconnected] = deque()
        self._cut_links: set[LinkId] = set()

    # A carrier's methods.

    def start(self) -> None:
        self._inner.start()
        if not _is_loopback(self._inner.endpoint):
            address = self._inner.endpoint.tcp
            self._inner.close()
            raise InvalidRequest(f"a fault plan is accepted only on loopback endpoints, not on {address}")

    @property
    def endpoint(self) -> KVEndpoint:
        return self._inner.endpoint

    def connect(self, endpoint: KVEndpoint) -> LinkId:
        link = self._inner.connect(endpoint)
        if not _is_loopback(endpoint):
            self._cut(link, f"a fault plan is accepted only on loopback endpoints, not on {endpoint.tcp}")
        return link

    def send(self, link: LinkId, header: bytes, frames: Sequence[Frame]) -> SendHandle:
        handle = _HeldHandle()
        self._pass(link, header, frames, handle)
        self._release_due()
        return handle

    def poll(self, timeout_s: float) -> list[CarrierEvent]:
        self._look_at_file()
        if self._held:
            if self._file is not None:
                timeout_s = min(timeout_s, _PLAN_INTERVAL_S)
            timeout_s = min(timeout_s, max(0.0, self._held[0].due - self._clock()))
        events: list[CarrierEvent] = []
        for event in self._inner.poll(0.0 if self._ended else timeout_s):
            if isinstance(event, Received):
                self._pass(event.link, bytes(event.header), event.frames, None)
                events += self._release_due()
            elif not (isinstance(event, Heard) and self._is_frozen(event.link)):
                events += self._release_due()
                events.append(event)
                if isinstance(event, Disconnected):
                    self._forget(event.link)
        events += self._release_due()
        events += self._ended
        self._ended.clear()
        return events

    def disconnect(self, link: LinkId) -> None:
        self._inner.disconnect(link)
        self._forget(link)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()

    # Faults.

    def _begin(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._matched: Counter[int] = Counter()
        self._random = random.Random(plan.seed)  # noqa: S311  # damage has to be repeatable, not secret

    def _look_at_file(self) -> None:
        """Another plan holds nothing of what the last one held for good."""
        if self._file is None or not self._file.has_changed():
            return
        self._begin(self._file.plan)
        now = self._clock()
        for lane in self._lanes.values():
            lane.frozen_until = min(lane.frozen_until, now)
            lane.free_at = min(lane.free_at, now)
        for held in self._held:
            held.due = min(held.due, now)
        heapq.heapify(self._held)

    def _pass(self, link: LinkId, header: bytes, frames: Sequence[Frame], handle: _HeldHandle | None) -> None:
        """Lets one message through the plan: zero, one or two copies of it are held until they are due."""
        self._look_at_file()
        direction = "in" if handle is None else "out"
        fate = _Fate(header, frames, is_lost=link in self._cut_links)
        message = _peek(header)
        for rule in self._rules_for(message, direction):
            transfer = getattr(message, "transfer_id", "")
            log.info("fault", kind=rule.kind, message=type(message).__name__, transfer=transfer)
            self._strike(rule, link, fate)
        if fate.is_repeated:
            copies = [copy_of(frame) for frame in fate.frames]
            self._hold(fate.delay, link, fate.header, copies, _HeldHandle() if handle is not None else None)
        if not fate.is_lost:
            self._hold(fate.delay, link, fate.header, fate.frames, handle)
        elif handle is not None:
            handle.is_lost = True

    def _strike(self, rule: FaultRule, link: LinkId, fate: _Fate) -> None:
        match rule.kind:
            case "drop":
                fate.is_lost = True
            case "cut":
                fate.is_lost = True
                self._cut(link, "cut by the fault plan")
            case "delay":
                fate.delay += rule.seconds
            case "freeze":
                for way in ("in", "out"):
                    self._lanes[link, way].frozen_until = self._clock() + rule.seconds
            case "hold":
                self._lanes[link, rule.direction].frozen_until = math.inf
            case "duplicate":
                fate.is_repeated = True
            case "corrupt":
                self._corrupt(rule, fate)

    def _rules_for(self, message: AnyMessage | None, direction: str) -> list[FaultRule]:
        struck: list[FaultRule] = []
        for position, rule in enumerate(self._plan.rules):
            if rule.kind == "bandwidth" or not rule.matches(message, direction):
                continue
            self._matched[position] += 1
            if rule.befalls(self._matched[position]):
                struck.append(rule)
        return struck

    def _hold(
        self, delay: float, link: LinkId, header: bytes, frames: Sequence[Frame], handle: _HeldHandle | None
    ) -> None:
        direction = "in" if handle is None else "out"
        lane = self._lanes[link, direction]
        due = max(self._clock(), lane.frozen_until, lane.free_at)
        rate = self._bytes_per_s(direction)
        if rate:
            due += (len(header) + num_bytes(frames)) / rate
            lane.free_at = due
        heapq.heappush(self._held, _Held(due + delay, next(self._numbers), link, header, frames, handle))

    def _bytes_per_s(self, direction: str) -> float:
        rates = [
            rule.bytes_per_s for rule in self._plan.rules if rule.kind == "bandwidth" and rule.direction == direction
        ]
        return min(rates, default=0.0)

    def _corrupt(self, rule: FaultRule, fate: _Fate) -> None:
        """Flips one bit, in a copy: the sender's memory is not ours to damage."""
        if rule.part == "header" or not fate.frames:
            fate.header = bytes(self._flip(bytearray(fate.header)))
            return
        damaged = list(fate.frames)
        victim = self._random.randrange(len(damaged))
        frame = damaged[victim]
        if isinstance(frame, memoryview):
            damaged[victim] = memoryview(self._flip(bytearray(frame)))
        else:
            damaged[victim] = self._flip(frame.clone())
        fate.frames = damaged

    def _flip(self, data: _Bytes) -> _Bytes:
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return data

    def _release_due(self) -> list[CarrierEvent]:
        """Sends what is due to leave; returns what is due to arrive."""
        arrived: list[CarrierEvent] = []
        now = self._clock()
        while self._held and self._held[0].due <= now:
            held = heapq.heappop(self._held)
            if held.handle is None:
                arrived.append(Received(held.link, memoryview(held.header), held.frames))
            else:
                held.handle.inner = self._inner.send(held.link, held.header, held.frames)
        return arrived

    def _cut(self, link: LinkId, reason: str) -> None:
        self.disconnect(link)
        self._cut_links.add(link)
        self._ended.append(Disconnected(link, reason))

    def _is_frozen(self, link: LinkId) -> bool:
        return self._lanes[link, "in"].frozen_until > self._clock()

    def _forget(self, link: LinkId) -> None:
        for held in self._held:
            if held.link == link and held.handle is not None:
                held.handle.is_lost = True
        self._held = [held for held in self._held if held.link != link]
        heapq.heapify(self._held)
        for way in ("in", "out"):
            self._lanes.pop((link, way), None)


def _peek(header: bytes) -> AnyMessage | None:
    try:
        return decode(header)
    except BadMessageError:
        return None


def _is_loopback(endpoint: KVEndpoint) -> bool:
    return endpoint.tcp.startswith(_LOOPBACK)
