"""What else is built and composed: an image with its model, and the files for GPUs, which need none to be read."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.project import ROOT, Project, eventually, model_directory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

GPU_ROLES = ("prefill", "decode")


@pytest.fixture
def baked(project: Project) -> Iterator[str]:
    """The image with the default model of this machine in it."""
    tag = "splitserve:e2e-baked"
    bases = ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"] if "BASE_IMAGE" in os.environ else []
    contexts = [f"model={model_directory()}", f"wheels={project.wheels}"]
    named = [word for context in contexts for word in ("--build-context", context)]
    project.docker("build", "--network", "host", "--target", "baked", "--tag", tag, *bases, *named, str(ROOT))
    yield tag
    project.docker("rmi", tag)


def test_image_with_its_model_needs_a_network(project: Project, baked: str) -> None:
    name = f"{project.name}-baked-{uuid.uuid4().hex[:8]}"
    walls = ("--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--init")
    project.docker("run", "--detach", "--name", name, *walls, "--entrypoint", "splitserve", baked, "up")
    try:
        status = ("exec", name, "splitserve", "status", "--json")

        def is_ready() -> bool:
            shown = project.docker(*status, check=False)
            return bool(shown) and bool(json.loads(shown)["ready"])

        # Its cache is empty: kernels are compiled first.
        eventually("the cluster in it is ready", is_ready, patience_s=480)
        assert json.loads(project.docker(*status))["model"] == "SmolLM2-135M-Instruct"
        asked = ("What is the capital of France?", "--quiet", "--max-tokens", "32", "--temperature", "0")
        assert "Paris" in project.docker("exec", name, "splitserve", "generate", *asked)
    except AssertionError as error:
        with contextlib.suppress(AssertionError):
            error.add_note(project.docker("logs", "--tail", "30", name, errors=True))
        raise
    finally:
        project.docker("rm", "--force", "--volumes", name)


def read(project: Project, *files: str, **settings: str) -> dict[str, Any]:
    """The services of these files as the engine would get them, with these variables."""
    named = [word for file in files for word in ("--file", file)]
    return dict(json.loads(project.docker("compose", *named, "config", "--format", "json", settings=settings)))


def test_file_for_gpus_gives_none_or_lets_two_workers_take_one(project: Project) -> None:
    whole = read(project, "compose.yaml")
    assert whole == read(project), "it is not the file that `docker compose up` takes"
    for role in GPU_ROLES:
        service = whole["services"][role]
        assert service["deploy"]["resources"]["reservations"]["devices"] == [
            {"capabilities": ["gpu"], "driver": "nvidia", "count": -1}
        ]
        assert service["environment"]["SPLITSERVE_DEVICE"] == "cuda"
        assert service["environment"]["NCCL_HOSTID"]
        assert service["environment"]["NCCL_CUMEM_ENABLE"] == "0"
        locks = service["environment"]["SPLITSERVE_DEVICE_LOCKS"]
        assert {"device-locks": locks, "shm": "/dev/shm"}.items() <= {
            volume["source"]: volume["target"] for volume in service["volumes"]
        }.items()
    assert whole["volumes"]["device-locks"]["name"] == "splitserve-device-locks"
    assert whole["services"]["decode"]["deploy"]["replicas"] == 2
    assert whole["services"]["model"]["build"]["target"] == "cuda"


def test_file_for_gpus_lacks_what_the_one_for_processors_has(project: Project) -> None:
    cuda, cpu = (read(project, file)["services"] for file in ("compose.yaml", "compose.cpu.yaml"))
    for name, service in cpu.items():
        for key in service.keys() - {"image", "build", "environment", "volumes", "deploy"}:
            assert cuda[name][key] == service[key], (name, key)
        assert service.get("environment", {}).keys() <= cuda[name].get("environment", {}).keys()


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cpu.yaml"])
def test_router_or_worker_has_a_way_to_the_internet(project: Project, file: str) -> None:
    whole = read(project, file, "compose.observability.yaml")
    masquerade = "com.docker.network.bridge.enable_ip_masquerade"
    open_networks = {
        name
        for name, network in whole["networks"].items()
        if not network.get("internal") and (network.get("driver_opts") or {}).get(masquerade) != "false"
    }
    assert open_networks == {"internet"}
    services = whole["services"].items()
    assert {name for name, service in services if set(service.get("networks") or ()) & open_networks} == {"model"}


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cpu.yaml"])
def test_api_is_published_elsewhere_than_asked(project: Project, file: str) -> None:
    asked = {"SPLITSERVE_PUBLISH": "0.0.0.0", "SPLITSERVE_GRPC_PORT": "1", "SPLITSERVE_HTTP_PORT": "2"}
    services = read(project, file, **asked)["services"]
    published = {
        (name, port["host_ip"], port["published"], port["target"])
        for name, service in services.items()
        for port in service.get("ports", ())
    }
    assert published == {("router", "0.0.0.0", "1", 50051), ("router", "0.0.0.0", "2", 8000)}


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cpu.yaml"])
def test_observability_does_not_fit_to_the_file(project: Project, file: str) -> None:
    services = read(project, file, "compose.observability.yaml")["services"]
    for service in (services["prometheus"], services["grafana"]):
        for volume in service["volumes"]:
            assert volume["type"] == "volume" or Path(volume["source"]).is_file()
    assert set(services["prometheus"]["networks"]) == {"cluster", "observability"}
    assert set(services["grafana"]["networks"]) == {"observability"}
