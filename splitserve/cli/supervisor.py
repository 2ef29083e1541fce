"""Keeps the processes of a local cluster running until it is told to stop; then none of them is left.

`up` calls it, and the scaler has it keep more of them or let some go. It owns its keepers and the pipe that tells their
processes that it lives. It is ours instead of a general one because three things are particular: what is ready, which
failures are for ever, and that nothing outlives it.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from splitserve.cli import child as children
from splitserve.cli.child import Child, LineSink
from splitserve.cli.keeper import Keeper, Policy
from splitserve.cli.roles import ChildSpec
from splitserve.cli.router_http import answer_of
from splitserve.service.errors import Internal, SplitserveError, Unavailable
from splitserve.service.startup import process_age_s

_OWN_NAME = "splitserve"


class Supervisor:
    """Runs once. `on_ready` is called when the router at `url` first answers that it is ready."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        env: Mapping[str, str],
        url: str,
        sink: LineSink,
        on_ready: Callable[[], None],
        policy: Policy | None = None,
    ) -> None:
        self._env = env
        self._url = url
        self._sink = sink
        self._on_ready = on_ready
        self._policy = policy or Policy()
        self._was_ready = False
        self._age_at_start_s = 0.0
        self._stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._pipe = (-1, -1)
        self.keepers: dict[str, Keeper] = {}
        "By name; one that is gone stays until another takes its name."
        for spec in specs:
            self._add(spec, lambda _: None if self._was_ready else "the cluster was ready")

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    async def run(self, beside: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Returns after a signal, with every child gone; raises InvalidRequest or Internal where a start is hopeless.

        SIGINT and SIGHUP end it, SIGTERM lets what runs go on for a while; a second one kills at once. `beside` runs
        meanwhile, and is cancelled at the end.
        """
        self._age_at_start_s = process_age_s()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup asks for SIGHUP to be ignored. SIGINT may be ignored only because a script started us with "&".
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self.request_stop, number)
        self._pipe = os.pipe()
        try:
            async with asyncio.TaskGroup() as self._group:
                for keeper in self.keepers.values():
                    self._group.create_task(keeper.run())
                others = [self._group.create_task(self._await_ready())]
                if beside is not None:
                    others.append(self._group.create_task(beside()))
                await self._stop.wait()
                for task in others:
                    task.cancel()
        except* SplitserveError as failures:
            raise failures.exceptions[0] from None
        finally:
            for descriptor in self._pipe:
                os.close(descriptor)

    def keep(self, spec: ChildSpec) -> Keeper:
        """One more process. When that is given up, the others go on. Raises Unavailable while everything ends."""
        if self._group is None or self.is_stopping:
            raise Unavailable("this cluster is about to end")
        keeper = self._add(spec, lambda keeper: None if keeper.has_started else "it was ready")
        self._group.create_task(self._keep_alone(keeper))
        return keeper

    def request_stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Children drain on SIGTERM only: who presses Ctrl-C does not want to wait."""
        present = list(self.keepers.values())
        if self._stop.is_set():
            for keeper in present:
                keeper.kill()
            return
        self._stop.set()
        self.say("stopping")
        for keeper in present:
            if keeper.is_leaving and number != signal.SIGTERM:
                keeper.kill()
            keeper.end(signal.SIGTERM if number == signal.SIGTERM else signal.SIGINT, self._policy.grace_s)

    def say(self, text: str) -> None:
        self._sink(_OWN_NAME, text.encode())

    def _add(self, spec: ChildSpec, is_new: Callable[[Keeper], str | None]) -> Keeper:
        keeper = Keeper(spec, start=self._start, say=self.say, is_new=is_new, policy=self._policy)
        self.keepers[spec.name] = keeper
        return keeper

    async def _keep_alone(self, keeper: Keeper) -> None:
        try:
            await keeper.run()
        except SplitserveError as error:
            self.say(f"{error.message}; it is not started again")

    async def _start(self, spec: ChildSpec) -> Child:
        try:
            return await children.start(spec, self._pipe[0], self._env, self._sink)
        except OSError as error:
            raise Internal(f"{spec.name} cannot be run: {error}") from error

    async def _await_ready(self) -> None:
        loop = asyncio.get_running_loop()
        next_notice = loop.time() + self._policy.notice_s
        while await asyncio.to_thread(answer_of, f"{self._url}/health/ready") is None:
            if loop.time() >= next_notice:
                self.say("still waiting for the cluster to be ready")
                next_notice += self._policy.notice_s
            await asyncio.sleep(self._policy.poll_s)
        self._was_ready = True
        before_s = self._age_at_start_s
        self.say(f"ready after {process_age_s():.1f} s, {before_s:.1f} of them for the model, before any other start")
        for name, keeper in self.keepers.items():
            if keeper.child is not None and keeper.child.startup_line:
                self.say(f"{name} {keeper.child.startup_line}")
        self._on_ready()
