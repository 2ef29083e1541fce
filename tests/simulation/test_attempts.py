"""Any order of reserve, chunk, finish, acknowledgement, cancel, death, silence, time and message, repeated, late, lost
or damaged: no token is lost, doubled or changed, no block is written or read by who does not own it, and in the end
every request has one outcome and every worker is idle.

Invariants 1 to 6 of the design, with C01 to C03, C25, C30 and C39 at the level of requests. `make test` plays a few
examples of the simulation, `make test-faults` many.
"""

import os
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.metrics import Outcome
from splitserve.v1 import cluster_pb2 as pb
from tests.simulation.client import OPTIONS, Client
from tests.simulation.cluster import Cluster
from tests.simulation.wires import Lane
from tests.simulation.worker import SimulatedWorker

# Prompts are beginnings of these, so that they share blocks.
DOCUMENTS = [[1 + (3 * i + 5 * d * i * i + d) % 31 for i in range(14)] for d in range(3)]
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "20"))
SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))
FAULTS = ["freeze", "thaw", "kill", "replace", "cut", "drain"]
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


class Attempts(RuleBasedStateMachine):
    """Few rules with many choices each, so that what goes well happens often enough for requests to get anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    @initialize(num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2), first=st.lists(requests, max_size=3))
    def start(self, num_prefill: int, num_decode: int, first: list[Any]) -> None:
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
    @rule(what=st.sampled_from(["lose", "duplicate", "damage", "deliver"]), number=numbers, place=numbers, at=bits)
    def disturb_kv(self, what: str, number: int, place: int, at: int) -> None:
        """Something happens to one message, which need not be the next; to one of blocks, if there are any."""
        lanes = [lane for lane in self.lanes() if any(parcel.frames for parcel in lane.parcels)] or self.lanes()
        lane = lanes[number % len(lanes)]
        place %= len(lane.parcels)
        if what == "deliver":
            self.cluster.deliver_kv(lane, place)
        elif what == "damage":
            lane.damage(place, at)
        else:
            getattr(lane, what)(place)

    @rule(
        request=requests,
        what=st.sampled_from(["lose", "duplicate", "damage", "deliver"]),
        number=numbers,
        place=numbers,
        at=bits,
        count=st.integers(1, 4),
    )
    def disturb_transfer(self, request: Any, what: str, number: int, place: int, at: int, count: int) -> None:
        """As above, to a request whose blocks are surely on their way."""
        self.submit(request)
        for _ in range(count):
            self.cluster.move(without="kv")
        if self.lanes():
            self.disturb_kv(what, number, place, at)
            self.cluster.move()

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

    @precondition(lambda self: self.live())
    @rule(number=numbers, what=st.sampled_from(FAULTS))
    def disturb_worker(self, number: int, what: str) -> None:
        live = self.live()
        choice = [worker for worker in live if self.cluster.is_busy(worker)] or live
        worker = choice[number % len(choice)]
        if what in ("freeze", "thaw"):
            worker.is_frozen = what == "freeze"
        elif what == "cut":
            self.cluster.cut_join(worker)
        elif what == "drain":
            worker.drain()
        elif len(self.cluster.workers) < MAX_WORKERS:
            self.cluster.kill(worker)
            if what == "replace" or len(live) == 1:
                self.cluster.add_worker(worker.role)

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
        try:
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
        """Two workers that died while they ran it."""
        return client.error is not None and client.error.reason == "WORKERS_DIED" and client.num_lost >= 2


def play(num_examples: int) -> None:
    settings = hypothesis_settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Attempts, settings=settings)


def test_some_order_of_events_breaks_an_invariant() -> None:
    play(60)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_some_order_of_events_breaks_an_invariant_in_the_long_run(number: int) -> None:
    """FAULT_ROUNDS and FAULT_SEED say how long and from where."""
    print(f"FAULT_SEED={SEED} round {number}")
    seed(random.Random(f"{SEED}/{number}").randrange(2**32))(Attempts)
    play(100)
