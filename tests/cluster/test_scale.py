"""`splitserve scale` on a running `splitserve up`: while workers come and go, no request notices."""

import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve import Client
from tests.cluster.harness import PATIENCE_S, counted, is_drained, wait_for
from tests.cluster.test_exact import prompt_of
from tests.cluster.up import COMMAND, Up, up
from tests.reference import greedy

pytestmark = pytest.mark.cluster

Tiny = Callable[[str], Path]
NUM_CLIENTS = 2
MAX_TOKENS = 50
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}


def command(cluster: Up, *words: str) -> str:
    """Its output; it must end well."""
    done = subprocess.run([*COMMAND, *words], env=cluster.env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.log.read_text()[-3000:]
    return done.stdout


def workers(cluster: Up) -> dict[str, list[str]]:
    """Their states by role."""
    found: dict[str, list[str]] = {"prefill": [], "decode": []}
    for worker in httpx.get(f"{cluster.url}/cluster").json()["workers"]:
        found[worker["role"]].append(worker["state"])
    return found


@contextmanager
def streams(target: str, answers: list[tuple[int, list[int]]]) -> Iterator[None]:
    """Clients that ask one after the other while the body runs; an answer is a prompt's seed and its tokens."""
    over = threading.Event()

    def ask(seed: int) -> None:
        with Client(target, timeout=PATIENCE_S) as client:
            while not over.is_set():
                answers.append((seed, list(client.generate(prompt_of(40 + seed, seed), **OPTIONS).token_ids)))
                over.wait(0.1)  # new workers need processor time to start

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asking = [pool.submit(ask, seed) for seed in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            over.set()
        for future in asking:
            future.result()


def test_scaling_cost_a_request_or_left_something_behind(tiny: Tiny, tmp_path: Path) -> None:
    """Each role from one worker to two and back, under load. What outlasts a short drain goes on elsewhere."""
    flags = ("--model", str(tiny("llama")), "--dtype", "float32", "--kv-cache-memory", "8MiB")
    answers: list[tuple[int, list[int]]] = []
    with up(tmp_path / "log", *flags, env={"SPLITSERVE_DRAIN_TIMEOUT": "200ms"}) as cluster:
        with streams(cluster.target, answers):
            command(cluster, "scale", "decode=2", "prefill=2")
            assert workers(cluster) == {"prefill": ["ready"] * 2, "decode": ["ready"] * 2}
            num_before = len(answers)
            wait_for("answers of the larger cluster", lambda: len(answers) >= num_before + NUM_CLIENTS)
            said = command(cluster, "scale", "decode=1")
            assert "decode-1 is gone\n" in said
            assert workers(cluster) == {"prefill": ["ready"] * 2, "decode": ["ready"]}
            command(cluster, "scale", "prefill=1")
        assert workers(cluster) == {"prefill": ["ready"], "decode": ["ready"]}
        wait_for("drained pools", lambda: is_drained(httpx.get(f"{cluster.url}/cluster").json()), 30)
        page = httpx.get(f"{cluster.url}/metrics").text
        assert +counted(page, "splitserve_requests_total", "outcome") == Counter(length=len(answers))
    expected = [greedy(tiny("llama"), prompt_of(40 + seed, seed), MAX_TOKENS) for seed in range(NUM_CLIENTS)]
    assert all(ids == expected[seed] for seed, ids in answers)
