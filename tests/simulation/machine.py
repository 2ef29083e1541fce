"""What can happen to a cluster, as hypothesis' rules, and what has to hold whatever happens in whatever order.

The rules are few with many choices each, so that what goes well happens often enough for requests to get anywhere.
"""

import sys
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.metrics import Outcome
from splitserve.v1 import cluster_pb2 as pb
from tests.simulation.client import OPTIONS, Client
from tests.simulation.cluster import PLENTY, SCARCE, Cluster
from tests.simulation.wires import Lane
from tests.simulation.worker import SimulatedWorker

# Prompts are beginnings of these, so that they share blocks.
DOCUMENTS = [[1 + (3 * i + 5 * d * i * i + d) % 31 for i in range(14)] for d in range(3)]
WORKER_FAULTS = ["freeze", "thaw", "kill", "replace", "cut", "drain", "long step"]
KV_FAULTS = ["lose", "duplicate", "damage", "deliver", "cut", "cut one side"]
MAX_WORKERS = 8
HEALING_S = 200

numbers = st.integers(0, 31)
bits = st.integers(0, 1000)
roles = st.sampled_from([pb.ROLE_PREFILL, pb.ROLE_DECODE])


requests = st.tuples(
    st.builds(lambda document, length: document[:length], st.sampled_from(DOCUMENTS), st.integers(1, 14)),
    st.integers(1, 16),
    st.sampled_from(OPTIONS),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([None, None, None, None, None, 3.0]),
)


# Who computes prompts: prefill workers; or decode workers the short ones, or all while there is no other way.
WAYS: list[dict[str, Any]] = [{}, {}, {"split_threshold": 6}, {"without_prefill": "local"}]


