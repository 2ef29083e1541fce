"""Which worker computes on which processor cores. Pure functions; the roster calls them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.service.config import parse_cores
from splitserve.service.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's share: the cores it is pinned to (none: it may run anywhere) and its number of compute threads."""

    cores: tuple[int, ...]
    threads: int


def place(cores: Sequence[int], num_prefill: int, num_decode: int) -> tuple[list[Placement], list[Placement]]:
    """Divides `cores` among the workers, prefill's first.

    With a core for each, every worker has its own, what is left over goes one by one to prefill, which can use it most.
    With fewer, half of the cores is shared by the prefill workers and half by the decode workers, so that a long prompt
    still cannot stall decode; without prefill workers there are no halves. A single core is nobody's: nothing is
    pinned.
    """
    num_workers = num_prefill + num_decode
    if len(cores) < 2:
        anywhere = Placement(cores=(), threads=1)
        return [anywhere] * num_prefill, [anywhere] * num_decode
    if len(cores) < num_workers:
        half = max(1, len(cores) // 2) if num_prefill else 0
        return _shared(cores[:half], num_prefill), _shared(cores[half:], num_decode)
    share, left_over = divmod(len(cores), num_workers)
    placements: list[Placement] = []
    start = 0
    for index in range(num_workers):
        end = start + share + (1 if index < left_over else 0)
        placements.append(Placement(cores=tuple(cores[start:end]), threads=end - start))
        start = end
    return placements[:num_prefill], placements[num_prefill:]


def place_another(cores: Sequence[int], alike: Sequence[Placement], others: Sequence[Placement]) -> Placement:
    """Where one more worker computes, when those of its own role (`alike`) and of the other one run and stay.

    It gets an even share of all cores, at least one: of those that nobody has, as far as they go. Where there are none
    it shares the least used ones of its own role, so that a long prompt still cannot stall decode; only the first
    worker of a role shares with the other one.
    """
    if len(cores) < 2:
        return Placement(cores=(), threads=1)
    num_users = Counter(core for placement in (*alike, *others) for core in placement.cores)
    own = {core for placement in alike for core in placement.cores}
    open_to_it = [core for core in cores if not num_users[core]] or [core for core in cores if core in own] or cores
    share = max(1, len(cores) // (len(alike) + len(others) + 1))
    # Sorting is stable: among equals those come first that are named first.
    chosen = tuple(sorted(sorted(open_to_it, key=num_users.__getitem__)[:share]))
    return Placement(cores=chosen, threads=len(chosen))


def usable_cores(asked: str) -> list[int]:
    """Core numbers for "auto" (all that this process may run on) or a list such as "0,2-3".

    Raises InvalidRequest for a core that this process may not use.
    """
    available = sorted(os.sched_getaffinity(0))
    if asked == "auto":
        return available
    try:
        cores = list(dict.fromkeys(parse_cores(asked)))
    except ValueError as error:
        raise InvalidRequest(f"--cores: {error}", field="cores") from None
    missing = [core for core in cores if core not in available]
    if missing:
        raise InvalidRequest(f"--cores {asked}: no core {missing[0]} here; there are {available}", field="cores")
    return cores


def _shared(cores: Sequence[int], num_workers: int) -> list[Placement]:
    return [Placement(cores=(cores[index % len(cores)],), threads=1) for index in range(num_workers)]
