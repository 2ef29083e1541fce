"""The stages of a request's life, each reached and held on a `FaultBench` until it is let go."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tests.cluster.fault_bench import FaultBench, Running, signal_all
from tests.cluster.harness import wait_for
from tests.cluster.test_exact import prompt_of

# Starts a request and yields it when it is in the stage; at the end of the context it may go on.
Stage = Callable[[FaultBench, list[int], dict[str, Any]], AbstractContextManager[Running]]


@contextlib.contextmanager
def queued(bench: FaultBench, prompt: list[int], options: dict[str, Any]) -> Iterator[Running]:
    """No decode worker has room: each holds blocks for a prompt that no prefill worker hears of."""
    holds, occupants = [], []
    try:
        for seed in range(len(bench.cluster.workers_of("decode"))):
            occupied = prompt_of(bench.filling_tokens, seed=1000 + seed)
            holds.append(bench.proxy.hold("prefill", occupied))
            occupants.append(bench.run(occupied, max_tokens=1))
            holds[-1].wait()
        victim = bench.run(prompt, **options)
        wait_for("a queued request", lambda: bench.cluster.state()["queue"]["requests"] >= 1)
        assert not bench.proxy.seen("reserve", prompt)
        yield victim
    finally:
        for occupant in occupants:
            occupant.leave()
        for hold in holds:
            hold.release()


@contextlib.contextmanager
def _held_message(bench: FaultBench, prompt: list[int], options: dict[str, Any], kind: str) -> Iterator[Running]:
    hold = bench.proxy.hold(kind, prompt)
    victim = bench.run(prompt, **options)
    try:
        hold.wait()
        yield victim
    finally:
        hold.release()


@contextlib.contextmanager
def _held_transfer(
    bench: FaultBench, prompt: list[int], options: dict[str, Any], rule: dict[str, Any]
) -> Iterator[Running]:
    prefills = bench.cluster.of_role("prefill")
    before = {worker.pid: worker.num_events("fault") for worker in prefills}
    bench.plan({"kind": "hold", **rule})
    victim = bench.run(prompt, **options)
    try:
        wait_for("a held message", lambda: any(w.num_events("fault") > before[w.pid] for w in prefills))
        carrying = bench.worker_of(victim, "prefill")
        for other in prefills:
            if other is not carrying:
                other.set_plan()
        yield victim
    finally:
        bench.plan()


@contextlib.contextmanager
def prefilling(bench: FaultBench, prompt: list[int], options: dict[str, Any]) -> Iterator[Running]:
    """The engine stands still between two chunks, and with it what it sends."""
    with _held_message(bench, prompt, options, kind="accepted") as victim:
        engine = bench.worker_of(victim, "prefill").engine_pid()
        signal_all(signal.SIGSTOP, engine)
        try:
            assert not bench.proxy.seen("first_tokens", prompt), "prefill was over too soon"
            yield victim
        finally:
            signal_all(signal.SIGCONT, engine)


@contextlib.contextmanager
def decoding(bench: FaultBench, prompt: list[int], options: dict[str, Any]) -> Iterator[Running]:
    """The client has some tokens, others are on their way."""
    victim = bench.run(prompt, **options)
    victim.wait_tokens(5)
    hold = bench.proxy.hold("step_tokens", prompt)
    try:
        hold.wait()
        yield victim
    finally:
        hold.release()


STAGES: dict[str, Stage] = {
    "queued": queued,
    "reserved": partial(_held_message, kind="prefill"),
    "prefilling": prefilling,
    "transferring": partial(_held_transfer, rule={"message": "Blocks", "nth": 2}),
    # All blocks are there; what lets the decode worker begin is under way.
    "finishing": partial(_held_transfer, rule={"message": "Finish"}),
    # Decoding has begun, and the router does not know.
    "joined": partial(_held_message, kind="step_tokens"),
    "decoding": decoding,
}