class Attempts(RuleBasedStateMachine):
    cluster: Cluster
    is_scarce: bool

    @initialize(
        is_scarce=st.sampled_from([False, False, False, True]),
        way=st.sampled_from(WAYS),
        num_prefill=st.integers(0, 2),
        num_decode=st.integers(1, 2),
        first=st.lists(requests, max_size=3),
        pause_s=st.sampled_from([0.0, 0.0, 0.05]),
    )
    def start(
        self,
        is_scarce: bool,
        way: dict[str, Any],
        num_prefill: int,
        num_decode: int,
        first: list[Any],
        pause_s: float,
    ) -> None:
        self.is_scarce = is_scarce
        self.cluster = Cluster(replace(SCARCE if is_scarce else PLENTY, **way), pause_s)
        if way.get("without_prefill") != "local":
            num_prefill = max(num_prefill, 1)
        for role, count in ((pb.ROLE_PREFILL, num_prefill), (pb.ROLE_DECODE, num_decode)):
            for _ in range(count):
                self.cluster.add_worker(role)
        for _ in range(4):
            self.cluster.move()
        assert self.cluster.membership.is_ready
        for request in first:
            self.submit(request)

    # What goes well

    @rule(request=requests)
    def submit(self, request: Any) -> None:
        self.cluster.submit(*request)

    @rule(count=st.integers(1, 3), without=st.sampled_from(["", "kv", "up", "down"]))
    def move(self, count: int, without: str) -> None:
        """Engines turn and messages arrive, except on one of the ways."""
        for _ in range(count):
            self.cluster.move(without)

    @precondition(lambda self: self.live())
    @rule(number=numbers, count=st.integers(1, 3), hears=st.booleans(), has_kv=st.booleans())
    def turn(self, number: int, count: int, hears: bool, has_kv: bool) -> None:
        """One engine goes on, whether or not it hears and is heard, or its KV thread gets to run."""
        worker = self.live()[number % len(self.live())]
        for _ in range(count):
            while hears and self.cluster.deliver_down(worker):
                pass
            worker.turn()
            if has_kv:
                worker.step_kv()
            while hears and self.cluster.deliver_up(worker):
                pass

    @rule(way=st.sampled_from(["up", "down", "kv"]), number=numbers, count=st.integers(1, 8))
    def deliver(self, way: str, number: int, count: int) -> None:
        """Some messages of one queue, the first first."""
        queues: list[Any] = self.lanes() if way == "kv" else self.live()
        if queues:
            chosen = queues[number % len(queues)]
            for _ in range(count):
                getattr(self.cluster, f"deliver_{way}")(chosen)

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.5, 0.5, 2.0, 2.0, 6.0, 30.0]), is_moving=st.booleans())
    def pass_time(self, seconds: float, is_moving: bool) -> None:
        self.cluster.pass_time(seconds, is_moving=is_moving)

    # What goes wrong

    @precondition(lambda self: self.cluster.clients)
    @rule(number=numbers, what=st.sampled_from(["leaves", "leaves", "reads no more", "reads on"]))
    def client(self, number: int, what: str) -> None:
        client = self.cluster.clients[-1 - number % len(self.cluster.clients)]
        if what == "leaves":
            client.leave()
        elif what == "reads no more":
            client.may_read.clear()
        else:
            client.may_read.set()
        self.cluster.loop.run_ready()

    @precondition(lambda self: self.lanes())
    @rule(what=st.sampled_from(KV_FAULTS), number=numbers, place=numbers, at=bits)
    def disturb_kv(self, what: str, number: int, place: int, at: int) -> None:
        """Something happens to one message, which need not be the next, or to its link; to one of blocks, if there are
        any."""
        lanes = [lane for lane in self.lanes() if any(parcel.frames for parcel in lane.parcels)] or self.lanes()
        lane = lanes[number % len(lanes)]
        place %= len(lane.parcels)
        match what:
            case "deliver":
                self.cluster.deliver_kv(lane, place)
            case "damage":
                lane.damage(place, at)
            case "cut":
                self.cluster.wires.cut(lane.receiver, lane.link, "cut by the test", is_own_doing=False)
            case "cut one side":
                self.cluster.wires.cut_one_side(lane if at % 2 else self.cluster.wires.way_back(lane))
            case _:
                getattr(lane, what)(place)

    @rule(
        request=requests,
        what=st.sampled_from(KV_FAULTS),
        number=numbers,
        place=numbers,
        at=bits,
        count=st.integers(1, 4),
        has_some_arrived=st.booleans(),
        seconds=st.sampled_from([0.0, 0.0, 4.5]),
    )
    def disturb_transfer(
        self,
        request: Any,
        what: str,
        number: int,
        place: int,
        at: int,
        count: int,
        has_some_arrived: bool,
        seconds: float,
    ) -> None:
        """As above, to a request whose blocks are surely on their way; of `seconds` after that nobody hears."""
        self.submit(request)
        for _ in range(count):
            self.cluster.move(without="kv")
        if not self.lanes():
            return
        if has_some_arrived:
            self.cluster.deliver_kv(self.lanes()[number % len(self.lanes())])
        if self.lanes():
            self.disturb_kv(what, number, place, at)
        self.cluster.pass_time(seconds, is_moving=False)
        self.cluster.move()

    @rule(request=requests, at=bits)
    def forge_finish(self, request: Any, at: int) -> None:
        """The books of a source are wrong: its `Finish` names other blocks than those that it has sent."""
        self.submit(request)
        for _ in range(8):
            self.cluster.move(without="kv")
            for lane in self.lanes():
                if lane.forge_finish(at):
                    return
                self.cluster.deliver_kv(lane)

    @rule(number=numbers, place=numbers)
    def replay_kv(self, number: int, place: int) -> None:
        """Something that has arrived on a link arrives there again."""
        if lanes := [lane for lane in self.cluster.wires.lanes if lane.arrived]:
            lane = lanes[number % len(lanes)]
            self.cluster.replay_kv(lane, lane.arrived[-1 - place % len(lane.arrived)])

    @rule(number=numbers, way=st.sampled_from(["up", "down"]), place=numbers, is_late=st.booleans())
    def repeat_control(self, number: int, way: str, place: int, is_late: bool) -> None:
        if live := self.live():
            self.cluster.repeat(live[number % len(live)], way, place, is_late=is_late)

    @rule(number=numbers)
    def cut_kv(self, number: int) -> None:
        if lanes := self.lanes() or self.cluster.wires.lanes:
            lane = lanes[number % len(lanes)]
            self.cluster.wires.cut(lane.receiver, lane.link, "cut by the test", is_own_doing=False)

    @rule()
    def lose_every_stream(self) -> None:
        """As when the router's machine is cut off for a moment."""
        for worker in self.live():
            self.cluster.cut_join(worker)

    @precondition(lambda self: self.live())
    @rule(number=numbers, what=st.sampled_from(WORKER_FAULTS), seconds=st.sampled_from([3.0, 8.0]))
    def disturb_worker(self, number: int, what: str, seconds: float) -> None:
        live = self.live()
        choice = [worker for worker in live if self.cluster.is_busy(worker)] or live
        worker = choice[number % len(choice)]
        if what in ("freeze", "thaw"):
            worker.is_frozen = what == "freeze"
        elif what == "cut":
            self.cluster.cut_join(worker)
        elif what == "drain":
            worker.drain()
        elif what == "long step":
            worker.steps.hold(seconds)
        elif len(self.cluster.workers) < MAX_WORKERS:
            self.cluster.kill(worker)
            if what == "replace" or len(live) == 1:
                self.cluster.add_worker(worker.role)

    @precondition(lambda self: self.live())
    @rule(number=numbers, request=requests)
    def drain_unheard(self, number: int, request: Any) -> None:
        """The router goes on giving it work."""
        self.live()[number % len(self.live())].drain()
        self.submit(request)
        for _ in range(2):
            self.cluster.move(without="up")

    @precondition(lambda self: len(self.live()) < 4)
    @rule(role=roles)
    def add_worker(self, role: pb.Role.ValueType) -> None:
        self.cluster.add_worker(role)

    # Who is meant

    def live(self) -> list[SimulatedWorker]:
        return [worker for worker in self.cluster.workers if not worker.is_dead]

    def lanes(self) -> list[Lane]:
        return [lane for lane in self.cluster.wires.lanes if lane.parcels]

    # What has to hold

    @invariant()
    def everything_adds_up(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            if sys.exc_info()[0] is None:  # else what has gone wrong already is what is told
                self.heal()
                self.everything_ends()
        finally:
            self.cluster.close()

    def heal(self) -> None:
        """Nothing more goes wrong: with a good pair everything comes to its end."""
        for worker in self.live():
            worker.is_frozen = False
        for client in self.cluster.clients:
            client.may_read.set()
        for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            self.cluster.add_worker(role)
        for _ in range(HEALING_S):
            self.cluster.pass_time(1.0, is_moving=True)
            if all(client.is_over for client in self.cluster.clients):
                break
        self.cluster.pass_time(20.0, is_moving=True)

    def everything_ends(self) -> None:
        self.cluster.check()
        counted = self.cluster.metrics.outcomes.copy()
        for client in self.cluster.clients:
            assert client.is_over, f"a request has no end: {client.tokens} of {client.reference.texts}"
            outcome = client.outcome()
            assert outcome is not Outcome.FAILED or self.may_fail(client), f"failed: {client.error!r}"
            counted[outcome] -= 1
        assert not any(counted.values()), f"outcomes that no client saw: {counted}"
        self.cluster.check_idle()

    def may_fail(self, client: Client) -> bool:
        """Two workers died while they ran it, or its limits are exhausted."""
        assert client.error is not None
        if client.error.reason == "WORKERS_DIED":
            return client.num_lost >= 2
        return self.is_scarce and client.error.reason in ("ATTEMPTS_EXHAUSTED", "NO_WORKERS")
