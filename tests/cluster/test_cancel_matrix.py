"""A client leaves, or its time is up, in every stage of its request: one outcome, and workers soon hold nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.service.errors import DeadlineExceeded
from tests.cluster.fault_bench import FaultBench, Running
from tests.cluster.harness import wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT_TOKENS = 600
DEADLINE_S = 3.0


@pytest.fixture(scope="module")
def bench(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    plans = tmp_path_factory.mktemp("plans")
    made = FaultBench(tiny("llama"), plans, prefill=1, decode=1, kv_patience_s=20.0)
    yield made
    made.close()


def miss_the_deadline(victim: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        victim.result()


ENDINGS: dict[str, tuple[Callable[[Running], None], str, dict[str, Any]]] = {
    "leave": (Running.leave, "cancelled", {}),
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
    with STAGES[stage](bench, prompt, {"temperature": 0.0, "max_tokens": 300} | options) as victim:
        end(victim)
        # While the stage is still held: nobody waits for what the request was waiting for.
        wait_for("the outcome", lambda: outcomes(bench)[outcome] == counted[outcome] + 1)
        if stage not in ("queued", "prefilling"):  # there others hold blocks, or the engine stands still
            wait_for("decode's blocks", lambda: held_blocks(bench, "decode") == 0)
        steps = num_steps(bench)
    bench.cluster.wait_drained()
    others = 1 if stage == "queued" else 0  # what held the room leaves as well
    # A step under way may end, and a held engine may have had one to begin.
    assert num_steps(bench) - steps <= 2 + others
    assert bench.proxy.seen("reserve", prompt) == (stage != "queued"), "who waits in the queue reaches no worker"
    total = sum(outcomes(bench).values()) - sum(counted.values())
    assert total == 1 + others, "each request has one outcome"


def outcomes(bench: FaultBench) -> dict[str, float]:
    names = ("stop", "length", "cancelled", "deadline", "rejected", "failed")
    return {name: bench.cluster.metric("splitserve_requests_total", outcome=name) for name in names}


def held_blocks(bench: FaultBench, role: str) -> int:
    return sum(w["blocks"]["in_use"] + w["blocks"]["reserved"] for w in bench.cluster.workers_of(role))


def num_steps(bench: FaultBench) -> int:
    return sum(worker["steps"] for worker in bench.cluster.state()["workers"])
