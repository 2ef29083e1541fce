"""Three workers of each role on which something goes wrong, one test after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fault_bench import FaultBench


@pytest.fixture(scope="package")
def bench(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    made = FaultBench(tiny("llama"), tmp_path_factory.mktemp("plans"))
    yield made
    made.close()
