"""`splitserve up`: a whole cluster on this machine, in the foreground. Composition root of the local supervisor."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from splitserve.cli.keeper import Policy
from splitserve.cli.output import Output
from splitserve.cli.placement import usable_cores
from splitserve.cli.roles import Model, Ports, Roles
from splitserve.cli.scale.server import listen_for_scale
from splitserve.cli.setup import Setup
from splitserve.cli.supervisor import Supervisor
from splitserve.cli.up_config import UpConfig
from splitserve.client.channel import DEFAULT_TARGET
from splitserve.service.config import ENVIRONMENT_PREFIX, new_app
from splitserve.service.errors import Unavailable
from splitserve.service.logging import LOG_FORMAT_VARIABLE
from splitserve.service.ports import LOOPBACK, claim

_SERVING_MODULES = ("torch", "transformers", "fastapi", "zmq")

DEFAULT_CONFIG = UpConfig()
DEFAULT_ROLES = Roles()
DEFAULT_POLICY = Policy()


app = new_app("up", "Run a cluster on this machine until Ctrl-C.")


@app.default
def up(config: Annotated[UpConfig, Parameter(name="*")] = DEFAULT_CONFIG) -> int:
    return run_up(config)


def run_up(
    config: UpConfig,
    *,
    roles: Roles = DEFAULT_ROLES,
    policy: Policy = DEFAULT_POLICY,
    locate: Callable[[UpConfig], Model] | None = None,
) -> int:
    """Runs until a signal; returns the exit status. Raises what makes a start impossible."""
    signal.signal(signal.SIGTERM, interrupt)  # until the supervisor's own handlers are there
    try:
        claimed = claim(
            {"--grpc-port": config.grpc_port, "--http-port": config.http_port, "--internal-port": config.internal_port}
        )
        ports = Ports(claimed["--grpc-port"], claimed["--http-port"], claimed["--internal-port"])
        cores = usable_cores("auto" if config.cores == "none" else config.cores)
        model = (locate or locate_once)(config)
        setup = Setup.of(config, roles, model, ports, cores)
        with Output(["splitserve", *(spec.name for spec in setup.specs())], config.log_dir) as output:
            asyncio.run(_supervise(setup, output, policy))
    except KeyboardInterrupt:
        return 0  # it is how `up` is ended, also while a model is still being fetched
    return 0


async def _supervise(setup: Setup, output: Output, policy: Policy) -> None:
    supervisor = Supervisor(
        setup.specs(),
        env=child_environment(),
        url=setup.url,
        sink=output,
        on_ready=lambda: _print_what_next(setup.ports),
        policy=policy,
    )
    output.on_closed = supervisor.request_stop
    await supervisor.run(lambda: listen_for_scale(setup, supervisor, policy.poll_s))


def _print_what_next(ports: Ports) -> None:
    with suppress(BrokenPipeError):  # whoever reads our stderr may not read our stdout
        print(what_next(ports), flush=True)  # noqa: T201


def locate_once(config: UpConfig) -> Model:
    """Fetches and converts once, with a bar to watch, before several processes would all want to."""
    require_serving()
    from splitserve.models.locate import locate_model
    from splitserve.models.progress import progress_bar

    with progress_bar() as progress:
        description = locate_model(
            config.model,
            revision=config.revision,
            progress=progress,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )
    return Model(directory=description.directory, served_name=config.served_model_name or description.name)


def require_serving() -> None:
    """Raises Unavailable where only the client is installed."""
    missing = [name for name in _SERVING_MODULES if find_spec(name) is None]
    if missing:
        raise Unavailable(
            f"this installation cannot serve: no {missing[0]}. Install it with: pip install 'splitserve[serve]'"
        )


def child_environment() -> dict[str, str]:
    """Ours, less what `up` has already turned into flags: its SPLITSERVE_CORES means all workers together."""
    own = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(UpConfig)}
    env = {name: value for name, value in os.environ.items() if name not in own}
    env["PYTHONUNBUFFERED"] = "1"
    # gRPC's core reports every goodbye of a peer on stderr, in a form that is not our log's.
    env.setdefault("GRPC_VERBOSITY", "ERROR")
    if sys.stderr.isatty():
        env.setdefault(LOG_FORMAT_VARIABLE, "console")
    return env


def what_next(ports: Ports) -> str:
    """What to paste into another terminal, where this environment may not be on the path."""
    script = "splitserve"
    if shutil.which(script) is None:
        beside = Path(sys.executable).with_name(script)
        script = str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)
    target = f"localhost:{ports.grpc}"
    target_flag = "" if target == DEFAULT_TARGET else f" --target {target}"
    port_flag = "" if target == DEFAULT_TARGET else f" --port {ports.grpc}"
    url = f"http://{LOOPBACK}:{ports.http}"
    url_flag = "" if ports.http == 8000 else f" --url {url}"
    return (
        "\nThe cluster is ready. In another terminal:\n\n"
        f'  {script} generate "Write a short introduction about the US capital city."{target_flag}\n'
        f"  {script} chat{target_flag}\n"
        f"  {script} status{url_flag}\n"
        f"  {script} scale decode=2{port_flag}\n"
        f"  curl {url}/cluster\n\n"
        "Ctrl-C here ends it.\n"
    )


def interrupt(_signal: int, _frame: object) -> None:
    """A signal handler that makes SIGTERM end things as Ctrl-C does."""
    raise KeyboardInterrupt
