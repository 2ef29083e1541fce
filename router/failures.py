"""The failures of one request: counted once each, and whether it may be tried again after them.

Made by `flow`; a `chain` counts the attempts that it loses; an attempt counts its legs, and says who has answered.
"""

from collections.abc import Callable, Mapping, Set
from typing import Protocol

from router.causes import WORKER_LOST, AttemptLostError
from router.config import RouterConfig
from router.membership import End
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.reasons import Reason


class Deaths(Protocol):
    """Who of a request's workers has died; `dispatcher` knows."""

    def deaths_among(self, workers: Set[str]) -> Mapping[str, End]: ...

    async def deaths_until(
        self, workers: Set[str], is_enough: Callable[[int], bool], timeout_s: float
    ) -> Mapping[str, End]: ...


class Failures:
    """`avoid` names the workers that were at fault: the request would rather not go there again."""

    def __init__(self, deaths: Deaths, config: RouterConfig) -> None:
        self.avoid: set[str] = set()
        self._deaths = deaths
        self._config = config
        self._num = 0
        # Causes are numbered as they become known; the last one of each worker at fault.
        self.num_causes = 0
        self._last_of: dict[str, int] = {}
        self._ran_on: set[str] = set()
        # Who may have died of, or before, what has been counted: nothing was heard of it since.
        self._suspects: set[str] = set()

    async def count(self, lost: AttemptLostError, since: int) -> None:
        """Of an attempt, or of a leg of one, which began when `num_causes` was `since`: if another sample has met with
        a failure of the same worker since then, this is the same one. Raises the client's error if there is to be no
        other attempt."""
        if lost.reason == Reason.TOO_LARGE:  # it was not when it was admitted: larger workers have left
            raise Unavailable(f"{lost.reason}: {lost.message}", reason="NO_WORKERS", retry_after_s=1.0)
        if lost.is_fatal:
            raise Internal(f"{lost.reason}: {lost.message}")
        if lost.reason == WORKER_LOST and lost.worker in self._suspects:
            # Its effect was heard of first: counted already, and perhaps put down to the other side.
            self.avoid -= self._suspects
            self._suspects.clear()
            self._note_cause(lost.worker)
        elif self._last_of.get(lost.worker, 0) <= since:
            self._num += 1
            self._suspects |= lost.suspects
            self._note_cause(lost.worker)
        self.avoid.add(lost.worker)
        self._ran_on |= lost.ran_on
        await self._check_deaths(lost)
        if self._num >= self._config.max_attempts:
            raise Unavailable(
                f"{self._num} attempts failed, the last one by {lost}", reason="ATTEMPTS_EXHAUSTED", retry_after_s=1.0
            )

    def _note_cause(self, worker: str) -> None:
        self.num_causes += 1
        self._last_of[worker] = self.num_causes

    def heard_of(self, worker: str) -> None:
        """It has answered: whatever failed before, it did not die then."""
        self._suspects.discard(worker)

    async def _check_deaths(self, lost: AttemptLostError) -> None:
        """A request that workers die of is not given another one to kill.

        Both waits are rare. A death may show later than its effects; and a worker that seems dead may have lost only
        its stream, and then is back soon.
        """
        ran_on, max_deaths = frozenset(self._ran_on), self._config.max_deaths
        deaths = self._deaths.deaths_among(ran_on)
        may_be_one_more = lost.reason == Reason.TRANSFER_FAILED and lost.ran_on.isdisjoint(deaths)
        if may_be_one_more and len(deaths) == max_deaths - 1:
            deaths = await self._deaths.deaths_until(
                ran_on, lambda num: num >= max_deaths, self._config.suspect_timeout
            )
        if len(deaths) >= max_deaths:
            deaths = await self._deaths.deaths_until(
                ran_on, lambda num: num < max_deaths, self._config.heartbeat_timeout
            )
        if len(deaths) < max_deaths:
            return
        message = f"{len(deaths)} workers died while they ran this request"
        if all(end is End.SEEN for end in deaths.values()):
            raise Internal(message, reason="WORKERS_DIED")
        raise Unavailable(message, reason="WORKERS_DIED", retry_after_s=1.0)  # it may have been the network


class ChainFailures:
    """The failures of a request as one of its chains meets with them. Several run on one worker at the same time, and
    its death is one failure of the request."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._since = failures.num_causes

    def begin_attempt(self) -> None:
        """What fails from now on is not what others have counted by now."""
        self._since = self._failures.num_causes

    async def count(self, lost: AttemptLostError) -> None:
        """As `Failures.count`."""
        await self._failures.count(lost, self._since)
        self._since = self._failures.num_causes

    def heard_of(self, worker: str) -> None:
        self._failures.heard_of(worker)
