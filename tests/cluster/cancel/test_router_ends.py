"""The router ends in every stage of a request: its client is told so, and workers, which outlive it, hold nothing.

`make test` has requests in all stages at once, as far as that goes; `make test-faults` each stage in each way.
"""

import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from splitserve.service.errors import Unavailable
from tests.cluster.fault_bench import FaultBench, stopped
from tests.cluster.harness import Process, wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_drain import ask_to_end, wait_for_end
from tests.cluster.test_exact import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.matrix, pytest.mark.timeout(300)]

LOAD = ("splitserve_kv_cache_usage_perc", "splitserve_num_requests_running", "splitserve_num_requests_waiting")


@pytest.fixture(scope="module", autouse=True)
def _others_find_a_router(bench: FaultBench) -> Iterator[None]:
    yield
    bench.cluster.replace_router()


def ask_twice(router: Process) -> None:
    ask_to_end(router)
    router.event("draining")  # two of the same signal at once are one
    ask_to_end(router)


def interrupt(router: Process) -> None:
    router.popen.send_signal(signal.SIGINT)


def kill(router: Process) -> None:
    """No farewell, neither to clients nor to workers."""
    router.popen.kill()


# With the time that streams get after the first SIGTERM.
WAYS: dict[str, tuple[Callable[[Process], None], str]] = {
    "drain": (ask_to_end, "0.1s"),
    "twice": (ask_twice, "600s"),
    "interrupt": (interrupt, "600s"),
    "kill": (kill, "600s"),
}


# Prompts for which there is room together, in the order in which they can be brought there. The prefill worker's queue
# takes no second long one.
TOGETHER = {"decoding": 600, "joined": 600, "finishing": 600, "reserved": 20, "prefilling": 600}
THE_REST = {"transferring": 200, "queued": 600}


@pytest.mark.parametrize(
    ("stages", "way"),
    [
        (TOGETHER, "drain"),
        (THE_REST, "twice"),
        (THE_REST, "interrupt"),
        (TOGETHER, "kill"),
        *(pytest.param({stage: 600}, way, marks=pytest.mark.faults) for stage in STAGES for way in WAYS),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_router_that_ends_leaves_workers_busy(stages: dict[str, int], way: str, bench: FaultBench) -> None:
    """C28."""
    end, drain_timeout = WAYS[way]
    bench.cluster.replace_router(drain_timeout=drain_timeout)
    bench.make_ready()
    router, workers = bench.cluster.router, bench.cluster.workers
    with contextlib.ExitStack() as held:
        victims = []
        for number, (stage, num_tokens) in enumerate(stages.items()):
            prompt = prompt_of(num_tokens, seed=700 + 10 * number + list(WAYS).index(way))
            options = {"temperature": 0.0, "max_tokens": 300}
            victims.append(held.enter_context(STAGES[stage](bench, prompt, options)))
        end(router)
        for victim in victims:
            with pytest.raises(Unavailable) as told:
                victim.result()
            if way != "kill":
                assert (told.value.reason, told.value.retry_after_s) == ("DRAINING", 1.0)
        assert wait_for_end(router) == (-signal.SIGKILL if way == "kill" else 0)
        [decode] = bench.cluster.of_role("decode")
        wait_for("decode's blocks, while all is still held", lambda: not any(map(decode.metric, LOAD)))
    for worker in workers:
        wait_for("an idle worker", lambda worker=worker: not any(map(worker.metric, LOAD)))
    if way != "kill":
        assert_outcomes(router, num_failed=len(victims), num_rejected="queued" in stages)
    assert bench.cluster.workers == workers
    assert all(worker.popen.poll() is None for worker in workers)


def test_router_that_drains_cuts_its_streams(bench: FaultBench) -> None:
    """C28: it gives them three seconds. Here decode stands still, so that the stream cannot end by itself; the client
    is told in-band what it is."""
    bench.cluster.replace_router(drain_timeout="3s")
    bench.make_ready()
    [decode] = bench.cluster.of_role("decode")
    with bench.cluster.client.stream(prompt_of(20), max_tokens=400, ignore_eos=True) as chunks:
        assert next(iter(chunks)).token_ids
        with stopped(decode.engine_pid()):
            ask_to_end(bench.cluster.router)
            bench.cluster.router.event("draining")
            with pytest.raises(Unavailable) as refusal:
                bench.cluster.client.generate(prompt_of(20), max_tokens=2)
            with pytest.raises(Unavailable) as ending:
                list(chunks)
            for error in (refusal.value, ending.value):
                assert (error.reason, error.retry_after_s) == ("DRAINING", 1.0)
            assert wait_for_end(bench.cluster.router) == 0


def assert_outcomes(router: Process, num_failed: int, num_rejected: int) -> None:
    """Each request has one. What never reached a worker has not failed, but what filled the cluster for it has."""
    expected = +Counter(failed=num_failed, rejected=num_rejected)
    wait_for("the last words of the router", lambda: router.num_events("request ended") >= expected.total())
    assert Counter(event["outcome"] for event in router.events if event.get("event") == "request ended") == expected
