"""Every stage of a request, and in each of them every way to lose a worker, its stream or a message: the text is exact.

Beside the request that is disturbed runs another one, on other workers, which notices nothing. All of it over ZeroMQ,
and again over Gloo, where `make test` has a part.
"""

import os
import random

import pytest

from tests.cluster.cells import PROMPT_TOKENS, Cell, marked, run_cell
from tests.cluster.fault_bench import OPTIONS, FaultBench
from tests.cluster.matrix.damages import DAMAGES, Damage, Message, run_damage
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))


# Kills are followed by others, so that the replacement starts meanwhile.
CELLS = [
    Cell(stage, target, fault)
    for stage in STAGES
    for target, fault in [
        ("decode", "kill"),
        ("link", "cut"),
        ("decode", "cut"),
        ("prefill", "cut"),
        ("prefill", "kill"),
        ("decode", "freeze"),
        ("prefill", "freeze"),
    ]
]
# Other ways to end: one process of a worker only, or both and in good order. The roles take turns, for the same reason.
MORE_CELLS = [
    Cell(stage, target, fault)
    for fault in ("engine", "term", "front")
    for stage in ("prefilling", "transferring", "decoding")
    for target in ("decode", "prefill")
]
IN_MAKE_TEST = {Cell("transferring", "prefill", "engine"), Cell("decoding", "decode", "front")}
OVER_BOTH = {
    Cell("transferring", "decode", "kill"),
    Cell("transferring", "prefill", "kill"),
    Cell("transferring", "link", "cut"),
    Cell("finishing", "link", "cut"),
    Cell("decoding", "decode", "kill"),
    Damage("drop", Message("Blocks", nth=3)),
    Damage("corrupt", Message("Blocks")),
    Damage("duplicate", Message("Blocks")),
    Damage("drop", Message("Finish")),
}


@pytest.mark.parametrize("cell", marked([*CELLS, *MORE_CELLS], {*CELLS, *IN_MAKE_TEST}.__contains__, OVER_BOTH))
def test_fault_in_a_stage_reaches_the_client(cell: Cell, bench: FaultBench) -> None:
    number = [*CELLS, *MORE_CELLS].index(cell)
    run_cell(bench, cell, prompt_of(PROMPT_TOKENS, seed=number), OPTIONS[number % len(OPTIONS)])


@pytest.mark.parametrize("damage", marked(DAMAGES, lambda damage: damage.is_in_make_test, OVER_BOTH))
def test_damaged_message_reaches_the_client(damage: Damage, bench: FaultBench) -> None:
    """C31, C32: what is lost, late, doubled or damaged on the way of the blocks, or of what is said of them."""
    number = DAMAGES.index(damage)
    run_damage(bench, damage, prompt_of(PROMPT_TOKENS, seed=500 + number), OPTIONS[number % len(OPTIONS)])


@pytest.mark.faults
@pytest.mark.parametrize("number", range(ROUNDS * (len(CELLS) + len(DAMAGES))))
def test_fault_reaches_the_client_now_and_then(number: int, bench: FaultBench) -> None:
    """Any cell, prompt and options, again and again; FAULT_ROUNDS and FAULT_SEED say how often and from where."""
    chance = random.Random(f"{SEED}/{number}")
    cell, options = chance.choice([*CELLS, *MORE_CELLS, *DAMAGES]), chance.choice(OPTIONS)
    print(f"FAULT_SEED={SEED} round {number}: {cell}, {options}")
    prompt = prompt_of(chance.randrange(PROMPT_TOKENS, 900), seed=chance.randrange(10**6))
    if isinstance(cell, Damage):
        run_damage(bench, cell, prompt, options)
    else:
        run_cell(bench, cell, prompt, options)
