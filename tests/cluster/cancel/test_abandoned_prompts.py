"""C22, C23: many clients leave before their first token, or before decode has taken what prefill made for them."""

import pytest

from tests.cluster.cancel.books import held_blocks, num_steps, outcomes
from tests.cluster.fault_bench import FaultBench, OnItsOwnChannel, Running, stopped
from tests.cluster.harness import wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_ABANDONED = 10


def test_abandoned_prompts_are_computed_before_a_short_one(bench: FaultBench) -> None:
    """C22: ten prompts of 4,000 tokens, each 84 chunks, whose clients leave, half of them by closing their channels;
    then twenty tokens: at most one chunk lies between."""
    bench.make_ready()
    counted = outcomes(bench)["cancelled"]
    abandoned = [
        bench.run(prompt_of(4000, seed), reader=OnItsOwnChannel if seed % 2 else Running, max_tokens=1)
        for seed in range(NUM_ABANDONED)
    ]
    [prefill] = bench.cluster.of_role("prefill")
    wait_for("all to be admitted and one to be computed", lambda: are_admitted(bench))
    with stopped(prefill.engine_pid()):
        for client in abandoned:
            client.leave()
        wait_for("the outcomes", lambda: outcomes(bench)["cancelled"] == counted + NUM_ABANDONED)
        assert are_computing(bench), "there was nothing to stop"
        before = num_steps(bench, "prefill")
    assert len(bench.run(prompt_of(20), max_tokens=1).result().token_ids) == 1
    bench.cluster.wait_drained()
    assert num_steps(bench, "prefill") - before <= 2, "one chunk under way, and the short prompt's own"
    assert outcomes(bench)["cancelled"] == counted + NUM_ABANDONED


def are_admitted(bench: FaultBench) -> bool:
    state = bench.cluster.state()
    num_given = sum(worker["attempts"] for worker in state["workers"] if worker["role"] == "decode")
    return state["queue"]["requests"] + num_given == NUM_ABANDONED and are_computing(bench)


def are_computing(bench: FaultBench) -> bool:
    return all(worker["running"] + worker["waiting"] > 0 for worker in bench.cluster.workers_of("prefill"))


def test_blocks_of_a_hand_off_that_nobody_takes_are_kept(bench: FaultBench) -> None:
    """C23: fifty prompts are computed and sent, ten at a time, which is all that the pools hold, and decode does not
    take them, because what says that they are whole is held back. Their clients leave; the next one is served."""
    bench.make_ready()
    [prefill] = bench.cluster.of_role("prefill")
    for first in range(0, 50, NUM_ABANDONED):
        counted, faults = outcomes(bench)["cancelled"], prefill.num_events("fault")
        prefill.set_plan({"kind": "hold", "message": "Finish", "count": 0})
        prompts = [prompt_of(500, seed=2000 + first + number) for number in range(NUM_ABANDONED)]
        clients = [bench.run(prompt, max_tokens=50) for prompt in prompts]
        for prompt in prompts:
            wait_for("the first token", lambda prompt=prompt: bench.proxy.seen("first_tokens", prompt))
        assert prefill.num_events("fault") > faults
        assert held_blocks(bench, "prefill") >= NUM_ABANDONED * 31
        for client in clients:
            client.leave()
        wait_for("the outcomes", lambda counted=counted: outcomes(bench)["cancelled"] == counted + NUM_ABANDONED)
        wait_for("decode's blocks", lambda: held_blocks(bench, "decode") == 0)
        prefill.set_plan()
        bench.cluster.wait_drained()
    assert len(bench.run(prompt_of(500, seed=1999), max_tokens=2).result().token_ids) == 2
