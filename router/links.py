"""Between which workers blocks travel best: a pure decision over plain data.

`scheduler` asks for it where pairs of workers are alike in all else.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

# Of so many placements one goes by another link than those that are known to be good.
LOOK_AROUND_EVERY = 8

SAME_TOPOLOGY_GROUP, SAME_HOST, OVER_THE_NETWORK = range(3)
_NUM_DISTANCES = 3


class LinkView(NamedTuple):
    """From a prefill worker to a decode worker: how far they are apart, and how fast blocks have travelled, 0.0 until
    enough have."""

    distance: int
    bytes_per_s: float


def warning(path: str, fallback: str, *, is_same_host: bool) -> str | None:
    """What an operator should know of a link that works; None for nothing."""
    reasons = [f"not what was asked for first: {fallback}"] if fallback else []
    if is_same_host and path.startswith("nccl") and "NET" in path:
        reasons.append("NCCL takes the network between two GPUs of one host: see the NCCL settings in docs/deploy.md")
    return "; ".join(reasons) or None


def best_links(links: Sequence[LinkView], turn: int) -> list[int]:
    """Indices of those of `links` that are as fast as any, by what was measured; of these the nearest.

    More than half as fast is as fast, because two measurements of one link differ by so much. A link that was not
    measured counts with the best that was at its distance or farther, and comes last where there is none. There it
    could stay for ever: some placements, by `turn`, go to another link, one that was not measured if there is any.
    """
    if turn % LOOK_AROUND_EVERY == LOOK_AROUND_EVERY - 1:
        others = [index for index, link in enumerate(links) if not link.bytes_per_s] or range(len(links))
        return [others[turn // LOOK_AROUND_EVERY % len(others)]]
    best_at = [0.0] * _NUM_DISTANCES
    for link in links:
        best_at[link.distance] = max(best_at[link.distance], link.bytes_per_s)
    expected = list(accumulate(reversed(best_at), max))[::-1]
    best = max(best_at)
    fast = [index for index, link in enumerate(links) if 2 * (link.bytes_per_s or expected[link.distance]) > best]
    # Where nothing was measured all are as fast as any.
    choices = fast or range(len(links))
    nearest = min(links[index].distance for index in choices)
    return [index for index in choices if links[index].distance == nearest]
