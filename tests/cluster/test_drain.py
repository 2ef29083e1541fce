"""SIGTERM to workers while requests run: no client hears of it, and all end with status 0.

`cancel/test_router_ends` has the router's.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.client.types import Generation
from tests.cluster.harness import Cluster, Process
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
NUM_STREAMS = 20
MAX_TOKENS = 300
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 950, "ignore_eos": True}
ENDING_S = 60.0


def ask_to_end(process: Process) -> None:
    process.is_killed = True
    process.popen.terminate()


def wait_for_end(process: Process) -> int:
    try:
        return process.popen.wait(ENDING_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError("it lives on:\n" + "\n".join(process.lines[-15:])) from error


@contextmanager
def no_failure(cluster: Cluster) -> Iterator[None]:
    """No request of the body fails, and no attempt is lost to anything but the end of a worker that said so."""
    outcomes = cluster.counted("splitserve_requests_total", "outcome")
    attempts = cluster.counted("splitserve_attempts_total", "reason")
    yield
    assert set(cluster.counted("splitserve_requests_total", "outcome") - outcomes) == {"length"}
    lost = cluster.counted("splitserve_attempts_total", "reason") - attempts
    assert set(lost) <= {"first", "draining", "no_room"}
    assert lost["draining"] > 0


def test_worker_that_drains_costs_a_request(two_by_three: Cluster, tiny: Tiny) -> None:
    """Twenty streams at once; a prefill worker and a decode worker are asked to end in the midst of them."""
    prompts = [prompt_of(40 + index, seed=index) for index in range(NUM_STREAMS)]
    have_begun = threading.Barrier(NUM_STREAMS + 1)

    def stream(prompt: list[int]) -> Generation:
        with two_by_three.client.stream(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True) as chunks:
            next(iter(chunks))
            have_begun.wait(ENDING_S)
            return chunks.result()

    leaving = [two_by_three.of_role(role)[0] for role in ("prefill", "decode")]
    with no_failure(two_by_three), ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = [pool.submit(stream, prompt) for prompt in prompts]
        ask_to_end(leaving[0])
        have_begun.wait(ENDING_S)
        ask_to_end(leaving[1])
        results = [future.result() for future in futures]
    assert [wait_for_end(process) for process in leaving] == [0, 0]
    assert all(len(result.token_ids) == MAX_TOKENS for result in results)
    for index in (0, NUM_STREAMS - 1):
        assert list(results[index].token_ids) == greedy(tiny("gemma2"), prompts[index], MAX_TOKENS)


def test_rolling_restart_ends_a_long_stream(two_by_three: Cluster, tiny: Tiny) -> None:
    """Two decode workers are asked to end, one after the other, each while it runs the stream: it goes on elsewhere,
    and nothing of that is a failure."""
    prompt, ids, asked = prompt_of(30, seed=99), list[int](), list[Process]()
    with no_failure(two_by_three), two_by_three.client.stream(prompt, **LONG) as chunks:
        for chunk in chunks:
            ids += chunk.token_ids
            busy = [w["pid"] for w in two_by_three.workers_of("decode") if w["attempts"] and w["state"] != "draining"]
            for process in two_by_three.of_role("decode"):
                if process.pid in busy and len(asked) < 2 and process not in asked:
                    asked.append(process)
                    ask_to_end(process)
        result = chunks.result()
    assert ids == greedy(tiny("gemma2"), prompt, LONG["max_tokens"])
    assert len(asked) == 2
    assert result.attempts == 3
    assert [wait_for_end(process) for process in asked] == [0, 0]
