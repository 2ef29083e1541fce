"""The fault matrix in the default dtype: the text is that of the undisturbed run there, too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cells import PROMPT_TOKENS, Cell, marked, run_cell
from tests.cluster.fault_bench import OPTIONS, FaultBench
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of
from tests.exactness import require_exact

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.timeout(300)]

# Nothing is computed before a request leaves the queue.
CELLS = [
    Cell(stage, target, fault)
    for stage in STAGES
    if stage != "queued"
    for target in ("decode", "prefill")
    for fault in ("kill", "freeze", "cut")
]
IN_MAKE_TEST = {Cell("transferring", "prefill", "kill"), Cell("decoding", "decode", "kill")}


@pytest.fixture(scope="module")
def bench(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    made = FaultBench(tiny("llama"), tmp_path_factory.mktemp("plans"), prefill=2, decode=2, dtype="auto")
    try:
        require_exact(made.reference.runner)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("cell", marked(CELLS, lambda cell: cell in IN_MAKE_TEST))
def test_fault_changes_a_text(cell: Cell, bench: FaultBench) -> None:
    number = CELLS.index(cell)
    run_cell(bench, cell, prompt_of(PROMPT_TOKENS, seed=2000 + number), OPTIONS[number % len(OPTIONS)])
