"""What the settings of `up` come to: command lines of a router and of workers, and what scaling has to know of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from splitserve.cli.roles import ChildSpec, Model, Ports, Roles, router_spec, worker_spec
from splitserve.cli.roster import Roster
from splitserve.cli.up_config import UpConfig
from splitserve.service.config import ENVIRONMENT_PREFIX, parse_duration
from splitserve.service.ports import LOOPBACK
from splitserve.worker.config import WorkerConfig

# A worker whose engine is stuck ends six seconds later than its drain timeout.
_DRAIN_SLACK_S = 8.0


@dataclass(frozen=True)
class Setup:
    """`drain_grace_s`: how long a worker that drains may take, at most, before something is wrong with it."""

    model: Model
    ports: Ports
    router: ChildSpec
    roster: Roster
    serves_without_prefill: bool
    drain_grace_s: float

    @classmethod
    def of(cls, config: UpConfig, roles: Roles, model: Model, ports: Ports, cores: Sequence[int]) -> "Setup":
        routing = {"split-threshold": config.split_threshold, "without-prefill": None if config.prefill else "local"}
        make_spec = partial(worker_spec, roles, model, ports, config.worker_flags())
        is_pinned = config.cores != "none"
        return cls(
            model,
            ports,
            router_spec(roles, model, ports, routing),
            Roster(config.prefill, config.decode, cores=cores, is_pinned=is_pinned, make_spec=make_spec),
            not config.prefill or os.environ.get(f"{ENVIRONMENT_PREFIX}WITHOUT_PREFILL") == "local",
            _drain_timeout_s() + _DRAIN_SLACK_S,
        )

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.http}"

    def specs(self) -> list[ChildSpec]:
        return [self.router, *(member.spec for member in self.roster.members())]


def _drain_timeout_s() -> float:
    """As the workers read it: `up` has no flag for it."""
    asked = os.environ.get(f"{ENVIRONMENT_PREFIX}DRAIN_TIMEOUT")
    try:
        return parse_duration(asked) if asked else WorkerConfig.drain_timeout
    except ValueError:  # they say themselves what is wrong with it, and do not start
        return WorkerConfig.drain_timeout
