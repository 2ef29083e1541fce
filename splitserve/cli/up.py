"""`splitserve up`: a whole cluster on this machine, in the foreground. Composition root of the local supervisor."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from splitserve.cli.output import Output
from splitserve.cli.placement import Placement, place, usable_cores
from splitserve.cli.roles import ChildSpec, Model, Ports, Roles, router_spec, worker_specs
from splitserve.cli.supervisor import Policy, Supervisor
from splitserve.client.channel import DEFAULT_TARGET
from splitserve.service.config import ENVIRONMENT_PREFIX, Device, NonNegative, Positive, Size, new_app
from splitserve.service.errors import Unavailable
from splitserve.service.logging import LOG_FORMAT_VARIABLE
from splitserve.service.ports import LOOPBACK, claim

_SERVING_MODULES = ("torch", "transformers", "fastapi", "zmq")
_WORKER_FLAGS = (
    "dtype",
    "device",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "kv_cache_memory",
    "kv_transport",
    "threads",
    "trust_remote_code",
    "allow_pickle",
)

DEFAULT_ROLES = Roles()
DEFAULT_POLICY = Policy()


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """What is left out takes the worker's own default (`python -m decode_worker --help` shows them).

    Settings of router and workers that have no flag here reach them through the environment, as SPLITSERVE_*.
    """

    model: str | None = None
    "Hugging Face repo id, local directory, or GGUF file; default: SmolLM2-135M-Instruct."
    revision: str | None = None
    "Branch, tag or commit of a Hugging Face repo."
    served_model_name: str | None = None
    "The name that requests use; default: the model's own."
    prefill: NonNegative = 1
    "Number of prefill workers; 0: the aggregated mode, in which decode workers compute prompts themselves."
    decode: Positive = 1
    "Number of decode workers."
    split_threshold: NonNegative | None = None
    "A prompt of at most this many tokens is computed by its decode worker; default 0: none, beside prefill workers."
    cores: str = "auto"
    "Processor cores that the workers share out, such as 0,2-3; auto: all; none: nothing is pinned."
    grpc_port: int = 50051
    "Router's gRPC port; 0 picks a free one."
    http_port: int = 8000
    "Router's HTTP port; 0 picks a free one."
    internal_port: int = 50052
    "Router's port for workers; 0 picks a free one."
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    "auto: bfloat16 where the device has bfloat16 units, else float32."
    device: Device | None = None
    "auto, cpu, cuda or cuda:N, for every worker; auto: the first CUDA device, or the processor where there is none."
    block_size: Positive | None = None
    "Tokens in one KV block."
    max_model_len: Positive | None = None
    "Largest prompt + output in tokens; default: the model's context."
    max_num_seqs: Positive | None = None
    "Sequences that run at once on a worker."
    max_num_batched_tokens: Positive | None = None
    "Tokens that one step computes at most."
    long_prefill_token_threshold: Positive | None = None
    "A longer prompt gets this many tokens of a step while others wait; default, and at most: half of the step."
    kv_cache_memory: Size | None = None
    "Size of each worker's KV pool, such as 2GiB."
    enable_prefix_caching: Annotated[bool, Parameter(negative="--no-enable-prefix-caching")] = True
    "Keep the blocks of ended sequences while there is room, and use them again where tokens are the same."
    kv_transport: Literal["auto", "zmq"] | None = None
    "How KV blocks travel."
    threads: Positive | None = None
    "Compute threads of each worker; default: as many as it has cores."
    trust_remote_code: bool = False
    "Accept models that bring their own code."
    allow_pickle: bool = False
    "Accept weights in pickle files."
    log_dir: Path | None = None
    "Write each process's output to a file here, too."


app = new_app("up", "Run a cluster on this machine until Ctrl-C.")


@app.default
def up(config: Annotated[UpConfig, Parameter(name="*")] = UpConfig()) -> int:
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
        placements = _placements(config)
        specs = _specs(config, roles, ports, placements, (locate or locate_once)(config))
        with Output(["splitserve", *(spec.name for spec in specs)], config.log_dir) as output:
            asyncio.run(_supervise(specs, ports, output, policy))
    except KeyboardInterrupt:
        return 0  # it is how `up` is ended, also while a model is still being fetched
    return 0


async def _supervise(specs: list[ChildSpec], ports: Ports, output: Output, policy: Policy) -> None:
    supervisor = Supervisor(
        specs,
        env=child_environment(),
        ready_url=f"http://{LOOPBACK}:{ports.http}/health/ready",
        sink=output,
        on_ready=lambda: _print_what_next(ports),
        policy=policy,
    )
    output.on_closed = supervisor.request_stop
    await supervisor.run()


def _print_what_next(ports: Ports) -> None:
    with suppress(BrokenPipeError):  # whoever reads our stderr may not read our stdout
        print(what_next(ports), flush=True)  # noqa: T201


def _placements(config: UpConfig) -> tuple[list[Placement], list[Placement]]:
    cores = usable_cores("auto" if config.cores == "none" else config.cores)
    if config.cores == "none":
        anywhere = Placement(cores=(), threads=max(1, len(cores) // (config.prefill + config.decode)))
        return [anywhere] * config.prefill, [anywhere] * config.decode
    return place(cores, config.prefill, config.decode)


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


def _specs(
    config: UpConfig,
    roles: Roles,
    ports: Ports,
    placements: tuple[list[Placement], list[Placement]],
    model: Model,
) -> list[ChildSpec]:
    given: dict[str, Any] = {name.replace("_", "-"): getattr(config, name) for name in _WORKER_FLAGS}
    given["no-enable-prefix-caching"] = not config.enable_prefix_caching
    flags = {name: value for name, value in given.items() if value is not None}
    routing = {"split-threshold": config.split_threshold, "without-prefill": None if config.prefill else "local"}
    return [router_spec(roles, model, ports, routing), *worker_specs(roles, model, ports, placements, flags)]


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
    url = f"http://{LOOPBACK}:{ports.http}"
    url_flag = "" if ports.http == 8000 else f" --url {url}"
    return (
        "\nThe cluster is ready. In another terminal:\n\n"
        f'  {script} generate "Write a short introduction about the US capital city."{target_flag}\n'
        f"  {script} chat{target_flag}\n"
        f"  {script} status{url_flag}\n"
        f"  curl {url}/cluster\n\n"
        "Ctrl-C here ends it.\n"
    )


def interrupt(_signal: int, _frame: object) -> None:
    """A signal handler that makes SIGTERM end things as Ctrl-C does."""
    raise KeyboardInterrupt
