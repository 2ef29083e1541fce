"""`splitserve up` as a user runs it: one process that starts the others, ended by one SIGINT."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cluster.harness import wait_for

COMMAND = (sys.executable, "-P", "-m", "splitserve")


@dataclass
class Up:
    """A running cluster; `log` is all that its processes write, `env` what other commands need to find it."""

    target: str
    url: str
    log: Path
    env: Mapping[str, str]


@contextmanager
def up(log: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Up]:
    """Ready on entry; on exit it has ended as it should."""
    grpc_port, http_port, internal_port = _free_ports(3)
    ports = [f"--grpc-port={grpc_port}", f"--http-port={http_port}", f"--internal-port={internal_port}"]
    # Of its own: nobody else's `splitserve scale` finds the cluster. Short: a socket's path may not be long.
    runtime_dir = tempfile.TemporaryDirectory(prefix="ss-")
    environment = os.environ | {"SPLITSERVE_RUNTIME_DIR": runtime_dir.name} | (env or {})
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, "up", *flags, *ports], stderr=file, stdout=file, text=True, env=environment
        )
    url = f"http://127.0.0.1:{http_port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for("the cluster to be ready", is_ready)
        yield Up(f"127.0.0.1:{grpc_port}", url, log, environment)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(15)
        runtime_dir.cleanup()
    assert status == 0, log.read_text()[-3000:]


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return ports
