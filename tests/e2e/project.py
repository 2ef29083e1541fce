"""A compose project under test: its own name, its own ports, its own volumes, and nothing of it left afterwards."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
IMAGE = "splitserve:e2e"
OBSERVABILITY = ("compose.observability.yaml", "tests/e2e/prometheus.override.yaml")
"""The files that bring Prometheus besides."""
DEFAULTS: Mapping[str, str] = {}
PATIENCE_S = 120.0
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
    """`wheels` and `prometheus` are empty folders: the build may look into the one for wheels, the other is for that
    program."""

    wheels: Path
    prometheus: Path
    name: str = field(default_factory=lambda: f"splitserve-e2e-{uuid.uuid4().hex[:8]}")

    def compose(
        self, *args: str, also: tuple[str, ...] = (), check: bool = True, settings: Mapping[str, str] = DEFAULTS
    ) -> str:
        """Runs `docker compose`, with these files `also` and these variables, and returns what it wrote to stdout; a
        failure shows both streams."""
        files = ("compose.cpu.yaml", "tests/e2e/compose.override.yaml", *also)
        named = [word for file in files for word in ("--file", file)]
        words = ("compose", "--ansi", "never", "--project-name", self.name, *named, *args)
        return self.docker(*words, check=check, settings=settings)

    def docker(
        self, *args: str, check: bool = True, errors: bool = False, settings: Mapping[str, str] = DEFAULTS
    ) -> str:
        """What a command wrote to stdout, with `errors` also what it wrote to stderr."""
        done = subprocess.run(
            ["docker", *args],
            cwd=ROOT,
            env=self._environment() | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"docker {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + (done.stderr if errors else "")

    def _environment(self) -> dict[str, str]:
        """The caller's, less its settings of splitserve: what is tested is the file's own defaults."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLITSERVE_")}
        # Port 0: the engine chooses, so that a cluster that runs here already is not in the way.
        own = {"SPLITSERVE_IMAGE": IMAGE, "SPLITSERVE_GRPC_PORT": "0", "SPLITSERVE_HTTP_PORT": "0"}
        folders = {"SPLITSERVE_TEST_WHEELS": str(self.wheels), "SPLITSERVE_TEST_PROMETHEUS": str(self.prometheus)}
        return kept | own | folders

    # Steps

    def build(self) -> None:
        # Without such a wheel this fails and leaves the folder empty: the build then asks the index.
        subprocess.run([sys.executable, *_LOCAL_TORCH, "--dest", str(self.wheels)], cwd=ROOT, capture_output=True)
        self.compose("build", "model")

    def fill_cache(self) -> None:
        """Copies the default model from this machine's cache: containers may have no way to the internet."""
        directory = model_directory()
        models = "/var/cache/splitserve/models"
        copy = f"mkdir -p {models} && cp -R /from {models}/{directory.name}"
        mount = f"{directory}:/from:ro"
        self.compose("run", "--rm", "--no-deps", "-T", "--volume", mount, "--entrypoint", "sh", "model", "-c", copy)

    def up(self, *args: str, settings: Mapping[str, str] = DEFAULTS) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", "480", "--no-build", *args, settings=settings)

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        """One more container in the network of the cluster."""
        words = ("--detach", "--rm", "--init", "--network", f"{self.name}_cluster", "--entrypoint", "sleep")
        container = self.docker("run", *words, IMAGE, "600").strip()
        try:
            yield
        finally:
            self.docker("rm", "--force", container)

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
        self.compose("down", "--volumes", "--remove-orphans", "--rmi", "all", also=OBSERVABILITY)

    # Views

    def logs(self, num_lines: str = "50") -> str:
        return self.compose("logs", "--no-color", "--tail", num_lines, check=False)

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """As `docker compose ps` has them, ended ones too, by service and number."""
        lines = self.compose("ps", "--all", "--format", "json", *services).splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda container: str(container["Name"]))

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

    def counts(self) -> dict[str, int]:
        """Workers that are ready, by role."""
        ready = [worker["role"] for worker in self.cluster()["workers"] if worker["state"] == "ready"]
        return {role: ready.count(role) for role in ("prefill", "decode")}

    def is_healthy(self) -> bool:
        """By the health checks of the compose file, of every container that runs."""
        running = [container for container in self.containers() if container["State"] == "running"]
        return all(container["Health"] == "healthy" for container in running)

    def is_drained(self) -> bool:
        """No block is held anywhere, nothing waits, nothing runs."""
        state = self.cluster()
        pool, workers = state["pool"], state["workers"]
        idle = all(worker["running"] == worker["waiting"] == worker["attempts"] == 0 for worker in workers)
        return idle and not state["queue"]["requests"] and pool["free"] + pool["cached"] == pool["total"]


def model_directory() -> Path:
    """The default model on this machine."""
    fetch = [sys.executable, "-P", "-m", "splitserve.models", "fetch"]
    return Path(subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def eventually(what: str, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits until `holds`: load and links reach the router a moment after they change. A router that does not answer
    holds nothing."""
    deadline = time.monotonic() + patience_s
    while not _answers(holds):
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.2)


def _answers(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except httpx.TransportError:
        return False
