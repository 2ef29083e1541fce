"""Keeps one process of the local cluster running until it is told to let it end. The supervisor runs one for each."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from splitserve.cli.child import Child, last_words
from splitserve.cli.roles import ChildSpec
from splitserve.service.config import EXIT_CONFIG
from splitserve.service.errors import Internal, InvalidRequest, SplitserveError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Times in seconds. A child that ran for `steady_s` counts as healthy: its next restart is a first one again.

    `give_up_after` failures in a row of one child while it is still new end it for good.
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


@dataclass(frozen=True, slots=True)
class _End:
    """How a process ended that was not asked to: `words` are its last. `fatal`: why it is of no use to try again."""

    what: str
    words: str
    fatal: SplitserveError | None


class Keeper:
    """`run` once; `end` and `kill` from the same loop, at any time, also before it.

    `is_new` says whether the process may still be given up: what has served once is started again for ever, even where
    it ends with EXIT_CONFIG, because what became wrong beside it may be mended. `child` is the process that runs now,
    None before the first start and between two.
    """

    def __init__(
        self,
        spec: ChildSpec,
        *,
        start: Callable[[ChildSpec], Awaitable[Child]],
        say: Callable[[str], None],
        is_new: Callable[["Keeper"], str | None],
        policy: Policy,
    ) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.pid: int | None = None
        "Of the newest process, also when that is gone."
        self.has_started = False
        "Some process of it came so far that it said what its start took."
        self.status = 0
        "How the newest process that has ended ended."
        self.failure: SplitserveError | None = None
        "Why it was given up."
        self.is_gone = False
        self._start = start
        self._say = say
        self._is_new = is_new
        self._policy = policy
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signal = signal.SIGINT
        self._grace_s = policy.grace_s

    @property
    def is_leaving(self) -> bool:
        return self._asked.is_set()

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """Has the process asked by that signal to end, and killed after `grace_s`. Only the first call counts."""
        if not self._asked.is_set():
            self._signal, self._grace_s = number, grace_s
            self._asked.set()

    def kill(self) -> None:
        self._asked.set()
        self._hurry.set()

    async def run(self) -> None:
        """Returns with the process gone, because it was asked to end; raises InvalidRequest or Internal where it is
        given up. When cancelled, it has the process end as Ctrl-C does."""
        try:
            await self._run()
        except SplitserveError as error:
            self.failure = error
            raise
        finally:
            self.is_gone = True

    async def _run(self) -> None:
        num_failures = 0
        loop = asyncio.get_running_loop()
        while not self._asked.is_set():
            started = loop.time()
            end = await self._run_once()
            if end is None:
                return
            num_failures = 1 if loop.time() - started >= self._policy.steady_s else num_failures + 1
            self._give_up_if_new(end, num_failures)
            delay_s = self._policy.longest_delay_s if end.fatal else self._policy.delay_s(num_failures)
            self._say(f"{end.what}; starting it again in {delay_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), delay_s)

    async def _run_once(self) -> _End | None:
        """From its start to its end; None where it was asked to end."""
        name = self.spec.name
        try:
            self.child = await self._start(self.spec)
        except Internal as error:
            return _End(error.message, "", error)
        self.pid = self.child.pid
        try:
            self.status = await self._until_end(self.child)
        finally:
            ended, self.child = self.child, None
        if self._asked.is_set():
            return None
        self.has_started |= ended.startup_line is not None
        words = last_words(ended.last_lines)
        if self.status == EXIT_CONFIG:
            what = f"{name} cannot start: {words}"
            return _End(what, words, InvalidRequest(what))
        return _End(f"{name} {describe_end(self.status)}", words, None)

    async def _until_end(self, child: Child) -> int:
        end = asyncio.create_task(child.wait())
        asked = asyncio.create_task(self._asked.wait())
        status = 0
        try:
            await asyncio.wait((end, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not end.done():
                end.cancel()
                status = await child.stop(self._signal, self._grace_s, self._hurry)
        return end.result() if end.done() and not end.cancelled() else status

    def _give_up_if_new(self, end: _End, num_failures: int) -> None:
        since = self._is_new(self)
        if since is None:
            return
        if end.fatal:
            raise end.fatal
        if num_failures >= self._policy.give_up_after:
            raise Internal(f"{end.what} {num_failures} times before {since}: {end.words}")


def describe_end(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
