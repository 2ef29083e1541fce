"""A client leaves in any way, or its time is up, in every stage of its request: one outcome, and workers soon hold
nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.service.errors import DeadlineExceeded
from tests.cluster.cancel.books import held_blocks, num_steps, outcomes
from tests.cluster.fault_bench import FaultBench, OnItsOwnChannel, Running, Unread, stopped
from tests.cluster.harness import wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.timeout(300)]

PROMPT_TOKENS = 600
MAX_TOKENS = 5000  # seconds of decode
DEADLINE_S = 3.0


def miss_the_deadline(victim: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        victim.result()


ENDINGS: dict[str, tuple[Callable[[Any], None], str, dict[str, Any]]] = {
    "leave": (Running.leave, "cancelled", {}),
    "close-channel": (OnItsOwnChannel.leave, "cancelled", {"reader": OnItsOwnChannel}),
    "leave-unread": (Unread.leave, "cancelled", {"reader": Unread}),
    "deadline": (miss_the_deadline, "deadline", {"timeout": DEADLINE_S}),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_ended_request_holds_workers(ending: str, stage: str, bench: FaultBench) -> None:
    bench.make_ready()
    end, outcome, options = ENDINGS[ending]
    number = list(STAGES).index(stage) + 10 * list(ENDINGS).index(ending)
    prompt = prompt_of(PROMPT_TOKENS, seed=900 + number)
    counted = outcomes(bench)
    [decode] = bench.cluster.of_role("decode")
    with STAGES[stage](bench, prompt, {"temperature": 0.0, "max_tokens": MAX_TOKENS} | options) as victim:
        with stopped(decode.engine_pid()):  # it has much left to do
            steps = num_steps(bench)
            end(victim)
            wait_for("the outcome", lambda: outcomes(bench)[outcome] == counted[outcome] + 1)
        # While the stage is still held: nobody waits for what the request was waiting for.
        if stage != "queued":  # there others hold blocks
            wait_for("decode's blocks", lambda: held_blocks(bench, "decode") == 0)
    bench.cluster.wait_drained()
    others = 1 if stage == "queued" else 0  # what held the room leaves as well
    # A step that was under way in each engine, and another one before it hears of the end.
    assert num_steps(bench) - steps <= 2 * 2
    assert bench.proxy.seen("reserve", prompt) == (stage != "queued"), "who waits in the queue reaches no worker"
    total = sum(outcomes(bench).values()) - sum(counted.values())
    assert total == 1 + others, "each request has one outcome"
