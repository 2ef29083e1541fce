"""Workers killed and frozen, messages lost and damaged at random under running streams, round after round: every text
stays exact.

`make test-faults` runs it; FAULT_ROUNDS and FAULT_SEED say how long and from where. The seed of a round is printed.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, Process
from tests.cluster.matrix.damages import DAMAGES
from tests.cluster.moved import TRANSPORTS
from tests.cluster.test_exact import prompt_of
from tests.reference import greedy

pytestmark = [pytest.mark.cluster, pytest.mark.faults, pytest.mark.timeout(3600)]

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "20"))
SEED = int(os.environ.get("FAULT_SEED", str(random.SystemRandom().randrange(2**32))))
STREAMS = 8
MAX_TOKENS = 200


def kill(process: Process) -> None:
    process.kill()


def kill_engine(process: Process) -> None:
    process.is_killed = True
    os.kill(process.engine_pid(), signal.SIGKILL)


def freeze_front(process: Process) -> None:
    _freeze(process, [process.pid])


def freeze_both(process: Process) -> None:
    _freeze(process, [process.engine_pid(), process.pid])


def freeze_engine(process: Process) -> None:
    _freeze(process, [process.engine_pid()])


def _freeze(process: Process, pids: list[int]) -> None:
    """Longer than the heartbeat, then awake again."""
    process.is_killed = True
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(4)


FAULTS: list[Callable[[Process], None]] = [kill, kill_engine, freeze_front, freeze_both, freeze_engine]


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two prefill and three decode workers with a tiny Gemma 2. More comes to harm here than a request has attempts
    for otherwise."""
    made = Cluster(
        tiny("gemma2"),
        prefill=2,
        decode=3,
        router_flags={"max_attempts": 8},
        plans=tmp_path_factory.mktemp("plans"),
        max_num_batched_tokens=48,
        transfer_timeout="1s",
        kv_transport=request.param,
        kv_peer_timeout="1.5s",
    )
    yield made
    made.close()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_fault_changes_a_text(number: int, cluster: Cluster, tiny: Callable[[str], Path]) -> None:
    """Meanwhile one message comes to harm on each prefill worker's links, and with it what has to go wrong before."""
    seed = f"{SEED}/{number}"
    chance = random.Random(seed)
    role, fault = chance.choice(["prefill", "decode"]), chance.choice(FAULTS)
    damages = [chance.choice(DAMAGES) for _ in cluster.of_role("prefill")]
    print(f"FAULT_SEED={SEED} round {number}: {fault.__name__} on a {role} worker, {', '.join(map(str, damages))}")
    prompts = [prompt_of(chance.randrange(1, 200), seed=chance.randrange(10**6)) for _ in range(STREAMS)]
    for process, damage in zip(cluster.of_role("prefill"), damages, strict=True):
        process.set_plan(*damage.rules)

    def ask(prompt: list[int]) -> list[int]:
        answer = cluster.client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return list(answer.token_ids)

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        time.sleep(chance.uniform(0.0, 2.0))
        fault(chance.choice(cluster.of_role(role)))
        outputs = [answer.result() for answer in answers]
    assert outputs == [greedy(tiny("gemma2"), prompt, MAX_TOKENS) for prompt in prompts]
    for process in cluster.of_role("prefill"):
        process.set_plan()
    cluster.heal()
    cluster.wait_drained()
