"""A cluster of real processes on this machine, for as long as a benchmark needs it: `splitserve up` as a child."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from splitserve.service.errors import Internal, Unavailable
from splitserve.service.ports import LOOPBACK, claim

_POLL_S = 0.2
_STOP_S = 20.0
_IDLE_S = 30.0


@dataclass(frozen=True)
class LocalCluster:
    target: str  # the router's gRPC address
    url: str  # its HTTP address

    def state(self) -> dict[str, Any]:
        """The body of /cluster."""
        body: dict[str, Any] = _get(f"{self.url}/cluster").raise_for_status().json()
        return body

    def idle_state(self) -> dict[str, Any]:
        """The same once no worker holds a block for a request: what workers count arrives a moment after the answers.

        Raises Internal when they go on holding some.
        """
        deadline = time.monotonic() + _IDLE_S
        while (state := self.state())["pool"]["in_use"] + state["pool"]["reserved"] > 0:
            if time.monotonic() > deadline:
                raise Internal(f"blocks are still held {_IDLE_S:g} s after the last answer: {state['pool']}")
            time.sleep(_POLL_S)
        return state


@contextmanager
def local_cluster(model: Path, flags: Mapping[str, object], log_file: Path, ready_s: float) -> Iterator[LocalCluster]:
    """A cluster that serves `model`, ready on entry and gone on exit. `flags` are those of `splitserve up`.

    What its processes write goes to `log_file`. Raises Internal with its last line when it ends before it is ready, and
    Unavailable when it takes longer than `ready_s`.
    """
    ports = claim({"--grpc-port": 0, "--http-port": 0, "--internal-port": 0})
    command = [sys.executable, "-P", "-m", "splitserve", "up", "--model", str(model)]
    for flag, value in {**ports, **flags}.items():
        command += [flag, str(value)]
    cluster = LocalCluster(f"{LOOPBACK}:{ports['--grpc-port']}", f"http://{LOOPBACK}:{ports['--http-port']}")
    with log_file.open("wb") as log:
        # In a session of its own: Ctrl-C reaches this process, which then ends it.
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _await_ready(cluster, process, log_file, ready_s)
        yield cluster
    finally:
        _stop(process)


def _await_ready(cluster: LocalCluster, process: subprocess.Popen[bytes], log_file: Path, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while not _is_ready(cluster):
        if process.poll() is not None:
            raise Internal(f"the cluster ended before it was ready: {last_line(log_file)}")
        if time.monotonic() > deadline:
            raise Unavailable(f"the cluster was not ready within {ready_s:g} s: {last_line(log_file)}")
        time.sleep(_POLL_S)


def _is_ready(cluster: LocalCluster) -> bool:
    try:
        return _get(f"{cluster.url}/health/ready").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10.0, trust_env=False)  # loopback: no proxy of the environment has a say


def last_line(log_file: Path) -> str:
    """The last one that says something; for a process that ended."""
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children see the end of their pipe, and end themselves
        process.wait()
