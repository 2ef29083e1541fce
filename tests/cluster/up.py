"""`splitserve up` as a user runs it: one process that starts the others, ended by one SIGINT."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cluster.harness import wait_for

COMMAND = (sys.executable, "-P", "-m", "splitserve")


@dataclass
class Up:
    """A running cluster; `log` is all that its processes write."""

    target: str
    url: str
    log: Path


@contextmanager
def up(log: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Up]:
    """Ready on entry; on exit it has ended as it should."""
    grpc_port, http_port, internal_port = _free_ports(3)
    ports = [f"--grpc-port={grpc_port}", f"--http-port={http_port}", f"--internal-port={internal_port}"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, "up", *flags, *ports], stderr=file, stdout=file, text=True, env=os.environ | (env or {})
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
        yield Up(f"127.0.0.1:{grpc_port}", url, log)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(15)
    assert status == 0, log.read_text()[-3000:]


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return ports
