"""Scales a running `splitserve up`. Owned by it, on the supervisor's loop; the server calls it.

A worker that is added is started like the others. One that is let go gets SIGTERM, drains, and is not started again.
Of two commands for a role the later one wins, and the earlier one is told so.
"""

import asyncio
import json
import signal
from dataclasses import dataclass

from splitserve.cli.keeper import Keeper
from splitserve.cli.roster import ROLES, Member, Roster
from splitserve.cli.router_http import answer_of
from splitserve.cli.scale.scalable import Say
from splitserve.cli.scale.target import Target, refuse_unservable
from splitserve.cli.supervisor import Supervisor
from splitserve.service.errors import DeadlineExceeded, Internal, InvalidRequest, Unavailable

READY = "ready"


@dataclass(frozen=True, slots=True)
class Order:
    """One command, under way: `numbers` tells it from later ones of the same roles."""

    target: Target
    numbers: dict[str, int]
    staying: list[Keeper]
    leaving: list[Keeper]


class Scaler:
    """`drain_grace_s`: how long a worker that is let go may take before it is killed, more than its drain timeout."""

    def __init__(
        self,
        supervisor: Supervisor,
        roster: Roster,
        *,
        url: str,
        serves_without_prefill: bool,
        drain_grace_s: float,
        poll_s: float = 0.2,
    ) -> None:
        self._supervisor = supervisor
        self._roster = roster
        self._url = url
        self._serves_without_prefill = serves_without_prefill
        self._drain_grace_s = drain_grace_s
        self._poll_s = poll_s
        self._numbers = dict.fromkeys(ROLES, 0)

    def counts(self) -> dict[str, int]:
        """Workers by role that are to stay, whether they run at this moment or not."""
        self._forget_gone()
        return {role: len(self._staying(role)) for role in ROLES}

    def order(self, target: Target, say: Say) -> Order:
        """Starts and lets go what it takes. Raises InvalidRequest or Unavailable, and then nothing has happened."""
        self._forget_gone()
        unknown = next((role for role in target if role not in ROLES), None)
        if unknown is not None or min(target.values(), default=-1) < 0:
            raise InvalidRequest(f"no such target: {dict(target)}", field="targets")
        if self._supervisor.is_stopping:
            raise Unavailable("this cluster is about to end")
        refuse_unservable(target, serves_without_prefill=self._serves_without_prefill)
        for role, wanted in target.items():
            self._numbers[role] += 1
            self._scale(role, wanted, say)
        keepers = [self._keeper(member) for role in target for member in self._roster.members(role)]
        return Order(
            target,
            {role: self._numbers[role] for role in target},
            [keeper for keeper in keepers if not keeper.is_leaving],
            [keeper for keeper in keepers if keeper.is_leaving],
        )

    async def wait(self, order: Order, timeout_s: float, say: Say) -> None:
        """Until every worker of the order's roles is ready, or gone, and the router says the same.

        Raises DeadlineExceeded with what is missing, Internal where a worker was given up, and Unavailable where a
        later command or the end of the cluster has overtaken this one.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        missing: dict[str, str] = {}
        while True:
            before, missing = missing, await self._missing(order)
            self._raise_if_overtaken(order)
            for name in before:
                if name not in missing:
                    say(f"{name} is {_end_of(name, order)}")
            if not missing:
                return
            if asyncio.get_running_loop().time() >= deadline:
                listed = ", ".join(f"{name} is {state}" for name, state in missing.items())
                raise DeadlineExceeded(f"not within {timeout_s:g} s: {listed}. The cluster goes on with it.")
            await asyncio.sleep(self._poll_s)

    def _scale(self, role: str, wanted: int, say: Say) -> None:
        staying = self._staying(role)
        say(f"{role}: {len(staying)} → {wanted}")
        for _ in range(wanted - len(staying)):
            member = self._roster.add(role)
            self._supervisor.keep(member.spec)
            say(f"{member.name} starts {self._roster.describe_place(member)}")
        # Who waits for its next start serves nobody; then the youngest. Sorting is stable, and the list is by age.
        by_use = sorted(staying, key=lambda member: self._keeper(member).child is None)
        for member in reversed(by_use[wanted:]):
            self._keeper(member).end(signal.SIGTERM, self._drain_grace_s)
            say(f"{member.name} drains")

    async def _missing(self, order: Order) -> dict[str, str]:
        """Who is not yet as it should be, and how it is instead, by name."""
        states = await asyncio.to_thread(worker_states, self._url)
        missing = {}
        for keeper in order.staying:
            if keeper.failure is not None:
                raise Internal(f"{keeper.failure.message}; it was given up")
            state = states.get(keeper.pid or 0, "starting") if keeper.child is not None else "waiting to be restarted"
            if state != READY:
                missing[keeper.spec.name] = state
        for keeper in order.leaving:
            if not keeper.is_gone or (keeper.pid or 0) in states:
                missing[keeper.spec.name] = "draining"
        return missing

    def _raise_if_overtaken(self, order: Order) -> None:
        if self._supervisor.is_stopping:
            raise Unavailable("the cluster ends")
        for role, number in order.numbers.items():
            if self._numbers[role] != number:
                raise Unavailable(f"another command has scaled {role} meanwhile", reason="OVERTAKEN")

    def _staying(self, role: str) -> list[Member]:
        return [member for member in self._roster.members(role) if not self._keeper(member).is_leaving]

    def _keeper(self, member: Member) -> Keeper:
        return self._supervisor.keepers[member.name]

    def _forget_gone(self) -> None:
        for member in self._roster.members():
            if self._keeper(member).is_gone:
                self._roster.remove(member)


def worker_states(url: str) -> dict[int, str]:
    """The workers' states by process id, as the router shows them; empty where it does not answer. It blocks."""
    body = answer_of(f"{url}/cluster")
    return {worker["pid"]: worker["state"] for worker in json.loads(body)["workers"]} if body else {}


def _end_of(name: str, order: Order) -> str:
    keeper = next((keeper for keeper in order.leaving if keeper.spec.name == name), None)
    if keeper is None:
        return READY
    return "gone: it did not drain in time and was killed" if keeper.status == -signal.SIGKILL else "gone"
