"""The Docker engine through its SDK: the containers of compose projects, and the three things that are done to them.

The only module that imports the SDK, which is an extra of its own. Every call may raise Unavailable.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from splitserve.cli.scale.replica import ONE_OFF_LABEL, PROJECT_LABEL, SERVICE_LABEL, Replica
from splitserve.service.errors import Internal, Unavailable

_TIMEOUT_S = 30
_NUM_LINES = 20


class DockerEngine:
    """`client` is a docker.DockerClient."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def connect(cls) -> "DockerEngine":
        """To the engine that the docker command would ask: of $DOCKER_HOST, or else of the context in use."""
        try:
            import docker
            from docker.context import ContextAPI
        except ModuleNotFoundError:
            raise Unavailable(
                "scaling a compose project needs the Docker SDK. Install it with: pip install 'splitserve[deploy]'"
            ) from None
        with _errors():
            if os.environ.get("DOCKER_HOST"):
                return cls(docker.from_env(timeout=_TIMEOUT_S))
            context = ContextAPI.get_context(os.environ.get("DOCKER_CONTEXT"))
            if context is None or not context.Host:
                raise Unavailable("docker's context is not known here; `docker context ls` shows those that are")
            tls = context.TLSConfig or False
            is_ssh = context.Host.startswith("ssh://")
            return cls(docker.DockerClient(context.Host, timeout=_TIMEOUT_S, tls=tls, use_ssh_client=is_ssh))

    def replicas(self, *, project: str | None = None, service: str | None = None) -> list[Replica]:
        """Of all projects, or of one; in any state."""
        labels = [f"{ONE_OFF_LABEL}=False", PROJECT_LABEL if project is None else f"{PROJECT_LABEL}={project}"]
        if service is not None:
            labels.append(f"{SERVICE_LABEL}={service}")
        with _errors():
            found = self._client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
            return [Replica.of(container.id, container.attrs) for container in found]

    def start(self, replica: Replica) -> None:
        with _errors():
            self._client.containers.get(replica.id).start()

    def stop_and_remove(self, replica: Replica) -> int | None:
        """Returns when it is gone, with its exit status; None where somebody else has removed it before."""
        import docker.errors

        with _errors():
            try:
                container = self._client.containers.get(replica.id)
                container.stop(timeout=replica.stop_timeout_s)
                container.reload()
                status: int = container.attrs["State"]["ExitCode"]
                container.remove()
            except docker.errors.NotFound:
                return None
            return status

    def lines(self, replica: Replica) -> list[str]:
        """The newest of its output."""
        with _errors():
            output: bytes = self._client.containers.get(replica.id).logs(tail=_NUM_LINES)
        return output.decode(errors="replace").splitlines()


@contextmanager
def _errors() -> Iterator[None]:
    """The SDK's errors, and those of the HTTP library below it, in our words."""
    import docker.errors
    import requests.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        raise Internal(f"the Docker engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise Unavailable(f"no Docker engine answers: {error}") from error
