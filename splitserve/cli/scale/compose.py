"""Compose projects of ours, as `splitserve scale` sees them: through the Docker engine and the compose command.

Compose makes containers, because it alone knows the project's files. Counting, starting, stopping and removing goes to
the engine: compose would take away the oldest, kill those that drain too long for its patience, and not tell one role
from another.
"""

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from splitserve.cli.child import last_words
from splitserve.cli.scale.docker_engine import DockerEngine
from splitserve.cli.scale.replica import Replica, surplus
from splitserve.cli.scale.scalable import Say
from splitserve.cli.scale.serialized import serialized
from splitserve.cli.scale.target import Target, refuse_unservable
from splitserve.service.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, Unavailable

_MODULES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}
"""What the containers of a service of ours run."""

_CREATE_TIMEOUT_S = 120.0
_POLL_S = 0.5

Run = Callable[[Sequence[str], float], None]
"""Runs a command for so many seconds at most; raises SplitserveError where it fails."""


class ComposeProject:
    """`files`: the project's compose files; empty: those that it was started with."""

    def __init__(self, name: str, engine: DockerEngine, files: Sequence[Path], run: Run, poll_s: float) -> None:
        self.name = name
        self._engine = engine
        self._files = files
        self._run = run
        self._poll_s = poll_s

    def __str__(self) -> str:
        return f"the compose project {self.name}"

    def scale(self, target: Target, *, timeout_s: float, is_waited_for: bool, say: Say) -> None:
        """Workers that drain are waited for in any case, because somebody has to remove what is left of them."""
        deadline = time.monotonic() + timeout_s
        with serialized(f"compose-{self.name}", timeout_s):
            self._refuse(target)
            made = {replica.id for role, wanted in target.items() for replica in self._scale(role, wanted, say)}
            if is_waited_for:
                for role, wanted in target.items():
                    self._await_ready(role, wanted, made, deadline, say)

    def _refuse(self, target: Target) -> None:
        routers = self._replicas("router")
        if not routers:
            raise NotFound(f"{self} has no router any more")
        without = all(router.has_option("without-prefill", "local") for router in routers)
        refuse_unservable(target, serves_without_prefill=without)

    def _scale(self, role: str, wanted: int, say: Say) -> list[Replica]:
        """Returns what it has started."""
        present = self._replicas(role)
        kept = [replica for replica in present if not replica.is_over]
        say(f"{role}: {sum(replica.is_up for replica in kept)} → {wanted}")
        over = [replica for replica in present if replica.is_over]  # compose would count them
        self._take_away([*over, *surplus(kept, wanted)], say)
        if len(kept) < wanted:
            self._create(role, wanted)
        new = [replica for replica in self._replicas(role) if not replica.is_up]
        self._refuse_unlike(role, new, present)
        for replica in new:
            self._engine.start(replica)
            say(f"{replica.name} starts")
        return new

    def _take_away(self, replicas: Sequence[Replica], say: Say) -> None:
        """All at once, each with the time to drain that its own settings give it."""
        if not replicas:
            return

        def take_away(replica: Replica) -> str:
            status = self._engine.stop_and_remove(replica)
            return "gone" if status in (0, None) else f"gone: it ended with status {status}"

        for replica in replicas:
            say(f"{replica.name} {'drains' if replica.is_up else 'is removed'}")
        with ThreadPoolExecutor(len(replicas)) as pool:
            for replica, end in zip(replicas, pool.map(take_away, replicas), strict=True):
                say(f"{replica.name} is {end}")

    def _create(self, role: str, wanted: int) -> None:
        """Makes containers and starts none: it is to be seen first whether they are like the others.

        Not with --no-deps: compose would forget what the service depends on, count that as another configuration, and
        make the workers anew at the next `docker compose up`.
        """
        project = next(iter(self._replicas("router")), None)
        if project is None:
            raise NotFound(f"{self} has no router any more")
        command = ["docker", "compose", "--ansi", "never", "--project-name", self.name, *self._where(project)]
        command += ["up", "--no-start", "--no-recreate", "--no-build", "--scale", f"{role}={wanted}", role]
        self._run(command, _CREATE_TIMEOUT_S)

    def _where(self, of: Replica) -> list[str]:
        """The flags that say which files the project consists of."""
        if self._files:
            return [word for file in self._files for word in ("--file", str(file))]
        files = of.listed("config_files")
        missing = next((file for file in files if not Path(file).is_file()), None)
        if missing is not None or not files:
            missing = missing or "no file"
            raise NotFound(f"{self} was made from {missing}, which is not here; name its files with --file")
        words = [word for file in files for word in ("--file", file)]
        words += [word for file in of.listed("environment_file") for word in ("--env-file", file)]
        return words + [word for folder in of.listed("working_dir") for word in ("--project-directory", folder)]

    def _refuse_unlike(self, role: str, new: Sequence[Replica], present: Iterable[Replica]) -> None:
        """Compose reads the files and this shell's variables anew: workers of another model or another size would be
        the result, beside those that run."""
        known = {replica.config_hash for replica in present if replica.is_up}
        unlike = [replica for replica in new if known and replica.config_hash not in known]
        if not unlike:
            return
        for replica in unlike:
            self._engine.stop_and_remove(replica)
        raise InvalidRequest(
            f"new workers would not be like those that run: the compose file, .env or a variable of this shell is not "
            f"what it was when {self} was started. Set what was set then, or bring the whole project to the new "
            f"settings with: docker compose up --detach",
            reason="UNLIKE",
            field=role,
        )

    def _await_ready(self, role: str, wanted: int, made: Set[str], deadline: float, say: Say) -> None:
        """Until as many are ready as are `wanted`. Raises Unavailable where one of those `made` cannot start."""
        told: set[str] = set()
        while True:
            replicas = self._replicas(role)
            new = [replica for replica in replicas if replica.id in made - told]
            for replica in new:
                if replica.is_ready:
                    told.add(replica.id)
                    say(f"{replica.name} is ready")
                elif replica.has_failed:
                    self._take_back(replica, [other for other in new if not other.is_ready], say)
            missing = [f"{replica.name} is {replica.state}" for replica in replicas if not replica.is_ready]
            if len(replicas) != wanted:
                missing.append(f"{role} has {len(replicas)} containers")
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not in time: {', '.join(missing)}")
            time.sleep(self._poll_s)

    def _take_back(self, failed: Replica, new: Sequence[Replica], say: Say) -> NoReturn:
        """All that are not ready: they would start again and again, for the same reason or for want of the same."""
        why = last_words(self._engine.lines(failed))
        self._take_away(new, say)
        raise Unavailable(f"{failed.name} cannot start: {why}", reason="START_FAILED")

    def _replicas(self, service: str) -> list[Replica]:
        return self._engine.replicas(project=self.name, service=service)


