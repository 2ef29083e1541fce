"""One cell of the fault matrix: a request that is held in a stage, a fault that strikes it there, and what must hold
whatever the cell: the text is exact, others notice nothing, and the books balance."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from splitserve.client.types import Generation
from tests.cluster.fault_bench import HEARTBEAT_TIMEOUT_S, FaultBench, Running, stopped
from tests.cluster.harness import PATIENCE_S, Process, wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of
from tests.cluster.test_watchdog import is_alive

HELD_IN_TRANSFER = ("transferring", "finishing")
PROMPT_TOKENS = 600  # several chunks and messages of blocks


# Faults of a worker or a link, which strike while a request is held in its stage.


def kill(bench: FaultBench, victim: Running, process: Process) -> None:
    process.kill()
    bench.cluster.replace_dead()


def kill_engine(bench: FaultBench, victim: Running, process: Process) -> None:
    """The front lives on for no longer than it takes to say so."""
    process.is_killed = True
    os.kill(process.engine_pid(), signal.SIGKILL)
    assert process.popen.wait(PATIENCE_S) == 1
    bench.cluster.replace_dead()


def kill_front(bench: FaultBench, victim: Running, process: Process) -> None:
    """The engine lives on for no longer than it takes to find out."""
    engine_pid = process.engine_pid()
    process.is_killed = True
    os.kill(process.pid, signal.SIGKILL)
    process.popen.wait(PATIENCE_S)
    wait_for("the engine to end", lambda: not is_alive(engine_pid))
    bench.cluster.replace_dead()


def ask_to_end(bench: FaultBench, victim: Running, process: Process) -> None:
    """SIGTERM, of which everybody has heard before the request goes on. Who holds nothing has gone by then."""
    process.is_killed = True
    process.popen.terminate()

    def is_draining() -> bool:
        return all(w["state"] == "draining" for w in bench.cluster.state()["workers"] if w["pid"] == process.pid)

    wait_for("the drain", is_draining)


def freeze(bench: FaultBench, victim: Running, process: Process) -> None:
    """Longer than the heartbeat, then it wakes with all that it had in mind."""
    with stopped(process.pid, process.engine_pid()):
        time.sleep(HEARTBEAT_TIMEOUT_S + 0.7)


def cut_stream(bench: FaultBench, victim: Running, process: Process) -> None:
    bench.proxy.cut(next(w["id"] for w in bench.cluster.state()["workers"] if w["pid"] == process.pid))


def cut_link(bench: FaultBench, process: Process, stage: str) -> None:
    """The next message on the links of this prefill worker goes nowhere, and the connection ends. Where all that the
    request sends is held back already, that is the first answer to it."""
    before = process.num_events("fault")
    process.set_plan({"kind": "cut", "message": "*", "direction": "in" if stage in HELD_IN_TRANSFER else "out"})
    if stage in ("queued", "reserved", "prefilling"):
        return  # it is the request's own, once that goes on
    is_idle = stage not in HELD_IN_TRANSFER  # links carry nothing then, unless others ask for something
    seeds = itertools.count()

    def is_cut() -> bool:
        if is_idle:
            bench.run(prompt_of(20, seed=next(seeds)), max_tokens=2).result()
        return process.num_events("fault") > before

    wait_for("the link to be cut", is_cut)


FAULTS: dict[str, Callable[[FaultBench, Running, Process], None]] = {
    "kill": kill,
    "engine": kill_engine,
    "front": kill_front,
    "term": ask_to_end,
    "freeze": freeze,
    "cut": cut_stream,
}


@dataclass(frozen=True)
class Cell:
    stage: str
    target: str
    fault: str

    def __str__(self) -> str:
        return f"{self.stage}-{self.target}-{self.fault}"


def marked(cells: Sequence[Any], is_in_make_test: Callable[[Any], bool], over_both: Collection[Any] = ()) -> list[Any]:
    """As parameters of a test: `make test` has some, and some of these over both transports; `make test-faults` all."""

    def marks(cell: Any) -> list[pytest.MarkDecorator]:
        rare = [] if is_in_make_test(cell) else [pytest.mark.faults]
        return [*rare, pytest.mark.both_transports] if cell in over_both else rare

    return [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in cells]


def run_cell(bench: FaultBench, cell: Cell, prompt: list[int], options: dict[str, Any]) -> None:
    with bench.balanced():
        _strike(bench, cell, prompt, options)


def _strike(bench: FaultBench, cell: Cell, prompt: list[int], options: dict[str, Any]) -> None:
    bench.make_ready()
    with STAGES[cell.stage](bench, prompt, options) as victim:
        other = bench.run(prompt_of(40, seed=sum(prompt)), temperature=0.0, max_tokens=100)
        if cell.stage != "queued":  # there it waits behind the victim
            other.wait_tokens(3)
        role = "prefill" if cell.target == "link" else cell.target
        process = bench.cluster.of_role(role)[0] if cell.stage == "queued" else bench.worker_of(victim, role)
        num_cuts = process.num_events("fault")
        if cell.target == "link":
            cut_link(bench, process, cell.stage)
        else:
            FAULTS[cell.fault](bench, victim, process)
    answer = victim.result()
    undisturbed = other.result()
    if cell.target == "link" and cell.stage != "queued":  # there it may be another one's turn
        assert process.num_events("fault") > num_cuts
    bench.plan()
    assert undisturbed.attempts == 1 or cell.stage == "queued"
    # Only decode carries a request: a prefill worker and its links are replaced within the attempt.
    is_lost = cell.target == "decode" and cell.stage != "queued" and cell.fault != "term"
    assert answer.attempts == (2 if is_lost else 1)
    if cell.fault == "term":
        assert process.popen.wait(PATIENCE_S) == 0
    assert_exact(bench, other, undisturbed)
    assert_exact(bench, victim, answer)
    bench.cluster.wait_drained()


def assert_exact(bench: FaultBench, running: Running, answer: Generation) -> None:
    """As if nothing had happened, and the client has seen just that; also once more, from what caches have of it."""
    bench.reference.check(running.prompt, answer, running.options)
    assert running.ids == list(answer.token_ids), "what was streamed is what there is"
    bench.make_ready()
    again = bench.run(running.prompt, **running.options)
    bench.reference.check(running.prompt, again.result(), running.options)
