"""Three workers of each role on which something goes wrong, one test after the other, over each transport."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fault_bench import FaultBench
from tests.cluster.moved import TRANSPORTS, assert_moved_by


@pytest.fixture(scope="package", params=TRANSPORTS)
def bench(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultBench]:
    made = FaultBench(tiny("llama"), tmp_path_factory.mktemp("plans"), transport=request.param)
    yield made
    try:
        assert_moved_by(made.cluster, request.param)
    finally:
        made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` has over Gloo what is marked `both_transports` or `gloo_first`, over ZeroMQ all but the latter, and
    `make test-faults` has all over both."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        transport = callspec.params.get("bench") if callspec is not None else None
        is_gloo_first = item.get_closest_marker("gloo_first") is not None
        is_over_both = item.get_closest_marker("both_transports") is not None
        if (transport == "gloo" and not (is_over_both or is_gloo_first)) or (transport == "zmq" and is_gloo_first):
            item.add_marker(pytest.mark.faults)
