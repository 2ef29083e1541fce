"""Any order of reserve, chunk, finish, acknowledgement, cancel, death, silence, time and message, repeated, late, lost
or damaged: no token is lost, doubled or changed, no block is written or read by who does not own it, and in the end
every request has one outcome and every worker is idle.

Invariants 1 to 6 of the design, with C01 to C03, C25, C30 and C39 at the level of requests. `make test` plays a few
examples of the simulation, `make test-faults` many.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, seed
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.machine import Attempts

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "20"))
SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))


def play(num_examples: int) -> None:
    settings = hypothesis_settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Attempts, settings=settings)


def test_some_order_of_events_breaks_an_invariant() -> None:
    play(60)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_some_order_of_events_breaks_an_invariant_in_the_long_run(number: int) -> None:
    """FAULT_ROUNDS and FAULT_SEED say how long and from where."""
    print(f"FAULT_SEED={SEED} round {number}")
    seed(random.Random(f"{SEED}/{number}").randrange(2**32))(Attempts)
    play(100)
