"""Transfers that fail again and again: each client is answered, each failure is counted, and nothing is left of it."""

import pytest

from splitserve.service.errors import Unavailable
from tests.cluster.test_exact import prompt_of
from tests.cluster.two_routers.conftest import TwoRouters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_REQUESTS = 7
MAX_ATTEMPTS = 3
FAILURES = "splitserve_kv_transfer_failures_total"


def test_transfer_failures_are_only_logged(routers: TwoRouters) -> None:
    """C32: 21 failures in a row are seven answers, which say why; the routers' and the workers' counters have them all,
    and then everything is as before."""
    routers.make_ready()
    cluster, workers = routers.cluster, routers.cluster.of_role("decode")
    renewed = cluster.metric("splitserve_ticket_renewals_total", reason="transfer_failed")
    failed = cluster.metric("splitserve_requests_total", outcome="failed")
    counted = sum(worker.metric(FAILURES) for worker in workers)
    with cluster.undisturbed(), routers.balanced():
        routers.plan({"kind": "corrupt", "message": "Blocks", "part": "blocks", "count": 0})
        for seed in range(NUM_REQUESTS):
            with pytest.raises(Unavailable, match="transfer_failed") as ending:
                routers.run(prompt_of(60, seed=4000 + seed), temperature=0.0).result()
            assert ending.value.reason == "ATTEMPTS_EXHAUSTED"
            assert ending.value.retry_after_s is not None
        routers.plan()
        cluster.wait_drained()
        for seed in range(NUM_REQUESTS):
            assert routers.run(prompt_of(60, seed=4000 + seed), temperature=0.0).result().attempts == 1
    renewed = cluster.metric("splitserve_ticket_renewals_total", reason="transfer_failed") - renewed
    failed = cluster.metric("splitserve_requests_total", outcome="failed") - failed
    assert (renewed, failed) == ((MAX_ATTEMPTS - 1) * NUM_REQUESTS, NUM_REQUESTS)
    assert sum(worker.metric(FAILURES) for worker in workers) - counted == MAX_ATTEMPTS * NUM_REQUESTS
