"""A Docker engine for tests: containers as the SDK shows them, and a compose command that makes them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors

MODULES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker", "model": "splitserve.models"}
NOW = "2026-01-01T00:00:{:02d}Z"


class FakeContainer:
    """`fate`: the state that it has once it was started and `reload`ed, as the engine's words and health's."""

    def __init__(self, engine: "FakeDocker", service: str, number: int, project: str, **attributes: Any) -> None:
        self._engine = engine
        self.id = f"{project}-{service}-{number}-{len(engine.log)}-{engine.num_made}"
        self.fate: tuple[str, str | None, int] = attributes.pop("fate", ("running", "healthy", 0))
        self.exit_status = 0
        words = attributes.pop("words", [MODULES[service]])
        labels = {
            "com.docker.compose.project": project,
            "com.docker.compose.service": service,
            "com.docker.compose.oneoff": attributes.pop("oneoff", "False"),
            "com.docker.compose.container-number": str(number),
            "com.docker.compose.config-hash": attributes.pop("config_hash", "h"),
            "com.docker.compose.project.config_files": ",".join(map(str, engine.files)),
            "com.docker.compose.project.working_dir": str(engine.folder),
        }
        self.attrs: dict[str, Any] = {
            "Name": f"/{project}-{service}-{number}",
            "Created": NOW.format(engine.num_made),
            "State": {"Status": "created", "ExitCode": 0},
            "Config": {
                "Labels": labels | attributes.pop("labels", {}),
                "Cmd": words,
                "Env": attributes.pop("env", ["SPLITSERVE_MODEL=m"]),
                "StopTimeout": attributes.pop("stop_timeout", 20),
            },
        }
        assert not attributes, attributes

    @property
    def name(self) -> str:
        return str(self.attrs["Name"][1:])

    def start(self) -> None:
        self._engine.log.append(f"start {self.name}")
        self._enter_fate()

    def _enter_fate(self) -> None:
        status, health, exit_code = self.fate
        self.attrs["State"] = {"Status": status, "ExitCode": exit_code}
        if health is not None:
            self.attrs["State"]["Health"] = {"Status": health}

    def stop(self, timeout: int) -> None:
        self._engine.find(self)
        self._engine.log.append(f"stop {self.name} within {timeout}")
        self.attrs["State"] = {"Status": "exited", "ExitCode": self.exit_status}

    def reload(self) -> None:
        self._engine.find(self)

    def remove(self) -> None:
        self._engine.find(self)
        self._engine.log.append(f"remove {self.name}")
        self._engine.present.remove(self)

    def logs(self, tail: int) -> bytes:
        return b"first\nno GPU is left\n"


class FakeDocker:
    """Is the SDK's client and, as `run`, the compose command. `log` has what was done, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [folder / "compose.yaml"]
        self.files[0].touch()
        self.log: list[str] = []
        self.commands: list[list[str]] = []
        self.num_made = 0
        self.present: list[FakeContainer] = []
        self.made_like: dict[str, Any] = {}
        "What containers that compose makes from now on have of their own."
        self.containers = SimpleNamespace(list=self._list, get=self._get)

    def add(self, service: str, number: int, project: str = "splitserve", **attributes: Any) -> FakeContainer:
        """A container that runs."""
        container = self._make(service, number, project, **attributes)
        container._enter_fate()
        return container

    def _make(self, service: str, number: int, project: str, **attributes: Any) -> FakeContainer:
        self.num_made += 1
        container = FakeContainer(self, service, number, project, **attributes)
        self.present.append(container)
        return container

    def names(self, service: str, project: str = "splitserve") -> list[str]:
        names = [container.name for container in self.present]
        return sorted(name for name in names if name.startswith(f"{project}-{service}-"))

    def find(self, container: FakeContainer) -> FakeContainer:
        if container not in self.present:
            raise docker.errors.NotFound("no such container")
        return container

    def _get(self, container_id: str) -> FakeContainer:
        for container in self.present:
            if container.id == container_id:
                return container
        raise docker.errors.NotFound("no such container")

    def _list(self, *, all: bool, filters: dict[str, list[str]], ignore_removed: bool) -> list[FakeContainer]:
        assert all
        assert ignore_removed
        return [container for container in self.present if all_labels(container, filters["label"])]

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """`docker compose … up --no-start --scale ROLE=N ROLE`: up to N containers, of the smallest free numbers."""
        words = list(command)
        self.commands.append(words)
        role = words[-1]
        wanted = int(words[words.index("--scale") + 1].removeprefix(f"{role}="))
        project = words[words.index("--project-name") + 1]
        taken = {int(name.rsplit("-", 1)[1]) for name in self.names(role, project)}
        for number in range(1, wanted + 1):
            if number not in taken and len(self.names(role, project)) < wanted:
                self._make(role, number, project, **self.made_like)


def all_labels(container: FakeContainer, wanted: list[str]) -> bool:
    labels = container.attrs["Config"]["Labels"]
    parts = [word.partition("=") for word in wanted]
    return all(labels.get(name) == value if equals else name in labels for name, equals, value in parts)
