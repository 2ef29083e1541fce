"""Which of several links: a slow one is taken while a fast one is free, or one that nobody knows is never tried."""

import asyncio
import math
from dataclasses import replace

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import Routing
from router.join import ClusterServicer
from router.links import (
    LOOK_AROUND_EVERY,
    OVER_THE_NETWORK,
    SAME_HOST,
    SAME_TOPOLOGY_GROUP,
    LinkView,
    best_links,
    warning,
)
from router.scheduler import DecodeView, Demand, PrefillView, choose_prefill, place
from router.translate import to_link
from router.worker import Link, Role
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import reports
from splitserve.worker.translate import to_worker_message
from tests.router.cluster_fakes import Router, collect
from tests.router.test_scheduler import D0, D1, P0, P1, SMALL

GB = 1e9
DISTANCES = (SAME_TOPOLOGY_GROUP, SAME_HOST, OVER_THE_NETWORK)

links_of_any_kind = st.lists(
    st.builds(LinkView, st.sampled_from(DISTANCES), st.just(0.0) | st.floats(1.0, 1e12)), min_size=1, max_size=9
)
turns = st.integers(0, 10_000)
# Those in which nothing is tried for its own sake.
settled_turns = turns.map(lambda turn: turn * LOOK_AROUND_EVERY)


@settings(deadline=None)
@given(links_of_any_kind, turns)
def test_no_link_is_chosen_or_one_that_is_not_there(links: list[LinkView], turn: int) -> None:
    chosen = best_links(links, turn)
    assert chosen
    assert set(chosen) <= set(range(len(links)))


@settings(deadline=None)
@given(links_of_any_kind, settled_turns)
def test_slow_link_is_taken_although_a_fast_one_is_free(links: list[LinkView], turn: int) -> None:
    best = max(link.bytes_per_s for link in links)
    for index in best_links(links, turn):
        assert not links[index].bytes_per_s or links[index].bytes_per_s > best / 2 * (1 - 1e-9)


@settings(deadline=None)
@given(links_of_any_kind, settled_turns)
def test_far_link_is_taken_for_a_near_one(links: list[LinkView], turn: int) -> None:
    unmeasured = [link._replace(bytes_per_s=0.0) for link in links]
    nearest = min(link.distance for link in links)
    assert {links[index].distance for index in best_links(unmeasured, turn)} == {nearest}
    assert len(best_links(unmeasured, turn)) == sum(link.distance == nearest for link in links)


@settings(deadline=None)
@given(links_of_any_kind)
def test_link_is_never_tried(links: list[LinkView]) -> None:
    """Not even if trying it measures nothing, because too few bytes travel; then those that were, once more."""
    num_turns = LOOK_AROUND_EVERY * len(links)
    tried = {index for turn in range(num_turns) for index in best_links(links, turn)}
    assert tried >= {index for index, link in enumerate(links) if not link.bytes_per_s}
    measured = [link for link in links if link.bytes_per_s]
    if measured:
        assert {index for turn in range(num_turns) for index in best_links(measured, turn)} == set(range(len(measured)))


def test_link_that_was_not_measured_is_left_for_one_like_it() -> None:
    """What is known of one link is expected of others that are as near or nearer, and of none farther away."""
    near, same_host = LinkView(SAME_TOPOLOGY_GROUP, 0.0), LinkView(SAME_HOST, 0.0)
    known, far = LinkView(SAME_HOST, 2 * GB), LinkView(OVER_THE_NETWORK, 0.0)
    assert best_links([known, same_host, far], 0) == [0, 1]
    assert best_links([known, near, far], 0) == [1]
    assert best_links([far, LinkView(SAME_HOST, 0.1 * GB)], 0) == [1]
    # It was measured, and it is bad.
    assert best_links([LinkView(SAME_TOPOLOGY_GROUP, 0.9 * GB), known], 0) == [1]
    assert best_links([LinkView(SAME_TOPOLOGY_GROUP, 1.1 * GB), known], 0) == [0]


# In the scheduler

FAST_TO_D1 = {"d0": 1 * GB, "d1": 5 * GB}


def chosen(
    prefills: list[PrefillView], decodes: list[DecodeView], turn: int = 0, routing: Routing = "least_loaded"
) -> tuple[str, str]:
    placement = place(SMALL, prefills, decodes, routing, turn)
    assert placement is not None
    return placement.prefill, placement.decode


def test_fast_link_counts_more_than_load_or_less_than_turns() -> None:
    prefill = replace(P0, bytes_per_s=FAST_TO_D1)
    assert [chosen([prefill], [D0, D1], turn) for turn in (0, 1)] == [("p0", "d1")] * 2
    assert chosen([prefill], [D0, replace(D1, available_blocks=9)]) == ("p0", "d0")
    assert chosen([replace(prefill, waiting_tokens=1), P1], [D0, D1]) == ("p1", "d0")
    # A worker that the request has failed on is avoided, however fast.
    placement = place(Demand(20, avoid=frozenset({"d1"})), [prefill], [D0, D1], "least_loaded", 0)
    assert placement is not None
    assert placement.decode == "d0"
    # Whoever asked for turns gets turns.
    assert [chosen([prefill], [D0, D1], turn, "round_robin") for turn in (0, 1)] == [("p0", "d0"), ("p0", "d1")]


