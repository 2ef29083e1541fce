"""A cluster of real processes for tests: a router and workers on free ports, each of which a test may kill or add.

Starting a worker costs seconds of processor time, so tests share clusters (`conftest`); a cluster that a test leaves
with fewer workers than it was made with is healed before the next one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from splitserve import Client

if TYPE_CHECKING:
    from tests.cluster.join_proxy import JoinProxy

PATIENCE_S = 120.0


def wait_for(what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Polls until `condition` gives something true and returns it."""
    give_up = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {patience_s:g} s for {what}"
        time.sleep(0.05)
    return value


@dataclass(eq=False)
class Process:
    """One role's process. `events` are its log lines (JSON), in order."""

    role: str
    popen: "subprocess.Popen[str]"
    is_plain: bool = True
    "Started with the cluster's own flags and no others."
    is_killed: bool = False
    "The test ended it, or expects it to end."
    plan: Path | None = None
    "What goes wrong on its KV links; an empty plan to begin with."
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def event(self, name: str) -> dict[str, Any]:
        """Waits for the first log line of this name."""

        def find() -> dict[str, Any] | None:
            assert self.popen.poll() is None or self.has_event(name), (
                f"{self.role} ended with {self.popen.returncode}:\n" + "\n".join(self.lines[-15:])
            )
            return next((event for event in self.events if event.get("event") == name), None)

        found: dict[str, Any] = wait_for(f"{self.role} to log {name!r}", find)
        return found

    def has_event(self, name: str) -> bool:
        return any(event.get("event") == name for event in self.events)

    def num_events(self, name: str) -> int:
        return sum(event.get("event") == name for event in self.events)

    def set_plan(self, *rules: dict[str, Any]) -> None:
        """Replaces what goes wrong; what the last plan held goes on its way."""
        assert self.plan is not None
        new = self.plan.with_suffix(".new")
        new.write_text(json.dumps({"seed": 1, "rules": list(rules)}))
        os.replace(new, self.plan)

    def metric(self, name: str, **labels: str) -> float:
        """As the worker's own port shows it, which is there when no router is."""
        url = f"http://127.0.0.1:{self.event('ready')['http_port']}/metrics"
        return _sum_of_samples(httpx.get(url, timeout=30).text, name, labels)

    def engine_pid(self) -> int:
        """The worker's engine process."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0])

    def kill(self) -> None:
        """SIGKILL to the front and its engine, as when a machine dies."""
        self.is_killed = True
        pids = [self.pid]
        with contextlib.suppress(IndexError, OSError):
            pids.append(self.engine_pid())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(PATIENCE_S)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.popen.poll() is None:
            self.popen.terminate()
        return self.popen.wait(30)


class Cluster:
    """Router, workers, and a client. `flags` go to every worker, role flags to those of the role.

    `proxy` comes between the workers and the router; in `plans` each worker gets a fault plan of its own. Workers join
    the router of the cluster `beside` as well.
    """

    def __init__(
        self,
        model: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        router_flags: dict[str, Any] | None = None,
        prefill_flags: dict[str, Any] | None = None,
        decode_flags: dict[str, Any] | None = None,
        proxy: "JoinProxy | None" = None,
        plans: Path | None = None,
        beside: "Cluster | None" = None,
        **flags: Any,
    ) -> None:
        self.model = model
        self._plans = plans
        self._beside = beside
        # Without workers the cluster is just its router; the test adds what it wants.
        self._wanted = {"prefill": prefill, "decode": decode}
        self._flags: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16MiB"} | flags
        self._role_flags = {"prefill": prefill_flags or {}, "decode": decode_flags or {}}
        self._router_flags = {"model": model, "grpc_port": 0, "http_port": 0, "internal_port": 0} | (router_flags or {})
        self._proxy = proxy
        self.workers: list[Process] = []
        self.router = self._start("router", self._router_flags)
        try:
            self._meet_router()
            if prefill or decode:
                self.heal()
        except BaseException:
            self.close()
            raise

    # Processes

    def _start(self, role: str, flags: dict[str, Any]) -> Process:
        module = role if role == "router" else f"{role}_worker"
        command = [sys.executable, "-P", "-m", module]
        environment = os.environ | {"SPLITSERVE_LOG_FORMAT": "json", "SPLITSERVE_TESTING": "1"}
        if self._beside is not None and role != "router":
            command = [sys.executable, "-P", str(Path(__file__).with_name("many_addresses.py")), module]
            environment["ROUTER_ADDRESSES"] = f"{self._internal} {self._beside._internal}"
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        process = Process(role, popen)
        threading.Thread(target=_read_log, args=(process,), daemon=True).start()
        return process

    def _meet_router(self) -> None:
        listening = self.router.event("listening")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{listening['http']}", timeout=30)
        self.target = f"127.0.0.1:{listening['grpc']}"
        self._internal = f"127.0.0.1:{listening['internal']}"
        if self._proxy is not None:
            self._proxy.connect(self._internal)
            self._internal = self._proxy.address
        self.client = Client(self.target, timeout=PATIENCE_S)

    def replace_router(self, **flags: Any) -> None:
        """By one that has these flags as well, on other ports: the proxy leads the workers there."""
        assert self._proxy is not None
        if self.router.popen.poll() is None:
            self.router.kill()
        self.client.close()
        self.http.close()
        self.router = self._start("router", self._router_flags | flags)
        self._meet_router()

    def add(self, role: str, **flags: Any) -> Process:
        """Starts one more worker and returns at once."""
        own: dict[str, Any] = {"model": self.model, "router": self._internal, "http_port": 0}
        plan = None
        if self._plans is not None:
            plan = own["fault_plan"] = self._plans / f"{uuid.uuid4().hex}.json"
            plan.write_text('{"rules": []}')
        process = self._start(role, own | self._flags | self._role_flags[role] | flags)
        process.is_plain, process.plan = not flags, plan
        self.workers.append(process)
        return process

    def of_role(self, role: str) -> list[Process]:
        return [worker for worker in self.workers if worker.role == role and worker.popen.poll() is None]

    def replace_dead(self) -> None:
        """Brings the cluster to what it was made with: dead workers are replaced, extra ones stopped.

        A worker that died although no test killed it has found a fault of ours, such as a block that nobody gave back.
        """
        for worker in self.workers:
            assert worker.is_killed or worker.popen.poll() is None, "\n".join(worker.lines[-15:])
        for role, wanted in self._wanted.items():
            present = self.of_role(role)
            plain = [worker for worker in present if worker.is_plain]
            for extra in [worker for worker in present if worker not in plain[:wanted]]:
                extra.is_killed = True
                extra.stop()
            for _ in range(wanted - len(plain[:wanted])):
                self.add(role)
        self.workers = [worker for worker in self.workers if worker.popen.poll() is None]

    def heal(self) -> None:
        """As `replace_dead`, and waits until all are there."""
        self.replace_dead()
        self.wait_ready(sum(self._wanted.values()))

    def wait_ready(self, num_workers: int) -> None:
        """Until that many workers are joined and each can exchange blocks with every one of the other role."""

        def is_ready() -> bool:
            for worker in self.workers:
                assert worker.is_killed or worker.popen.poll() is None, "\n".join(worker.lines[-15:])
            # One that was just killed may still be listed.
            alive = {worker.pid for worker in self.workers if worker.popen.poll() is None}
            listed = [worker["pid"] for worker in self.state()["workers"]]
            return len(listed) == num_workers and set(listed) <= alive and self.is_linked()

        wait_for(f"{num_workers} linked workers", is_ready)

    def is_linked(self) -> bool:
        """Whether workers of both roles are here, prefill only where it was wanted, and each can exchange blocks with
        every one of the other role."""
        workers = self.state()["workers"]
        prefills = [w for w in workers if w["role"] == "prefill"]
        decodes = {w["id"] for w in workers if w["role"] == "decode"}
        linked = all({i for i, link in w["links"].items() if link["reachable"]} >= decodes for w in prefills)
        return linked and bool(decodes) and (bool(prefills) or not self._wanted["prefill"])

    def close(self) -> None:
        for process in [*self.workers, self.router]:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGINT)
        for process in [*self.workers, self.router]:
            try:
                process.popen.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()

    # Looking

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/cluster").raise_for_status().json()
        return answer

    def workers_of(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.state()["workers"] if worker["role"] == role]

    def process_of(self, worker_id: str) -> Process:
        pid = next(worker["pid"] for worker in self.state()["workers"] if worker["id"] == worker_id)
        return next(process for process in self.workers if process.pid == pid)

    def is_drained(self) -> bool:
        return is_drained(self.state())

    def wait_drained(self) -> None:
        """Workers look through their books when idle and die of a violation: so they must also still be there."""
        try:
            wait_for("drained pools", self.is_drained, 30)
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.state())}") from None

    def kv_bytes(self) -> tuple[int, int]:
        """(sent, received) over all workers since their start."""
        workers = self.state()["workers"]
        return sum(w["kv_bytes_sent"] for w in workers), sum(w["kv_bytes_received"] for w in workers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a router metric's samples that have these labels."""
        return _sum_of_samples(self.http.get("/metrics").text, name, labels)

    def counted(self, metric: str, label: str) -> "Counter[str]":
        """A router's counter by the values of one label."""
        return counted(self.http.get("/metrics").text, metric, label)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Every worker that was there before the body is there after it, and all pools are drained."""
        before = {worker["id"] for worker in self.state()["workers"]}
        yield
        self.wait_drained()
        time.sleep(0.5)  # an idle engine looks through its books within 0.2 s
        after = {worker["id"] for worker in self.state()["workers"]}
        assert before <= after, f"workers were lost: {before - after}"


def is_drained(state: dict[str, Any]) -> bool:
    """As `/cluster` shows it: no block is held anywhere, nothing waits, nothing runs."""
    pool = state["pool"]
    return (
        pool["free"] + pool["cached"] == pool["total"]
        and state["queue"] == {"requests": 0, "prompt_tokens": 0}
        and all(w["running"] == w["waiting"] == w["attempts"] == 0 for w in state["workers"])
    )


def counted(page: str, metric: str, label: str) -> "Counter[str]":
    """A counter of a page of metrics, by the values of one label."""
    counts: Counter[str] = Counter()
    for line in page.splitlines():
        if line.startswith(f"{metric}{{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            counts[value] += int(float(line.rsplit(" ", 1)[1]))
    return counts


def _sum_of_samples(page: str, name: str, labels: dict[str, str]) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


def _read_log(process: Process) -> None:
    assert process.popen.stderr is not None
    for line in process.popen.stderr:
        process.lines.append(line.rstrip())
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                process.events.append(event)
