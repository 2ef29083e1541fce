"""The last one here, for it ends the workers."""

import pytest

from tests.cluster.fault_bench import FaultBench
from tests.cluster.test_drain import ask_to_end, wait_for_end

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_worker_without_a_router_cannot_be_asked_to_end(bench: FaultBench) -> None:
    bench.make_ready()
    bench.cluster.router.kill()
    for worker in bench.cluster.workers:
        ask_to_end(worker)
        assert wait_for_end(worker) == 0
