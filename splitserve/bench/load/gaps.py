"""What the times at which tokens came say: gaps, their percentiles, and how long a stream stood still."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Below so many values a 99.9th percentile is the maximum by another name.
ENOUGH_FOR_P999 = 5000
# A gap is a stall from so many quiet medians on.
STALL_FACTOR = 2.0


@dataclass(frozen=True)
class Window:
    """A stretch of time, in seconds."""

    start: float
    end: float


@dataclass(frozen=True)
class Gap:
    """Between two tokens of one stream that follow each other; seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spread:
    """Of some durations, in milliseconds; percentiles are interpolated linearly. `p999_ms` is None where there are
    fewer than ENOUGH_FOR_P999."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    p999_ms: float | None


def spread(seconds: Sequence[float]) -> Spread:
    """ValueError where there are none."""
    if not seconds:
        raise ValueError("no durations, no percentiles")
    ms = 1e3 * np.asarray(seconds, dtype=np.float64)
    p50, p95, p99, p999 = (float(value) for value in np.percentile(ms, (50, 95, 99, 99.9)))
    has_p999 = len(seconds) >= ENOUGH_FOR_P999
    return Spread(len(seconds), float(ms.mean()), p50, p95, p99, float(ms.max()), p999 if has_p999 else None)


def gaps_of(arrivals: Sequence[float]) -> Iterator[Gap]:
    """Of one stream's tokens, in order."""
    for start, end in itertools.pairwise(arrivals):
        yield Gap(start, end)


def within(gaps: Sequence[Gap], window: Window) -> list[Gap]:
    """Those that begin and end in it."""
    return [gap for gap in gaps if gap.start >= window.start and gap.end <= window.end]


def touching(gaps: Sequence[Gap], windows: Sequence[Window]) -> list[Gap]:
    """Those that share some time with one of the windows, each once: also a stall that outlasts what caused it."""
    return [gap for gap in gaps if any(gap.end > window.start and gap.start < window.end for window in windows)]


def stalled_share(gaps: Sequence[Gap], quiet_median_s: float) -> float:
    """The part of the gaps' time, 0 to 1, in which a token was overdue: of each gap what exceeds STALL_FACTOR quiet
    medians. 0 where there are no gaps."""
    limit = STALL_FACTOR * quiet_median_s
    total = sum(gap.seconds for gap in gaps)
    return sum(max(gap.seconds - limit, 0.0) for gap in gaps) / total if total else 0.0
