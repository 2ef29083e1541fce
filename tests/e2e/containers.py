"""One container of a project: which worker is in it, what a test does to it, and whether it was started anew."""

import json
import time
from dataclasses import dataclass
from typing import Any

from tests.e2e.project import Project

# Sends a signal to a container's router or worker, the grandchild of init, or to the engine, the child of that one.
_SIGNAL = """
import os, pathlib, signal, sys
def child_of(parent):
    return int(pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
main = child_of(child_of(1))
os.kill(main if sys.argv[1] == "main" else child_of(main), signal.Signals[sys.argv[2]])
"""


@dataclass(frozen=True)
class Container:
    project: Project
    id: str
    service: str

    @classmethod
    def of(cls, project: Project, service: str, index: int = 0) -> "Container":
        return cls(project, project.containers(service)[index]["ID"], service)

    # Views

    def _inspect(self) -> dict[str, Any]:
        (found,) = json.loads(self.project.docker("inspect", self.id))
        return dict(found)

    @property
    def started(self) -> tuple[str, int]:
        """Another value after every start."""
        found = self._inspect()
        return found["State"]["StartedAt"], found["RestartCount"]

    @property
    def address(self) -> str:
        """In the network of the cluster."""
        return str(self._inspect()["NetworkSettings"]["Networks"][self._cluster]["IPAddress"])

    @property
    def health(self) -> str:
        return str(self._inspect()["State"]["Health"]["Status"])

    def healths(self, since: float) -> list[str]:
        """What its health became, in order, since that time."""
        span = ("--since", f"{since:.3f}", "--until", f"{time.time():.3f}")
        filters = ("--filter", f"container={self.id}", "--filter", "event=health_status")
        lines = self.project.docker("events", *span, *filters, "--format", "{{.Action}}").splitlines()
        return [line.removeprefix("health_status: ") for line in lines]

    @property
    def exit_status(self) -> int:
        return int(self._inspect()["State"]["ExitCode"])

    @property
    def worker_id(self) -> str:
        """As the log of its last start names it; "" before."""
        ready = [line for line in self.logs.splitlines() if '"worker_id"' in line and '"ready"' in line]
        return str(json.loads(ready[-1])["worker_id"]) if ready else ""

    @property
    def logs(self) -> str:
        """Of all its starts."""
        return self.project.docker("logs", self.id, errors=True)

    def worker(self) -> dict[str, Any] | None:
        """As /cluster shows it; None while it has not joined."""
        own = self.worker_id
        return next((worker for worker in self.project.cluster()["workers"] if worker["id"] == own), None)

    @property
    def is_joined(self) -> bool:
        return self.worker() is not None

    # What happens to it

    def kill(self) -> None:
        """As if the engine's host had lost it: Docker itself does not start it again."""
        self.project.docker("kill", self.id)

    def crash(self) -> None:
        """Its process dies, so Docker starts it again."""
        # The container's end takes this command with it, before or after it has seen its own success.
        self.project.docker("exec", self.id, "python", "-c", _SIGNAL, "main", "SIGKILL", check=False)

    def freeze_engine(self) -> None:
        self.project.docker("exec", self.id, "python", "-c", _SIGNAL, "engine", "SIGSTOP")

    def start(self) -> None:
        self.project.docker("start", self.id)

    def stop(self) -> None:
        """With the grace that the compose file gives."""
        self.project.docker("stop", self.id)

    def pause(self) -> None:
        self.project.docker("pause", self.id)

    def unpause(self) -> None:
        self.project.docker("unpause", self.id)

    def disconnect(self) -> None:
        self.project.docker("network", "disconnect", self._cluster, self.id)

    def connect(self) -> None:
        """As compose connects it, under the names by which others find it."""
        names = [self.service, *(["router-on-cluster"] if self.service == "router" else [])]
        aliases = [word for name in names for word in ("--alias", name)]
        self.project.docker("network", "connect", *aliases, self._cluster, self.id)

    @property
    def _cluster(self) -> str:
        return f"{self.project.name}_cluster"
