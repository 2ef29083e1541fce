"""From the settings of `up` to the command lines of its processes. Pure functions over plain data."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitserve.cli.placement import Placement
from splitserve.service.ports import LOOPBACK


@dataclass(frozen=True, slots=True)
class Roles:
    """The modules that are run as `python -m`. Tests put their own here."""

    router: str = "router"
    prefill_worker: str = "prefill_worker"
    decode_worker: str = "decode_worker"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to keep running. `name` is in front of every line that it writes."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """What every process of the cluster has to agree on. `directory` is complete: nobody needs to fetch anything.

    The revision is not here: from the same directory every process finds the same one.
    """

    directory: Path
    served_name: str


@dataclass(frozen=True, slots=True)
class Ports:
    grpc: int
    http: int
    internal: int


NO_FLAGS: Mapping[str, object] = {}


def router_spec(roles: Roles, model: Model, ports: Ports, flags: Mapping[str, object] = NO_FLAGS) -> ChildSpec:
    """`flags` that are None stay away."""
    own = {
        "model": model.directory,
        "served-model-name": model.served_name,
        "bind": LOOPBACK,
        "grpc-port": ports.grpc,
        "http-port": ports.http,
        "internal-port": ports.internal,
    }
    return ChildSpec("router", _command(roles.router, own | dict(flags)))


def worker_spec(
    roles: Roles,
    model: Model,
    ports: Ports,
    flags: Mapping[str, object],
    role: str,
    index: int,
    placement: Placement,
) -> ChildSpec:
    """`role` is "prefill" or "decode". `flags` go to every worker; those that are None stay away."""
    own = {
        "model": model.directory,
        "served-model-name": model.served_name,
        "router": f"{LOOPBACK}:{ports.internal}",
        "bind": LOOPBACK,
        "http-port": 0,
        "kv-port": 0,
        "threads": placement.threads,
        "cores": ",".join(map(str, placement.cores)) or None,
    }
    module = {"prefill": roles.prefill_worker, "decode": roles.decode_worker}[role]
    return ChildSpec(f"{role}-{index}", _command(module, own | dict(flags)))


def _command(module: str, flags: Mapping[str, object]) -> tuple[str, ...]:
    # -P keeps the current directory off the import path: a file there named like a module must not be run.
    command = [sys.executable, "-P", "-m", module]
    for name, value in flags.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return tuple(command)
