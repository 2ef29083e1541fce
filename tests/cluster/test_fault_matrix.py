"""Every stage of a request, and in each of them every way to lose a worker, its stream or a message: the text is exact.

Beside the request that is disturbed runs another one, on other workers, which notices nothing.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fault_bench import HEARTBEAT_TIMEOUT_S, OPTIONS, FaultBench, Running, is_stopped, stopped
from tests.cluster.harness import Process, wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))
PROMPT_TOKENS = 600  # several chunks and messages of blocks


@pytest.fixture(scope="module")
def bench(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    made = FaultBench(tiny("llama"), tmp_path_factory.mktemp("plans"))
    yield made
    made.close()


# Faults of a worker or a link, which strike while a request is held in its stage.


def kill(bench: FaultBench, victim: Running, process: Process) -> None:
    process.kill()
    bench.cluster.replace_dead()


def freeze(bench: FaultBench, victim: Running, process: Process) -> None:
    """Longer than the heartbeat, then it wakes with all that it had in mind."""
    with stopped(process.pid, process.engine_pid()):
        time.sleep(HEARTBEAT_TIMEOUT_S + 0.7)


def cut_stream(bench: FaultBench, victim: Running, process: Process) -> None:
    bench.proxy.cut(next(w["id"] for w in bench.cluster.state()["workers"] if w["pid"] == process.pid))


def cut_link(bench: FaultBench, victim: Running, process: Process) -> None:
    """`process` is the prefill worker: its next message goes nowhere, and the connection ends."""
    before = process.num_events("fault")
    process.set_plan({"kind": "cut", "message": "*"})
    if not is_stopped(process.engine_pid()):  # else it is cut as soon as the engine goes on
        wait_for("the link to be cut", lambda: process.num_events("fault") > before)


@dataclass(frozen=True)
class Cell:
    stage: str
    target: str
    fault: str

    def __str__(self) -> str:
        return f"{self.stage}-{self.target}-{self.fault}"


WORKER_FAULTS = {"kill": kill, "freeze": freeze, "cut": cut_stream}
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
MESSAGES = [
    {"message": "Open"},
    {"message": "Blocks", "nth": 1},
    {"message": "Blocks", "nth": 3},
    {"message": "Finish"},
    {"message": "Acked", "direction": "in"},
]
MESSAGE_FAULTS = ["drop", "duplicate", "delay", "corrupt"]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_fault_in_a_stage_reaches_the_client(cell: Cell, bench: FaultBench) -> None:
    number = CELLS.index(cell)
    run_cell(bench, cell, prompt_of(PROMPT_TOKENS, seed=number), OPTIONS[number % len(OPTIONS)])


@pytest.mark.faults
@pytest.mark.parametrize("number", range(ROUNDS * len(CELLS)))
def test_fault_in_a_stage_reaches_the_client_now_and_then(number: int, bench: FaultBench) -> None:
    """Any cell, prompt and options, again and again; FAULT_ROUNDS and FAULT_SEED say how often and from where."""
    chance = random.Random(f"{SEED}/{number}")
    cell, options = chance.choice(CELLS), chance.choice(OPTIONS)
    print(f"FAULT_SEED={SEED} round {number}: {cell}, {options}")
    run_cell(bench, cell, prompt_of(chance.randrange(PROMPT_TOKENS, 900), seed=chance.randrange(10**6)), options)


@pytest.mark.parametrize("rule", MESSAGES, ids=lambda rule: f"{rule['message']}{rule.get('nth', '')}")
@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_damaged_message_reaches_the_client(kind: str, rule: dict[str, Any], bench: FaultBench) -> None:
    """C31, C32: what is lost, late, doubled or damaged on the way of the blocks."""
    bench.make_ready()
    number = MESSAGE_FAULTS.index(kind) * len(MESSAGES) + MESSAGES.index(rule)
    prompt, options = prompt_of(PROMPT_TOKENS, seed=500 + number), OPTIONS[number % len(OPTIONS)]
    with STAGES["reserved"](bench, prompt, options) as victim:
        bench.worker_of(victim, "prefill").set_plan({"kind": kind, "seconds": 0.3, "part": "blocks", **rule})
    answer = victim.result()
    bench.plan()
    assert_exact(bench, victim, answer, options)
    assert answer.attempts == 1, "the ticket is renewed, the attempt goes on"
    bench.cluster.wait_drained()


def run_cell(bench: FaultBench, cell: Cell, prompt: list[int], options: dict[str, Any]) -> None:
    bench.make_ready()
    done_before = bench.cluster.metric("splitserve_requests_total", outcome="length")
    with STAGES[cell.stage](bench, prompt, options) as victim:
        other = bench.run(prompt_of(40, seed=sum(prompt)), temperature=0.0, max_tokens=100)
        if cell.stage != "queued":  # there it waits behind the victim
            other.wait_tokens(3)
        role = "prefill" if cell.target == "link" else cell.target
        process = bench.cluster.of_role(role)[0] if cell.stage == "queued" else bench.worker_of(victim, role)
        {**WORKER_FAULTS, "cut": cut_link if cell.target == "link" else cut_stream}[cell.fault](bench, victim, process)
    answer = victim.result()
    undisturbed = other.result()
    bench.plan()
    assert undisturbed.attempts == 1 or cell.stage == "queued"
    # Only decode carries a request: a prefill worker and its links are replaced within the attempt.
    assert answer.attempts == (2 if cell.target == "decode" and cell.stage != "queued" else 1)
    assert_exact(bench, other, undisturbed, {"temperature": 0.0, "max_tokens": 100})
    assert_exact(bench, victim, answer, options)
    bench.cluster.wait_drained()
    done = bench.cluster.metric("splitserve_requests_total", outcome="length") - done_before
    assert done >= 4, "each request has one outcome"


def assert_exact(bench: FaultBench, running: Running, answer: Any, options: dict[str, Any]) -> None:
    """As when nothing happens: the same request once more."""
    bench.make_ready()
    expected = bench.run(running.prompt, **options).result()
    assert list(answer.token_ids) == list(expected.token_ids)
    assert answer.finish_reason == "length"
    assert running.ids == list(answer.token_ids), "what was streamed is what there is"
    for ours, theirs in [(answer.logprobs, expected.logprobs), (answer.prompt_logprobs, expected.prompt_logprobs)]:
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        assert [entry.logprob for entry in ours] == [entry.logprob for entry in theirs]
