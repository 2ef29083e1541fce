"""The same request, attempt or ticket a second time, on real processes."""

import pytest

from tests.cluster.cells import PROMPT_TOKENS, assert_exact
from tests.cluster.harness import wait_for
from tests.cluster.stages import STAGES
from tests.cluster.test_exact import prompt_of
from tests.cluster.two_routers.conftest import TwoRouters

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OPTIONS = {"temperature": 0.0, "request_id": "one for all"}
IGNORED = "splitserve_messages_ignored_total"


def test_second_use_of_an_id_or_a_ticket_does_harm(routers: TwoRouters) -> None:
    """C39: while blocks are under way a client comes with the same id, each command comes again, and the live ticket
    under another attempt's name; when the request is over, all of it once more. Nobody is harmed, nothing held."""
    routers.make_ready()
    proxy, prompt, other = routers.proxy, prompt_of(PROMPT_TOKENS, seed=3000), prompt_of(40, seed=3001)
    with routers.cluster.undisturbed(), routers.balanced():
        with STAGES["transferring"](routers, prompt, OPTIONS) as victim:
            decode, prefill = (proxy.worker_of(prompt, role) for role in ("decode", "prefill"))
            processes = [routers.cluster.process_of(worker) for worker in (decode, prefill)]
            refused = routers.cluster.metric(IGNORED, kind="refused")
            reserve, again, thief = (proxy.last(kind, prompt) for kind in ("reserve", "prefill", "prefill"))
            thief.prefill.attempt_id = "thief"
            before = [process.metric(IGNORED) for process in processes]
            proxy.tell(decode, reserve)
            proxy.tell(prefill, again)
            proxy.tell(prefill, thief)
            wait_for("the refusal", lambda: routers.cluster.metric(IGNORED, kind="refused") > refused)
            for process, ignored in zip(processes, before, strict=True):
                wait_for("a command to be ignored", lambda p=process, i=ignored: p.metric(IGNORED) == i + 1)
            twin = routers.run(other, **OPTIONS)
            twin.wait()
        answer = victim.result()
        assert answer.attempts == 1
        thief.prefill.attempt_id = "late thief"
        for worker, command in ((decode, reserve), (prefill, again), (prefill, thief)):
            proxy.tell(worker, command)
        for process, ignored in zip(processes, before, strict=True):
            wait_for("a late command to be ignored", lambda p=process, i=ignored: p.metric(IGNORED) == i + 2)
        routers.cluster.wait_drained()
        assert_exact(routers, victim, answer)
        assert_exact(routers, twin, twin.result())
