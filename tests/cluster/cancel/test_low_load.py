"""C29: two requests at a time, for long: what one leaves behind shows, be it a block, a descriptor or memory."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from splitserve.service.errors import Cancelled
from tests.cluster.cancel.books import outcomes
from tests.cluster.fault_bench import FaultBench
from tests.cluster.test_exact import B, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Memory tells something only over many requests: what a library loads the first time that it is needed weighs more than
# a leak of some hundred. And a leak is there in every quarter, so the least growth of a quarter is looked at. Measured
# it is up to 150 bytes a request: the ids of ended attempts are remembered on purpose, within bounds. A request that
# the router keeps is 1,300 bytes, a block 8 KiB.
NBYTES_PER_REQUEST = 512
ENOUGH_REQUESTS = 2000


@dataclass(frozen=True)
class Usage:
    own_nbytes: int  # shared with no other process: what the kernel does with pages of libraries is not ours
    num_fds: int
    num_threads: int


def usage(bench: FaultBench) -> dict[str, Usage]:
    pids = {"router": bench.cluster.router.pid}
    for worker in bench.cluster.workers:
        pids |= {worker.role: worker.pid, f"{worker.role} engine": worker.engine_pid()}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    return {name: Usage(p.memory_full_info().uss, p.num_fds(), p.num_threads()) for name, p in processes.items()}


def ask(bench: FaultBench, number: int) -> None:
    """One in ten leaves."""
    chance = random.Random(number)
    prompt, max_tokens = prompt_of(chance.randrange(1, 6 * B), 6000 + number), chance.randrange(1, 12)
    with bench.cluster.client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as stream:
        if number % 10:
            assert len(stream.result().token_ids) == max_tokens
        else:
            for _ in itertools.islice(stream, chance.randrange(max_tokens)):
                pass
            stream.close()
            with pytest.raises(Cancelled):
                stream.result()


@pytest.mark.parametrize("num_requests", [300, pytest.param(ENOUGH_REQUESTS, marks=pytest.mark.faults)])
def test_request_leaves_something_behind(num_requests: int, bench: FaultBench) -> None:
    bench.make_ready()
    bench.run(prompt_of(bench.filling_tokens), max_tokens=1).result()  # has every page of the pools touched
    [prefill] = bench.cluster.of_role("prefill")
    prefill.set_plan(*({"kind": "corrupt", "message": "Blocks", "nth": nth} for nth in range(20, 2 * num_requests, 20)))
    counted, num_faults = outcomes(bench), prefill.num_events("fault")
    quarter = num_requests // 4
    used: list[dict[str, Usage]] = []
    with ThreadPoolExecutor(2) as pool:
        for first in range(0, num_requests, quarter):
            list(pool.map(lambda number: ask(bench, number), range(first, first + quarter)))
            bench.cluster.wait_drained()
            used.append(usage(bench))
    for name, warm in used[0].items():
        growth = [after[name].own_nbytes - before[name].own_nbytes for before, after in itertools.pairwise(used)]
        if num_requests >= ENOUGH_REQUESTS:
            assert min(growth) <= NBYTES_PER_REQUEST * quarter, f"{name}: {growth}"
        assert {(after[name].num_fds, after[name].num_threads) for after in used} == {(warm.num_fds, warm.num_threads)}
    assert prefill.num_events("fault") - num_faults >= num_requests // 30, "transfers fail meanwhile"
    ended = {name: count - counted[name] for name, count in outcomes(bench).items() if count > counted[name]}
    assert set(ended) <= {"length", "cancelled"}
    prefill.set_plan()
