"""Keeps the processes of a local cluster running until it is told to stop; then none of them is left.

`up` calls it. It owns its children and the pipe that tells them that it lives. It is ours instead of a general one
because three things are particular: what is ready, which failures are for ever, and that nothing outlives it.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from splitserve.cli import child as children
from splitserve.cli.child import Child, LineSink
from splitserve.cli.roles import ChildSpec
from splitserve.service.config import EXIT_CONFIG
from splitserve.service.errors import Internal, InvalidRequest, SplitserveError
from splitserve.service.startup import process_age_s

_OWN_NAME = "splitserve"
_ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Times in seconds. A child that ran for `steady_s` counts as healthy: its next restart is a first one again.

    `give_up_after` failures in a row of one child before the cluster has ever been ready end the start.
    """

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    steady_s: float = 60.0
    grace_s: float = 10.0
    give_up_after: int = 5
    poll_s: float = 0.2
    notice_s: float = 30.0

    def delay_s(self, num_failures: int) -> float:
        """How long to wait before the start that follows `num_failures` failures in a row, 1 or more."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(num_failures - 1, 30))


class Supervisor:
    """Runs once. `on_ready` is called when `ready_url` first answers 200."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        env: Mapping[str, str],
        ready_url: str,
        sink: LineSink,
        on_ready: Callable[[], None],
        policy: Policy | None = None,
    ) -> None:
        self._specs = specs
        self._env = env
        self._ready_url = ready_url
        self._sink = sink
        self._on_ready = on_ready
        self._policy = policy or Policy()
        self._was_ready = False
        self._age_at_start_s = 0.0
        self._children: dict[str, Child] = {}
        self._stop = asyncio.Event()
        self._stop_signal = signal.SIGINT
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Returns after a signal, with every child gone; raises InvalidRequest or Internal where a start is hopeless.

        SIGINT and SIGHUP end it, SIGTERM lets what runs go on for a while; a second one kills at once.
        """
        self._age_at_start_s = process_age_s()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup asks for SIGHUP to be ignored. SIGINT may be ignored only because a script started us with "&".
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self.request_stop, number)
        read_fd, write_fd = os.pipe()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(spec, read_fd)) for spec in self._specs]
                tasks.append(group.create_task(self._await_ready()))
                await self._stop.wait()
                self._say("stopping")
                for task in tasks:
                    task.cancel()
        except* SplitserveError as failures:
            raise failures.exceptions[0] from None
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def request_stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Children drain on SIGTERM only: who presses Ctrl-C does not want to wait."""
        if self._stop.is_set():
            self._hurry.set()
        elif number == signal.SIGTERM:
            self._stop_signal = signal.SIGTERM
        self._stop.set()

    async def _keep(self, spec: ChildSpec, parent_fd: int) -> None:
        num_failures = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            child = await self._start(spec, parent_fd)
            status = await self._until_end(child)
            num_failures = 1 if loop.time() - started >= self._policy.steady_s else num_failures + 1
            self._raise_if_hopeless(child, status, num_failures)
            delay_s = self._policy.delay_s(num_failures)
            self._say(f"{spec.name} {_describe(status)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _start(self, spec: ChildSpec, parent_fd: int) -> Child:
        try:
            child = await children.start(spec, parent_fd, self._env, self._sink)
        except OSError as error:
            raise Internal(f"{spec.name} cannot be run: {error}") from error
        self._children[spec.name] = child
        return child

    async def _until_end(self, child: Child) -> int:
        try:
            return await child.wait()
        except asyncio.CancelledError:
            await child.stop(self._stop_signal, self._policy.grace_s, self._hurry)
            raise

    def _raise_if_hopeless(self, child: Child, status: int, num_failures: int) -> None:
        name = child.spec.name
        last_line = children.last_words(child.last_lines)
        if status == EXIT_CONFIG:
            raise InvalidRequest(f"{name} cannot start: {last_line}")
        if not self._was_ready and num_failures >= self._policy.give_up_after:
            raise Internal(f"{name} {_describe(status)} {num_failures} times before the cluster was ready: {last_line}")

    async def _await_ready(self) -> None:
        loop = asyncio.get_running_loop()
        next_notice = loop.time() + self._policy.notice_s
        while not await asyncio.to_thread(_answers_ok, self._ready_url):
            if loop.time() >= next_notice:
                self._say("still waiting for the cluster to be ready")
                next_notice += self._policy.notice_s
            await asyncio.sleep(self._policy.poll_s)
        self._was_ready = True
        before_s = self._age_at_start_s
        self._say(f"ready after {process_age_s():.1f} s, {before_s:.1f} of them for the model, before any other start")
        for name, child in self._children.items():
            if child.startup_line:
                self._say(f"{name} {child.startup_line}")
        self._on_ready()

    def _say(self, text: str) -> None:
        self._sink(_OWN_NAME, text.encode())


def _answers_ok(url: str) -> bool:
    """Without httpx, whose import is a third of what happens before the first child is started."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
