"""Figures of gaps, against arrival patterns whose figures are known."""

import random

import pytest

from splitserve.bench.load.gaps import (
    ENOUGH_FOR_P999,
    Gap,
    Window,
    gaps_of,
    spread,
    stalled_share,
    touching,
    within,
)


def arrivals_of(gaps_ms: list[float], start: float = 100.0) -> list[float]:
    arrivals = [start]
    for ms in gaps_ms:
        arrivals.append(arrivals[-1] + ms / 1e3)
    return arrivals


def test_percentile_of_evenly_spread_gaps_is_another() -> None:
    gaps_ms = [float(ms) for ms in range(1, 102)]  # 1, 2, ... 101: the p-th percentile is p + 1
    random.Random(1).shuffle(gaps_ms)
    seen = spread([gap.seconds for gap in gaps_of(arrivals_of(gaps_ms))])
    assert (seen.count, seen.p999_ms) == (101, None)
    assert (seen.mean_ms, seen.p50_ms, seen.p95_ms, seen.p99_ms, seen.max_ms) == pytest.approx((51, 51, 96, 100, 101))


def test_one_stall_in_a_hundred_hides_from_the_p99_or_shows_too_early() -> None:
    steady = [10.0] * 198
    assert spread([ms / 1e3 for ms in [*steady, 500.0]]).p99_ms == pytest.approx(10.0)
    assert spread([ms / 1e3 for ms in [*steady, *[500.0] * 20]]).p99_ms == pytest.approx(500.0)


@pytest.mark.parametrize(("count", "is_told"), [(ENOUGH_FOR_P999 - 1, False), (ENOUGH_FOR_P999, True)])
def test_p999_of_too_few_gaps_is_told(count: int, is_told: bool) -> None:
    seen = spread([0.01] * (count - 10) + [1.0] * 10)
    assert seen.p999_ms == (pytest.approx(1000.0) if is_told else None)


def test_no_gaps_have_percentiles() -> None:
    with pytest.raises(ValueError, match="no durations"):
        spread([])


def test_gap_at_the_edge_of_a_window_is_counted_in_the_wrong_one() -> None:
    gaps = list(gaps_of([0.0, 1.0, 2.0, 3.0, 9.0, 10.0]))
    assert within(gaps, Window(1.0, 3.0)) == [Gap(1.0, 2.0), Gap(2.0, 3.0)]
    # The stall from 3 to 9 began in the burst and outlasts it; two windows that it touches count it once.
    assert touching(gaps, [Window(2.5, 4.0), Window(5.0, 6.0)]) == [Gap(2.0, 3.0), Gap(3.0, 9.0)]
    assert touching(gaps, [Window(3.0, 3.5)]) == [Gap(3.0, 9.0)]


def test_share_of_time_stalled_counts_what_is_not_overdue() -> None:
    quiet_median_s = 0.01
    steady = list(gaps_of(arrivals_of([10.0, 20.0, 15.0])))
    assert stalled_share(steady, quiet_median_s) == 0.0
    # 1,000 ms in all, of which 920 - 20 are overdue.
    assert stalled_share(list(gaps_of(arrivals_of([10.0] * 8 + [920.0]))), quiet_median_s) == pytest.approx(0.9)
    assert stalled_share([], quiet_median_s) == 0.0
