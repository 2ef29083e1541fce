"""A worker is lost while it sends or receives blocks, and others exchange theirs: only its own pairs end."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.cluster.cells import marked
from tests.cluster.fault_bench import FaultBench, Running, stopped
from tests.cluster.harness import Process, wait_for
from tests.cluster.moved import Books, id_of
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.timeout(300)]

ROLES = ("prefill", "decode")
NUM_TRANSFERS = 5
NUM_WORKERS = 6
# What one end of a transfer says when it has left the other, which it has heard nothing of.
LEFT = ("LINK_LOST", "TIMEOUT")
# The proxy knows a request by its prompt, so none comes twice.
_seeds = itertools.count(7000)


@dataclass(frozen=True)
class Place:
    """Where a request was when something went wrong. `is_held`: its blocks are half-way."""

    running: Running
    prefill: Process
    decode: Process
    is_held: bool

    def is_on(self, worker: Process) -> bool:
        return worker in (self.prefill, self.decode)


@contextmanager
def transfers(bench: FaultBench) -> Iterator[list[Place]]:
    """Of which at least two are half done, between other workers; all go on with the end of the context. The first one
    is to be the victim."""
    bench.cluster.heal()
    bench.plan({"kind": "hold", "message": "Blocks", "nth": 2})
    running = [bench.run(prompt_of(400, seed=next(_seeds)), temperature=0.0) for _ in range(NUM_TRANSFERS)]

    def places() -> list[Place]:
        if not all(bench.proxy.seen("prefill", one.prompt) for one in running):
            return []
        found = sorted((_place(bench, one) for one in running), key=lambda place: not place.is_held)
        first = found[0]
        others = [place for place in found[1:] if place.is_held and place.prefill is not first.prefill]
        return found if any(place.decode is not first.decode for place in others) else []

    try:
        yield wait_for("two transfers to be half done", places)
    finally:
        bench.plan()


def _place(bench: FaultBench, running: Running) -> Place:
    by_id = {id_of(worker): worker for worker in bench.cluster.workers}
    prefill, decode = (by_id[bench.proxy.worker_of(running.prompt, role)] for role in ROLES)
    transfer = bench.proxy.last("prefill", running.prompt).prefill.ticket.transfer_id
    is_held = any(event.get("event") == "fault" and event["transfer"] == transfer for event in list(prefill.events))
    return Place(running, prefill, decode, is_held)


def assert_served(bench: FaultBench, places: list[Place], victim: Process) -> None:
    """All, and those on other pairs without another attempt. Only decode carries a request."""
    for place in places:
        answer = place.running.result()
        was_lost = place.decode is victim
        # One that was not held may have come to its end in time.
        assert answer.attempts == 1 + was_lost or (was_lost and not place.is_held)
        bench.reference.check(place.running.prompt, answer, place.running.options)


def num_left(worker: Process) -> int:
    failed = [event for event in list(worker.events) if event.get("event") == "kv transfer failed"]
    return sum(event["reason"] in LEFT for event in failed)


@pytest.mark.parametrize("role", marked(ROLES, lambda role: role == "prefill", over_both=ROLES))
def test_killed_peer_takes_other_pairs_along(role: str, bench: FaultBench) -> None:
    with bench.balanced():
        with transfers(bench) as places:
            victim = getattr(places[0], role)
            books = Books(bench.cluster.workers)
            victim.kill()
        assert_served(bench, places, victim)
        assert books.lost_links() <= {id_of(victim)}
        others = {id_of(place.decode) for place in places if place.is_held and not place.is_on(victim)}
        assert others
        assert others <= {moved.sink for moved in books.settled(besides=[id_of(victim)])}
    bench.cluster.wait_drained()


@pytest.mark.parametrize("role", marked(ROLES, lambda role: role == "decode", over_both=ROLES))
def test_frozen_peer_is_waited_for(role: str, bench: FaultBench) -> None:
    """First the engine alone, which nobody but its peer can notice: that leaves it within its deadline. The transfer
    that it was in goes elsewhere and all others go on before it moves again; then its pairs form anew."""
    with bench.balanced(), ExitStack() as frozen:
        with transfers(bench) as places:
            first = places[0]
            victim, peer = (first.prefill, first.decode) if role == "prefill" else (first.decode, first.prefill)
            early = [place for place in places if place is first or not place.is_on(victim)]
            before, books = num_left(peer), Books(set(bench.cluster.workers) - {victim})
            victim.is_killed = True  # its front gives it up, should this take long
            frozen.enter_context(stopped(victim.engine_pid()))
        wait_for("its peer to leave it", lambda: num_left(peer) > before)
        if role == "decode":  # which carries the request: its router must notice too
            frozen.enter_context(stopped(victim.pid))
        assert_served(bench, early, victim)
        assert books.lost_links() <= {id_of(victim)}
        frozen.close()
        assert_served(bench, places, victim)
    bench.cluster.wait_drained()

    def are_linked() -> bool:
        bench.cluster.replace_dead()
        return len(bench.cluster.state()["workers"]) == NUM_WORKERS and bench.cluster.is_linked()

    wait_for("all pairs", are_linked)
