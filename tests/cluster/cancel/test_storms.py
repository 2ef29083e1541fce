"""C28, C31: many requests at once, of which most are given up or lose their prefill worker; then nothing is left.

FAULT_SEED says what happens when; `make test-faults` kills real processes, again and again.
"""

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from splitserve import Client
from splitserve.service.errors import Cancelled, DeadlineExceeded, SplitserveError, Unavailable
from tests.cluster.cancel.books import held_blocks, outcomes
from tests.cluster.fault_bench import FaultBench, Running
from tests.cluster.harness import PATIENCE_S, wait_for
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
NUM_LEAVING, NUM_AT_ONCE = 200, 40
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def leave(bench: FaultBench, number: int) -> bool:
    """One call that its client gives up, in a way and at a moment that the seed decides. Whether it got any token: one
    that did not may have been given up before the router heard of it."""
    chance = random.Random(f"{SEED}/{number}")
    way = chance.choice(["cancel", "close", "deadline"])
    options: dict[str, Any] = GREEDY | {"max_tokens": 2000, "request_id": name_of(number)}
    if way == "deadline":
        options["timeout"] = chance.uniform(0.02, 1.0)
    num_wanted = chance.choice([0, 1, 3]) if way != "deadline" else None
    expected = DeadlineExceeded if way == "deadline" else Cancelled
    num_read = 0
    with Client(bench.cluster.target, timeout=PATIENCE_S) as client:
        stream = client.stream(prompt_of(chance.randrange(1, 200), number), **options)
        try:
            for _ in itertools.islice(stream, num_wanted):
                num_read += 1
            (client if way == "close" else stream).close()
            stream.result()
        except expected:
            return num_read > 0
    raise AssertionError("the answer is complete")


def name_of(number: int) -> str:
    return f"{SEED}/{number}"


def test_storm_of_clients_that_leave_hurts_who_stays(bench: FaultBench) -> None:
    """C28: 200 calls are given up, forty at a time, beside five streams that go on."""
    print(f"FAULT_SEED={SEED}")
    bench.make_ready()
    before = outcomes(bench)
    prompts = [prompt_of(30 + number, seed=3000 + number) for number in range(5)]
    staying = [bench.run(prompt, max_tokens=400, **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        have_begun = list(pool.map(lambda number: leave(bench, number), range(NUM_LEAVING)))
    assert assert_exact(bench, staying, may_fail=False) == 0
    bench.cluster.wait_drained()
    ended = {name: count - before[name] for name, count in outcomes(bench).items() if count > before[name]}
    assert set(ended) == {"cancelled", "deadline", "length"}
    assert ended["length"] == 2 * len(staying)
    router, names = bench.cluster.router, [name_of(number) for number in range(NUM_LEAVING)]
    told = Counter(event["request_id"] for event in router.events if event.get("event") == "request ended")
    assert max(told[name] for name in names) == 1, "no request has two outcomes"
    assert all(told[name] for name, has_begun in zip(names, have_begun, strict=True) if has_begun)
    assert ended["cancelled"] + ended["deadline"] == sum(told[name] for name in names)
    assert bench.cluster.metric("splitserve_num_requests_running") == 0


def test_decode_waits_for_a_prefill_worker_that_is_gone(bench: FaultBench) -> None:
    """C31: eight hand-offs are under way when the only prefill worker dies. Decode holds nothing for them while there
    is none, and each is answered once there is one again."""
    bench.make_ready()
    [prefill] = bench.cluster.of_role("prefill")
    prefill.set_plan({"kind": "hold", "message": "Finish", "count": 0})
    prompts = [prompt_of(300, seed=4000 + number) for number in range(8)]
    waiting = [bench.run(prompt, max_tokens=20, **GREEDY) for prompt in prompts]
    for prompt in prompts:
        wait_for("the first token", lambda prompt=prompt: bench.proxy.seen("first_tokens", prompt))
    assert held_blocks(bench, "decode") >= 8 * 19
    prefill.kill()
    wait_for("decode's blocks", lambda: held_blocks(bench, "decode") == 0)
    assert bench.cluster.state()["queue"]["requests"] == 8
    bench.make_ready()
    assert_exact(bench, waiting, may_fail=False)
    bench.cluster.wait_drained()


def cut_stream(bench: FaultBench) -> None:
    for worker in bench.cluster.workers_of("prefill"):
        bench.proxy.cut(worker["id"])


def kill(bench: FaultBench) -> None:
    for process in bench.cluster.of_role("prefill"):
        process.kill()
    bench.cluster.replace_dead()


@pytest.mark.parametrize(
    ("lose", "num_losses"),
    [
        pytest.param(cut_stream, 4, id="cut"),
        *(pytest.param(kill, 4, id=f"kill-{number}", marks=pytest.mark.faults) for number in range(ROUNDS)),
    ],
)
def test_storm_of_lost_prefill_workers_leaves_decode_busy(
    lose: Callable[[FaultBench], None], num_losses: int, bench: FaultBench
) -> None:
    """C31: forty requests while the one prefill worker is lost again and again. Whoever has lost as many attempts as
    may be is told so; all others have their text."""
    print(f"FAULT_SEED={SEED}")
    chance = random.Random(f"{SEED}/{lose.__name__}")
    bench.make_ready()
    before = outcomes(bench)
    running = [bench.run(prompt_of(chance.randrange(1, 400), 5000 + n), max_tokens=60, **GREEDY) for n in range(40)]
    for _ in range(num_losses):
        wait_for("work to lose", lambda: any(w["attempts"] for w in bench.cluster.workers_of("prefill")))
        time.sleep(chance.uniform(0.0, 0.1))
        lose(bench)
    for stream in running:
        stream.wait()
    ended = {name: count - before[name] for name, count in outcomes(bench).items() if count > before[name]}
    bench.make_ready()
    num_failed = assert_exact(bench, running, may_fail=True)
    assert ended["length"] == len(running) - num_failed
    # Whoever came while there was no prefill worker was refused.
    assert ended.get("failed", 0) + ended.get("rejected", 0) == num_failed
    assert set(ended) <= {"length", "failed", "rejected"}
    bench.cluster.wait_drained()


def assert_exact(bench: FaultBench, running: list[Running], *, may_fail: bool) -> int:
    """All have their text, or a status that says that another try may help: how many of them. Then all have it, in one
    attempt: the storm has left neither wrong blocks nor a grudge."""
    failures: list[SplitserveError] = []
    for stream in running:
        try:
            bench.reference.check(stream.prompt, stream.result(), stream.options)
        except Unavailable as error:
            failures.append(error)
    assert not failures or may_fail, failures
    assert all(error.retry_after_s for error in failures)
    bench.cluster.wait_drained()
    again = [bench.run(stream.prompt, **stream.options) for stream in running]
    for stream in again:
        answer = stream.result()
        assert answer.attempts == 1
        bench.reference.check(stream.prompt, answer, stream.options)
    return len(failures)
