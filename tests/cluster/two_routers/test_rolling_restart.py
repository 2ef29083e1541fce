"""Everything is restarted while two routers serve the same workers, in the way that takes its time and in the hard way.

The last test ends both routers.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from splitserve.client.types import Generation
from splitserve.service.errors import Unavailable
from tests.cluster.cells import PROMPT_TOKENS, ask_to_end, assert_exact
from tests.cluster.fault_bench import ATTEMPTS, OUTCOMES, stopped
from tests.cluster.harness import Cluster, Process
from tests.cluster.stages import STAGES
from tests.cluster.test_drain import ask_to_end as terminate
from tests.cluster.test_drain import wait_for_end
from tests.cluster.test_exact import prompt_of
from tests.cluster.two_routers.conftest import TwoRouters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 100}
LONG = OPTIONS | {"max_tokens": 900}
PROMPTS = [prompt_of(60 + 10 * seed, seed=5000 + seed) for seed in range(4)]


@pytest.mark.parametrize("loss", ["second-sigterm", pytest.param("kill", marks=pytest.mark.faults)])
def test_second_sigterm_is_waited_for(loss: str, routers: TwoRouters) -> None:
    """A prefill worker with a prompt in its hands ends at once. What decode holds for that, which is about to end
    itself, gets another ticket; at its second SIGTERM decode ends at once, too, and the stream goes on elsewhere."""
    routers.make_ready()
    prompt, options = prompt_of(PROMPT_TOKENS, seed=6000 + len(loss)), {"temperature": 0.0, "max_tokens": 350}
    renewals = routers.cluster.metric("splitserve_ticket_renewals_total")
    with routers.balanced():
        with STAGES["prefilling"](routers, prompt, options) as victim:
            decode, prefill = (routers.worker_of(victim, role) for role in ("decode", "prefill"))
            ask_to_end(routers, victim, decode)
            hold = routers.proxy.hold("step_tokens", prompt)
            if loss == "kill":
                prefill.kill()
            else:
                ask_to_end(routers, victim, prefill)
                prefill.popen.terminate()
            hold.wait()
            with stopped(decode.engine_pid()):  # or it might come to the end of the stream, and go
                assert routers.worker_of(victim, "decode") is decode
                assert routers.cluster.metric("splitserve_ticket_renewals_total") == renewals + 1
                decode.popen.terminate()
                assert_ended_at_once(decode)
        hold.release()
        answer = victim.result()
        if loss != "kill":
            assert_ended_at_once(prefill)
        assert answer.attempts == 2
        assert_exact(routers, victim, answer)


def assert_ended_at_once(process: Process) -> None:
    """By a second SIGTERM; after the first one it would wait for ten minutes."""
    assert wait_for_end(process) == 0
    assert process.event("stopping")["reason"] == "SIGTERM again"


def test_rolling_restart_costs_a_request(routers: TwoRouters) -> None:
    """C37: one worker after the other is asked to end, until all are new ones, under the load of both routers: nobody
    notices."""
    clusters = (routers.cluster, routers.second)
    old = routers.cluster.of_role("prefill") + routers.cluster.of_role("decode")
    with ExitStack() as loads:
        answers = [loads.enter_context(under_load(cluster)) for cluster in clusters]
        for role in ("prefill", "decode"):
            routers.cluster.add(role).is_plain = True
        routers.wait_ready()
        for process in old:
            terminate(process)
            assert wait_for_end(process) == 0
        routers.wait_ready()
    for texts in zip(*(texts for each in answers for texts in each), strict=True):
        assert len({answer.token_ids for answer in texts}) == 1, "a restart changes a text"
    for prompt, answer in zip(PROMPTS, answers[0][0], strict=True):
        routers.reference.check(prompt, answer, OPTIONS)


@contextmanager
def under_load(cluster: Cluster) -> Iterator[list[list[Generation]]]:
    """All prompts at once, again and again; gives what came of them. No request fails."""
    is_over = threading.Event()
    rounds: list[list[Generation]] = []

    def ask(prompt: list[int]) -> Generation:
        return cluster.client.generate(prompt, **OPTIONS)

    def ask_all() -> None:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            while not is_over.is_set():
                rounds.append(list(pool.map(ask, PROMPTS)))

    outcomes, attempts = cluster.counted(*OUTCOMES), cluster.counted(*ATTEMPTS)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(ask_all)
        try:
            yield rounds
        finally:
            is_over.set()
        load.result()
    assert cluster.counted(*OUTCOMES) - outcomes == {"length": len(rounds) * len(PROMPTS)}
    assert set(cluster.counted(*ATTEMPTS) - attempts) <= {"first", "draining", "no_room"}


def test_end_of_one_router_reaches_the_streams_of_the_other(routers: TwoRouters) -> None:
    """C37: the second one drains: its stream goes on to its end, and nobody notices at the first one, whose workers
    stay. The first one then is asked twice, and tells its stream at once."""
    first, second = routers.cluster, routers.second
    workers = {worker["id"] for worker in first.state()["workers"]}
    with first.client.stream(PROMPTS[0], **LONG) as ours, second.client.stream(PROMPTS[1], **LONG) as theirs:
        begun = [list(next(stream).token_ids) for stream in (ours, theirs)]
        terminate(second.router)
        second.router.event("draining")
        with pytest.raises(Unavailable) as refusal:
            second.client.generate(PROMPTS[3], **OPTIONS)
        assert refusal.value.reason == "DRAINING"
        rest = [[token_id for chunk in stream for token_id in chunk.token_ids] for stream in (ours, theirs)]
        results = [stream.result() for stream in (ours, theirs)]
    assert [answer.attempts for answer in results] == [1, 1]
    assert wait_for_end(second.router) == 0
    assert {worker["id"] for worker in first.state()["workers"]} == workers
    for prompt, ids, others, answer in zip(PROMPTS, begun, rest, results, strict=False):
        assert [*ids, *others] == list(answer.token_ids)
        routers.reference.check(prompt, answer, LONG)

    engines = [worker.engine_pid() for worker in first.of_role("decode")]
    with first.client.stream(PROMPTS[2], **LONG) as cut:
        next(cut)
        with stopped(*engines):  # so that the stream cannot come to its own end
            terminate(first.router)
            first.router.event("draining")
            first.router.popen.terminate()
            with pytest.raises(Unavailable) as ending:
                list(cut)
            assert (ending.value.reason, ending.value.retry_after_s) == ("DRAINING", 1.0)
            assert wait_for_end(first.router) == 0
