"""A compose project under test: its own name, its own ports, its own volume, and nothing of it left afterwards."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
IMAGE = "splitserve:e2e"
PATIENCE_S = 60.0
COMMAND_TIMEOUT_S = 900.0
# The wheel of torch that pip has on this machine without asking an index, if it has one, spares the build a download.
_LOCAL_TORCH = (
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-index",
    "--no-deps",
    "--constraint",
    "constraints.txt",
    "torch",
)


@dataclass
class Project:
    """`wheels` is an empty folder that the build may look into for wheels."""

    wheels: Path
    name: str = field(default_factory=lambda: f"splitserve-e2e-{uuid.uuid4().hex[:8]}")

    def compose(self, *args: str, check: bool = True) -> str:
        """Runs `docker compose` and returns what it wrote to stdout; a failure shows both streams."""
        files = ("--file", "compose.yaml", "--file", "tests/e2e/compose.override.yaml")
        done = subprocess.run(
            ["docker", "compose", "--ansi", "never", "--project-name", self.name, *files, *args],
            cwd=ROOT,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"docker compose {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """The caller's, less its settings of splitserve: what is tested is the file's own defaults."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLITSERVE_")}
        # Port 0: the engine chooses, so that a cluster that runs here already is not in the way.
        own = {"SPLITSERVE_IMAGE": IMAGE, "SPLITSERVE_GRPC_PORT": "0", "SPLITSERVE_HTTP_PORT": "0"}
        return kept | own | {"SPLITSERVE_TEST_WHEELS": str(self.wheels)}

    # Steps

    def build(self) -> None:
        # Without such a wheel this fails and leaves the folder empty: the build then asks the index.
        subprocess.run([sys.executable, *_LOCAL_TORCH, "--dest", str(self.wheels)], cwd=ROOT, capture_output=True)
        self.compose("build", "model")

    def fill_cache(self) -> None:
        """Copies the default model from this machine's cache: containers may have no way to the internet."""
        fetch = [sys.executable, "-P", "-m", "splitserve.models", "fetch"]
        directory = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        models = "/var/cache/splitserve/models"
        copy = f"mkdir -p {models} && cp -R /from {models}/{Path(directory).name}"
        mount = f"{directory}:/from:ro"
        self.compose("run", "--rm", "--no-deps", "-T", "--volume", mount, "--entrypoint", "sh", "model", "-c", copy)

    def up(self, *args: str) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", "240", "--no-build", *args)

    def scale(self, *words: str) -> str:
        """What `splitserve scale` writes, as a user of this project runs it, in any folder; it must end well."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "splitserve", "scale", *words, "--project-name", self.name],
            cwd=self.wheels,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--rmi", "all")

    # Views

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "50", check=False)

    def published(self, port: int) -> str:
        """HOST:PORT where a port of the router can be reached from here."""
        return self.compose("port", "router", str(port)).strip()

    def cluster(self) -> dict[str, Any]:
        answer = httpx.get(f"http://{self.published(8000)}/cluster", trust_env=False)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.cluster()["workers"] if worker["role"] == role]


def eventually(what: str, holds: Callable[[], bool]) -> None:
    """Waits until `holds`: load and links reach the router a moment after they change."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.2)
