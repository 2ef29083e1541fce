"""`splitserve scale decode=3`: finds the cluster that is meant, and has it scaled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from splitserve.cli.scale.compose import ComposeProject, compose_projects, run_command
from splitserve.cli.scale.docker_engine import DockerEngine
from splitserve.cli.scale.local import LocalCluster, local_clusters
from splitserve.cli.scale.scalable import Scalable
from splitserve.cli.scale.sockets import runtime_folder
from splitserve.cli.scale.target import parse_target
from splitserve.service.config import Duration
from splitserve.service.errors import InvalidRequest, NotFound, SplitserveError

DEFAULT_TIMEOUT_S = 300.0


def scale(
    *targets: str,
    port: int | None = None,
    compose: bool = False,
    file: Annotated[Sequence[Path], Parameter(alias="-f")] = (),
    project_name: Annotated[str | None, Parameter(alias="-p")] = None,
    timeout: Duration = DEFAULT_TIMEOUT_S,
    no_wait: bool = False,
) -> None:
    """Change the number of workers of a running cluster, each role on its own.

    New workers join by themselves. Of too many the youngest drain: they take no new work, end what they have or hand it
    over, and no request fails. What is scaled is the `splitserve up` of this user on this machine, or else the compose
    project that runs here.

    Parameters
    ----------
    targets
        Role and number: decode=3, prefill=2, or both.
    port
        The local cluster whose router has this gRPC port, where several run.
    compose
        Scale a compose project, even if a local cluster runs as well.
    file
        The project's compose file; repeatable. Default: those that it was started with.
    project_name
        The compose project, where several run.
    timeout
        How long to wait until new workers are ready and others are gone, such as 5m.
    no_wait
        Do not wait for that. A compose project's workers that drain are waited for all the same.
    """
    target = parse_target(targets)
    is_compose = compose or bool(file) or project_name is not None
    if is_compose and port is not None:
        raise InvalidRequest("--port chooses a local cluster, --compose, --file and --project-name a compose project")
    cluster = _compose(list(file), project_name) if is_compose else _find(port)
    print(f"scaling {cluster}", flush=True)  # noqa: T201
    cluster.scale(target, timeout_s=timeout, is_waited_for=not no_wait, say=_say)


def _find(port: int | None) -> Scalable:
    """Raises NotFound or InvalidRequest, and says what runs."""
    running = local_clusters(runtime_folder())
    if port is not None:
        meant = [cluster for cluster in running if cluster.port == port]
        if not meant:
            raise NotFound(f"no local cluster at port {port}. Here run: {_listed(running)}")
        return meant[0]
    if len(running) > 1:
        raise InvalidRequest(f"several clusters run here; choose one with --port: {_listed(running)}")
    if running:
        return running[0]
    try:
        return _compose([], None)
    except SplitserveError as error:
        raise NotFound(f"no `splitserve up` of this user runs here, and no compose project: {error.message}") from error


def _compose(files: Sequence[Path], name: str | None) -> ComposeProject:
    projects = compose_projects(files, name, engine=DockerEngine.connect(), run=run_command)
    if not projects:
        raise NotFound("the Docker engine runs no router with decode workers" + (f" in project {name}" if name else ""))
    if len(projects) > 1:
        raise InvalidRequest(f"several projects run; choose one with --project-name: {_listed(projects)}")
    return projects[0]


def _listed(clusters: Sequence[LocalCluster | ComposeProject]) -> str:
    return "; ".join(map(str, clusters)) or "none"


def _say(text: str) -> None:
    print(f"  {text}", flush=True)  # noqa: T201