def compose_projects(
    files: Sequence[Path],
    name: str | None,
    *,
    engine: DockerEngine,
    run: Run,
    poll_s: float = _POLL_S,
) -> list[ComposeProject]:
    """The projects of ours that run: a router and decode workers. `files` and `name` say which is meant, where there
    are several."""
    services: dict[str, dict[str, Replica]] = {}
    for replica in engine.replicas():
        if replica.is_up and replica.words[:1] == (_MODULES.get(replica.service),):
            services.setdefault(replica.project, {})[replica.service] = replica
    ours = {project: found["router"] for project, found in services.items() if {"router", "decode"} <= found.keys()}
    if name is not None:
        ours = {project: router for project, router in ours.items() if project == name}
    if files and len(ours) > 1:
        meant = {str(file.resolve()) for file in files}
        ours = {project: router for project, router in ours.items() if set(router.listed("config_files")) == meant}
    return [ComposeProject(project, engine, files, run, poll_s) for project in sorted(ours)]


def run_command(command: Sequence[str], timeout_s: float) -> None:
    """Raises Unavailable or Internal with what it said last."""
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise Unavailable("there is no docker command here; it is what makes a compose project's containers") from None
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"docker compose did not make the containers within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise Internal(f"docker compose failed: {last_words((done.stdout + done.stderr).splitlines())}")