def test_near_pair_is_not_known_as_near() -> None:
    """By GPU, then by host; the processors of one host have no topology group and are no farther apart for it."""
    here, there = {"host": "h1"}, {"host": "h2"}
    assert chosen([replace(P0, **here)], [replace(D0, **there), replace(D1, **here)]) == ("p0", "d1")
    assert chosen([replace(P0, **here), replace(P1, **there)], [replace(D0, **there)]) == ("p1", "d0")
    group = {"host": "h1", "topology_group": "GPU-a"}
    other = {"host": "h1", "topology_group": "GPU-b"}
    assert chosen([replace(P0, **group)], [replace(D0, **other), replace(D1, **group)]) == ("p0", "d1")
    nowhere = [replace(P0, host="h1"), replace(P1, host="h2")]
    assert chosen(nowhere, [replace(D0, host="h2")]) == ("p1", "d0")


def test_equally_good_links_do_not_take_turns_any_more() -> None:
    near = {"host": "h"}
    prefills = [replace(P0, **near, bytes_per_s={"d0": 3 * GB, "d1": 2 * GB}), replace(P1, **near)]
    decodes = [replace(D0, **near), replace(D1, **near)]
    assert [chosen(prefills, decodes, turn) for turn in (0, 1)] == [("p0", "d0"), ("p1", "d1")]


def test_prompt_that_is_computed_anew_takes_a_slow_link() -> None:
    slow, fast = replace(P0, bytes_per_s={"d0": GB}), replace(P1, bytes_per_s={"d0": 5 * GB})
    assert choose_prefill([slow, fast], D0, 0) is fast
    busy = replace(fast, waiting_tokens=1)
    assert choose_prefill([slow, busy], D0, 0) is slow
    other = replace(slow, numerics="other")
    assert choose_prefill([other, busy], D0, 0) is busy
    unlinked = replace(P1, bytes_per_s={"d1": 5 * GB})
    assert choose_prefill([unlinked, slow], D0, LOOK_AROUND_EVERY - 1) is unlinked


# From the worker's word to the choice


def link_report(peer: str, bytes_per_s: float) -> pb.WorkerMessage:
    said = to_worker_message(reports.LinkReport(peer, True, "ipc", bytes_per_s))
    return pb.WorkerMessage.FromString(said.SerializeToString())


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0, 0.0, 5e-324])
def test_speed_that_makes_no_sense_is_believed(speed: float) -> None:
    assert to_link(link_report("d0", speed).link_report) == Link(True, "ipc", 0.0)


def test_detour_of_a_link_is_passed_over() -> None:
    """NCCL between two hosts has no other way than the network, and so is none."""
    assert warning("ipc", "", is_same_host=True) is None
    assert warning("nccl P2P/CUMEM", "", is_same_host=True) is None
    assert warning("nccl NET/IB/0", "", is_same_host=False) is None
    assert "NCCL takes the network" in str(warning("nccl NET/Socket/0", "", is_same_host=True))
    assert "nccl: no GPU" in str(warning("tcp", "nccl: no GPU", is_same_host=False))


async def test_detour_is_told_to_nobody() -> None:
    """In the log once, not again with every speed."""
    router = Router()
    (prefill,), _ = router.pairs(num_decode=2)
    servicer = ClusterServicer(router.config, router.membership, "r")
    with structlog.testing.capture_logs() as logged:
        for speed in (0.0, 2.5e9, 3.5e9):
            said = to_worker_message(reports.LinkReport("d1", True, "tcp", speed, "nccl: no GPU"))
            servicer._on_message(prefill.worker, pb.WorkerMessage.FromString(said.SerializeToString()))
    [shown] = [worker for worker in router.membership.describe()["workers"] if worker["id"] == "p0"]
    assert shown["links"]["d1"]["warning"] == "not what was asked for first: nccl: no GPU"
    assert [entry["why"] for entry in logged if entry["log_level"] == "warning"] == [shown["links"]["d1"]["warning"]]


async def test_speed_of_a_link_is_told_to_nobody_or_wakes_everybody() -> None:
    """It is a hint for the next placement and lets no request go that waits for room."""
    router = Router()
    (prefill,), (_, fast) = router.pairs(num_decode=2)
    changes: list[str] = []
    router.membership.on_change(lambda: changes.append("changed"))
    servicer = ClusterServicer(router.config, router.membership, "r")
    servicer._on_message(prefill.worker, link_report("d1", 2.5e9))
    servicer._on_message(prefill.worker, link_report("d0", 1e9))
    assert changes == []
    [shown] = [worker for worker in router.membership.describe()["workers"] if worker["id"] == "p0"]
    assert shown["links"]["d1"] == {
        "reachable": True,
        "detail": "ipc",
        "bytes_per_s": 2_500_000_000,
        "warning": None,
    }
    task = asyncio.create_task(collect(router.submit()))
    await fast.command("reserve")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # Made anew, it is another link.
    prefill.worker.links["d1"] = Link(False, "cut")
    changes.clear()
    servicer._on_message(prefill.worker, link_report("d1", 0.0))
    assert changes == ["changed"]
    assert prefill.worker.prefill_view().bytes_per_s == {"d0": 1e9}


async def test_worker_is_placed_without_its_host() -> None:
    router = Router()
    router.join(Role.PREFILL, "p0", host_id="h1", topology_group="GPU-a")
    near = {"d1": {"host_id": "h1", "topology_group": "GPU-a"}, "d0": {"host_id": "h2", "topology_group": ""}}
    decodes = {name: router.join(Role.DECODE, name, **near[name]) for name in ("d0", "d1")}
    task = asyncio.create_task(collect(router.submit()))
    await decodes["d1"].command("reserve")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
