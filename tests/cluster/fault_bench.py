"""A cluster on which a request can be brought to a stage of its life, held there, and disturbed.

Three workers of each role: one carries the request, one another stream, and one may still be starting after the last
fault. Timeouts are short, so that what is lost is noticed soon; the tests wait as long as it takes.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitserve import Client
from splitserve.client.types import Generation
from tests.cluster.expected import Reference
from tests.cluster.harness import PATIENCE_S, Cluster, Process, wait_for
from tests.cluster.join_proxy import JoinProxy
from tests.cluster.test_exact import BLOCK_NBYTES

HEARTBEAT_INTERVAL_S = 0.1
HEARTBEAT_TIMEOUT_S = 1.5
TRANSFER_TIMEOUT_S = 1.0
CHUNK = 48
MAX_TOKENS = 60
ROUTER_FLAGS = {
    "heartbeat_interval": f"{HEARTBEAT_INTERVAL_S}s",
    "suspect_timeout": "0.5s",
    "heartbeat_timeout": f"{HEARTBEAT_TIMEOUT_S}s",
    "reserve_timeout": "2s",
    "drain_timeout": "60s",
    # A request may be on both of two workers that are killed: here it never is the cause.
    "max_deaths": 3,
}
_WORKER_FLAGS = {
    "transfer_timeout": f"{TRANSFER_TIMEOUT_S}s",
    "kv_peer_timeout": "1.5s",
    "rejoin_interval": "0.2s",
    "drain_timeout": "60s",
    "max_num_batched_tokens": CHUNK,
}
# What a patient bench waits for without an end.
_FOR_EVER = "600s"
_ROUTER_PATIENCE = ("failover_timeout", "reserve_timeout", "prefill_timeout", "token_timeout", "stall_timeout")
_WORKER_PATIENCE = ("transfer_timeout", "kv_peer_timeout", "stall_timeout")
OUTCOMES = ("splitserve_requests_total", "outcome")
ATTEMPTS = ("splitserve_attempts_total", "reason")
# What a request may ask for, in turns: what it gets must not depend on what happens to it.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 7, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {30: 2.0}},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "logprobs": 2, "prompt_logprobs": 1},
]


class Running:
    """A stream that is read in a thread of its own."""

    def __init__(self, cluster: Cluster, prompt: list[int], **options: Any) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self._cluster = cluster
        self._client = self._connect()
        self.options = {"ignore_eos": True, "max_tokens": MAX_TOKENS} | options
        self._outcome: Generation | Exception | None = None
        self._stream: Any = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _connect(self) -> Client:
        return self._cluster.client

    def _read(self) -> None:
        try:
            with self._client.stream(self.prompt, **self.options) as stream:
                self._stream = stream
                for chunk in stream:
                    self.ids += chunk.token_ids
                self._outcome = stream.result()
        except Exception as error:
            self._outcome = error

    def wait_tokens(self, count: int) -> None:
        wait_for(f"{count} tokens", lambda: len(self.ids) >= count or self._outcome is not None)

    @property
    def attempts(self) -> int | None:
        """How many it took; None for one that has not come to its end."""
        return self._outcome.attempts if isinstance(self._outcome, Generation) else None

    def leave(self) -> None:
        """The client goes away."""
        wait_for("a stream to leave", lambda: self._stream is not None)
        self._stream.close()

    def wait(self) -> None:
        """Until the end, whichever it is."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the stream goes on for ever"

    def result(self) -> Generation:
        """Waits for the end; an error of the stream is raised."""
        self.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class OnItsOwnChannel(Running):
    """It goes away by closing the channel."""

    def _connect(self) -> Client:
        return Client(self._cluster.target, timeout=PATIENCE_S)

    def leave(self) -> None:
        self._client.close()


class Unread(Running):
    """A call that is made and of which nothing is ever read."""

    def _read(self) -> None:
        self._before = self._num_tokens()
        self._stream = self._client.stream(self.prompt, **self.options)

    def _num_tokens(self) -> float:
        return self._cluster.metric("splitserve_generation_tokens_total")

    def wait_tokens(self, count: int) -> None:
        """Of the router's, which nobody else may use meanwhile."""
        wait_for(f"{count} tokens", lambda: self._stream is not None and self._num_tokens() - self._before >= count)


