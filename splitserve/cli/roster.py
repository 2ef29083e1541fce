"""The workers of a local cluster: which there are, oldest first, their names, their cores and their command lines.

`up` makes it, with those that it begins with; the scaler adds and removes. It starts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.cli.placement import Placement, place, place_another
from splitserve.cli.roles import ChildSpec

ROLES = ("prefill", "decode")

MakeSpec = Callable[[str, int, Placement], ChildSpec]
"""Takes the role, the worker's number among those of the role, and its place."""


@dataclass(frozen=True, slots=True)
class Member:
    role: str
    index: int
    placement: Placement
    spec: ChildSpec

    @property
    def name(self) -> str:
        return self.spec.name


class Roster:
    """`cores` are shared out; without `is_pinned` they only say how many threads make sense."""

    def __init__(
        self, num_prefill: int, num_decode: int, *, cores: Sequence[int], is_pinned: bool, make_spec: MakeSpec
    ) -> None:
        self._cores = cores
        self._is_pinned = is_pinned
        self._make_spec = make_spec
        self._members: list[Member] = []
        if is_pinned:
            placements = place(cores, num_prefill, num_decode)
        else:
            anywhere = self._anywhere(num_prefill + num_decode)
            placements = [anywhere] * num_prefill, [anywhere] * num_decode
        for role, role_placements in zip(ROLES, placements, strict=True):
            for index, placement in enumerate(role_placements):
                self._append(role, index, placement)

    def members(self, role: str | None = None) -> list[Member]:
        return [member for member in self._members if role in (None, member.role)]

    def add(self, role: str) -> Member:
        """Its number is the smallest that no worker of the role has."""
        alike = self.members(role)
        others = [member.placement for member in self._members if member.role != role]
        if self._is_pinned:
            placement = place_another(self._cores, [member.placement for member in alike], others)
        else:
            placement = self._anywhere(len(self._members) + 1)
        taken = {member.index for member in alike}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        return self._append(role, index, placement)

    def remove(self, member: Member) -> None:
        self._members.remove(member)

    def describe_place(self, member: Member) -> str:
        """Such as "on core 1, as decode-0"."""
        mine = member.placement.cores
        if not mine:
            return "on any core"
        others = [other for other in self._members if other is not member]
        with_it = [other.name for other in others if not set(mine).isdisjoint(other.placement.cores)]
        where = f"on core{'s' if len(mine) > 1 else ''} {','.join(map(str, mine))}"
        return f"{where}, as {' and '.join(with_it)}" if with_it else where

    def _append(self, role: str, index: int, placement: Placement) -> Member:
        member = Member(role, index, placement, self._make_spec(role, index, placement))
        self._members.append(member)
        return member

    def _anywhere(self, num_workers: int) -> Placement:
        return Placement(cores=(), threads=max(1, len(self._cores) // num_workers))
