"""Two routers and the workers of both. One for all files here."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fault_bench import ROUTER_FLAGS, FaultBench
from tests.cluster.harness import Cluster, wait_for


class TwoRouters(FaultBench):
    """`cluster` is the first router with the workers, `second` the other router."""

    def __init__(self, model: Path, plans: Path) -> None:
        self.second = Cluster(model, prefill=0, decode=0, router_flags=ROUTER_FLAGS)
        # Neither router knows what the other one asks of a decode worker: there is room for both.
        flags = {"decode_blocks": 192, "drain_timeout": "600s"}
        super().__init__(model, plans, prefill=2, decode=2, beside=self.second, **flags)

    def close(self) -> None:
        super().close()
        self.second.close()

    def is_ready(self) -> bool:
        """Both routers know the workers that are here, and no others; any pair of them can be used."""
        alive = {worker.pid for worker in self.cluster.workers if worker.popen.poll() is None}
        routers = [router for router in (self.cluster, self.second) if router.router.popen.poll() is None]
        return all({w["pid"] for w in r.state()["workers"]} == alive and r.is_linked() for r in routers)

    def wait_ready(self) -> None:
        wait_for("both routers to know all workers", self.is_ready)


@pytest.fixture(scope="package")
def routers(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRouters]:
    made = TwoRouters(tiny("llama"), tmp_path_factory.mktemp("plans"))
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()