class FaultBench:
    def __init__(
        self,
        model: Path,
        plans: Path,
        *,
        prefill: int = 3,
        decode: int = 3,
        prefill_blocks: int = 2048,
        decode_blocks: int = 96,
        is_patient: bool = False,
        transport: str = "zmq",
        **flags: Any,
    ) -> None:
        """With 96 blocks two long prompts do not fit into one decode worker.

        A patient one gives nothing up because it takes long: what ends in it was told to end. `transport` is the only
        one that blocks may take; `flags` as those of a cluster.
        """
        router_flags, worker_flags = ROUTER_FLAGS, _WORKER_FLAGS
        if is_patient:
            router_flags = router_flags | dict.fromkeys(_ROUTER_PATIENCE, _FOR_EVER)
            worker_flags = worker_flags | dict.fromkeys(_WORKER_PATIENCE, _FOR_EVER)
        self.transport = transport
        self._num_ready = min(2, prefill), min(2, decode)
        # A prompt that leaves a decode worker less room than any victim needs.
        self.filling_tokens = (decode_blocks - 33) * 16 - 8
        self._runs: list[Running] = []
        self.reference = Reference(model, flags.get("dtype", "float32"))
        self.proxy = JoinProxy()
        self.cluster = Cluster(
            model,
            prefill=prefill,
            decode=decode,
            router_flags=router_flags,
            prefill_flags={"kv_cache_memory": prefill_blocks * BLOCK_NBYTES},
            decode_flags={"kv_cache_memory": decode_blocks * BLOCK_NBYTES},
            proxy=self.proxy,
            plans=plans,
            kv_transport=transport,
            **(worker_flags | flags),
        )

    def close(self) -> None:
        self.cluster.close()
        self.proxy.close()

    def make_ready(self) -> None:
        """Two linked workers of each role suffice; replacements of dead ones may still be starting."""
        self.cluster.replace_dead()
        for worker in self.cluster.workers:
            worker.set_plan()

        def is_ready() -> bool:
            alive = {worker.pid for worker in self.cluster.workers if worker.popen.poll() is None}
            workers = self.cluster.state()["workers"]
            decodes = {w["id"] for w in workers if w["role"] == "decode"}
            linked = [
                w
                for w in workers
                if w["role"] == "prefill" and {i for i, link in w["links"].items() if link["reachable"]} >= decodes
            ]
            calm = all(w["pid"] in alive and w["state"] == "ready" for w in workers)
            enough = len(linked) >= self._num_ready[0] and len(decodes) >= self._num_ready[1]
            return calm and enough

        wait_for("two linked workers of each role", is_ready)

    def plan(self, *rules: dict[str, Any]) -> None:
        """On all prefill workers, for nobody knows yet which one it will be."""
        for worker in self.cluster.of_role("prefill"):
            worker.set_plan(*rules)

    def worker_of(self, running: Running, role: str) -> Process:
        return self.cluster.process_of(self.proxy.worker_of(running.prompt, role))

    def run(self, prompt: list[int], *, reader: type[Running] = Running, **options: Any) -> Running:
        self._runs.append(reader(self.cluster, prompt, **options))
        return self._runs[-1]

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """Each request of the body has one outcome, and each attempt is the first of a request or follows one that was
        lost, of which its client is told."""
        outcomes, attempts = (self.cluster.counted(*counter) for counter in (OUTCOMES, ATTEMPTS))
        self._runs.clear()
        yield
        num_runs = len(self._runs)
        # A client may hear of the end before it is counted.
        wait_for("the outcomes", lambda: (self.cluster.counted(*OUTCOMES) - outcomes).total() >= num_runs)
        assert (self.cluster.counted(*OUTCOMES) - outcomes).total() == num_runs
        made = self.cluster.counted(*ATTEMPTS) - attempts
        assert made["first"] == num_runs
        told = sum(run.attempts for run in self._runs if run.attempts)
        left = sum(run.attempts is None for run in self._runs)  # nobody told them of a second one
        assert told + left <= made.total() <= told + 2 * left, made


def signal_all(number: int, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    signal_all(signal.SIGSTOP, *pids)
    try:
        yield
    finally:
        signal_all(signal.SIGCONT, *pids)
