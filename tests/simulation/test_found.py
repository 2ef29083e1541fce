"""What the simulation has found, as the shortest order of events that shows it."""

from collections.abc import Iterator

import pytest

from router.metrics import Outcome
from splitserve.v1 import cluster_pb2 as pb
from tests.simulation.client import OPTIONS
from tests.simulation.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
        made.add_worker(role)
    for _ in range(4):
        made.move()
    yield made
    made.close()


def test_request_that_ends_with_its_first_token_leaves_a_reservation_when_the_link_breaks(cluster: Cluster) -> None:
    """Decode has heard nothing of the transfer, so it cannot know that it has failed."""
    client = cluster.submit([1], 1, OPTIONS[0], 1, None)
    for _ in range(4):
        cluster.move(without="kv")
    assert client.outcome() is Outcome.LENGTH
    lane = next(lane for lane in cluster.wires.lanes if lane.parcels)
    cluster.wires.cut(lane.receiver, lane.link, "cut by the test", is_own_doing=False)
    cluster.pass_time(30.0, is_moving=True)
    cluster.check_idle()
