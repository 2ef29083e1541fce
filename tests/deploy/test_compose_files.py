"""What a compose file would ask of a router or worker that does not know it, or leave open that should be closed."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import RouterConfig
from splitserve.service.config import ENVIRONMENT_PREFIX, parse_duration
from splitserve.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
CONFIGS = {"router": RouterConfig, "prefill": WorkerConfig, "decode": WorkerConfig}
# Of what is stopped, how long it may take beyond its drain: see docs/api.md.
FAREWELL_S = 6.0


def services(name: str) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"]
    return loaded


def default_of(value: str) -> str:
    """What "${NAME:-default}" is when nobody sets it."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


@pytest.mark.parametrize("file", ["compose.cpu.yaml", "compose.yaml"])
@pytest.mark.parametrize("role", CONFIGS)
def test_setting_is_not_known_to_the_process(file: str, role: str) -> None:
    known = {f"{ENVIRONMENT_PREFIX}{field.name.upper()}" for field in dataclasses.fields(CONFIGS[role])}
    asked = services(file)[role].get("environment", {})
    assert {name for name in asked if name.startswith(ENVIRONMENT_PREFIX)} <= known


@pytest.mark.parametrize("role", CONFIGS)
def test_container_is_killed_while_it_drains(role: str) -> None:
    grace = parse_duration(default_of(services("compose.cpu.yaml")[role]["stop_grace_period"]))
    assert grace > CONFIGS[role]().drain_timeout + FAREWELL_S


@pytest.mark.parametrize("file", ["compose.cpu.yaml", "compose.observability.yaml"])
def test_container_may_do_more_than_it_needs(file: str) -> None:
    for name, service in services(file).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "cap_add", "pid", "ipc"}, name


def test_port_is_open_to_other_machines() -> None:
    published = {
        name: [default_of(port) for port in service["ports"]]
        for file in ("compose.cpu.yaml", "compose.yaml", "compose.observability.yaml")
        for name, service in services(file).items()
        if "ports" in service
    }
    assert published == {
        "router": ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_images_with_a_gpu_lack_a_service() -> None:
    """Each one is the processors' with the image for CUDA, so that a change of one file is one of both."""
    cpu, cuda = services("compose.cpu.yaml"), services("compose.yaml")
    assert cuda.keys() == cpu.keys()
    for name, service in cuda.items():
        assert service["extends"] == {"file": "compose.cpu.yaml", "service": name}
        assert default_of(service["image"]) == "splitserve:cuda"
