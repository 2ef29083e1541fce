"""The fault matrix in the default dtype: the text is that of the undisturbed run there, too."""

import pytest

from tests.cluster.cells import PROMPT_TOKENS, Cell, run_cell
from tests.cluster.fault_bench import OPTIONS
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of
from tests.cluster.two_routers.conftest import TwoRouters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# Nothing is computed before a request leaves the queue.
CELLS = [
    Cell(stage, target, fault)
    for stage in STAGES
    if stage != "queued"
    for target in ("decode", "prefill")
    for fault in ("kill", "freeze", "cut")
]
IN_MAKE_TEST = {
    Cell("transferring", "decode", "freeze"),
    Cell("transferring", "prefill", "kill"),
    Cell("decoding", "decode", "kill"),
    Cell("decoding", "prefill", "freeze"),
}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell), marks=[] if cell in IN_MAKE_TEST else pytest.mark.faults) for cell in CELLS],
)
def test_fault_changes_a_text(cell: Cell, routers: TwoRouters) -> None:
    number = CELLS.index(cell)
    run_cell(routers, cell, prompt_of(PROMPT_TOKENS, seed=2000 + number), OPTIONS[number % len(OPTIONS)])
