"""One container of a compose project, as the Docker engine describes it. Plain data, read from its inspection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.service.config import EXIT_CONFIG, EXIT_TEMPORARY

_LABEL = "com.docker.compose."
PROJECT_LABEL, SERVICE_LABEL, ONE_OFF_LABEL = f"{_LABEL}project", f"{_LABEL}service", f"{_LABEL}oneoff"
_DEFAULT_STOP_TIMEOUT_S = 10  # the engine's
_OVER = ("exited", "dead")


@dataclass(frozen=True, slots=True)
class Replica:
    """`config_hash` is equal for containers that compose made from equal settings. `health` is None where no check is
    defined. `stop_timeout_s`: from SIGTERM to SIGKILL."""

    id: str
    name: str
    project: str
    service: str
    number: int
    created: str
    status: str
    health: str | None
    exit_code: int
    config_hash: str
    stop_timeout_s: int
    words: tuple[str, ...]
    "What it runs, less the entry point."
    environment: Mapping[str, str]
    labels: Mapping[str, str]

    @classmethod
    def of(cls, container_id: str, attributes: Mapping[str, Any]) -> "Replica":
        """`attributes` are those of `docker inspect`."""
        config, state = attributes["Config"], attributes["State"]
        labels = config.get("Labels") or {}
        timeout = config.get("StopTimeout")
        return cls(
            id=container_id,
            name=attributes["Name"].removeprefix("/"),
            project=labels.get(PROJECT_LABEL, ""),
            service=labels.get(SERVICE_LABEL, ""),
            number=int(labels.get(f"{_LABEL}container-number", "0")),
            created=attributes["Created"],
            status=state["Status"],
            health=(state.get("Health") or {}).get("Status"),
            exit_code=state.get("ExitCode", 0),
            config_hash=labels.get(f"{_LABEL}config-hash", ""),
            stop_timeout_s=_DEFAULT_STOP_TIMEOUT_S if timeout is None else timeout,
            words=tuple(config.get("Cmd") or ()),
            environment=dict(line.partition("=")[::2] for line in config.get("Env") or ()),
            labels=labels,
        )

    @property
    def is_over(self) -> bool:
        return self.status in _OVER

    @property
    def is_up(self) -> bool:
        """It runs, or the engine is about to start it again."""
        return not self.is_over and self.status != "created"

    @property
    def is_ready(self) -> bool:
        return self.status == "running" and self.health in ("healthy", None)

    @property
    def has_failed(self) -> bool:
        """Of one that has not been ready: its start failed, and another one would end alike."""
        return self.health == "unhealthy" or (not self.is_ready and self.exit_code in (EXIT_CONFIG, EXIT_TEMPORARY))

    @property
    def state(self) -> str:
        """Such as "running, starting" or "exited, status 3"."""
        if self.status == "running":
            return f"running, {self.health}" if self.health else "running"
        return f"{self.status}, status {self.exit_code}" if self.exit_code else self.status

    def has_option(self, name: str, value: str) -> bool:
        """Whether the process was given this setting, as a flag or in its environment."""
        if self.environment.get(f"SPLITSERVE_{name.upper().replace('-', '_')}") == value:
            return True
        flag = f"--{name}"
        return f"{flag}={value}" in self.words or (flag, value) in zip(self.words, self.words[1:], strict=False)

    def listed(self, label: str) -> list[str]:
        """The parts of one of compose's own labels about the project, such as "config_files"."""
        return [part for part in self.labels.get(f"{PROJECT_LABEL}.{label}", "").split(",") if part]


def surplus(replicas: Sequence[Replica], target: int) -> list[Replica]:
    """Which to take away so that `target` are left: first what serves nobody, then the youngest."""
    by_use = sorted(replicas, key=lambda replica: (replica.created, replica.number), reverse=True)
    by_use.sort(key=lambda replica: replica.is_ready)
    return by_use[: max(0, len(replicas) - target)]
