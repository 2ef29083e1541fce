"""Results of load as tables for a terminal. Pure functions; the command line prints what they return."""

from collections.abc import Sequence

from rich.table import Table

from splitserve.bench.load.arrivals import CARRIED, ArrivalSettings, RateRow, best_rate
from splitserve.bench.load.burst import BurstResult
from splitserve.bench.load.gaps import STALL_FACTOR, Spread
from splitserve.bench.tables import new_column, new_table


def burst_tables(result: BurstResult) -> list[Table | str]:
    """Gaps, then everything else in a line each."""
    table = new_table("gaps between tokens of the running streams, in ms")
    for heading in ("case", "gaps", "mean", "p50", "p95", "p99", "p99.9", "max", "p99 / quiet"):
        new_column(table, heading)
    quiet = result.quiet
    for name, seen in (("quiet", quiet), ("burst", result.burst), ("control", result.control)):
        if seen is not None:
            table.add_row(name, *_cells(seen), f"{seen.p99_ms / quiet.p99_ms:.2f}")
    jitter = result.jitter
    lines: list[Table | str] = [
        table,
        f"time to first token of the bursts' prompts: median {result.ttft_median_s:.2f} s, "
        f"max {result.ttft_max_s:.2f} s",
        f"under bursts a token was overdue (after {STALL_FACTOR:g} quiet medians) for "
        f"{100 * result.stalled_share:.1f} % of the time",
        f"under bursts, in tokens/s: {_or_unknown(result.prompt_tokens_per_s)} of prompts, "
        f"{result.burst_tokens_per_s:.1f} of their answers, {result.stream_tokens_per_s:.1f} of each running stream",
        f"this client's own jitter: p50 {jitter.p50_ms:.2f} ms, p99 {jitter.p99_ms:.2f} ms, max {jitter.max_ms:.2f} ms",
    ]
    if abs(result.tokens_per_piece - 1) > 0.02:
        lines.append(f"the server sent {result.tokens_per_piece:.2f} tokens in a piece: gaps are those between pieces")
    return lines


def rate_tables(rows: Sequence[RateRow], settings: ArrivalSettings) -> list[Table | str]:
    """A row for each rate, then the goodput and its price in a line."""
    goals = f"first token within {settings.ttft_goal_s:g} s, gaps of at most {1e3 * settings.itl_goal_s:g} ms"
    table = new_table(f"requests per second; in time: {goals}")
    for heading in (
        *("case", "requests", "failed", "in time", "TTFT p50 s", "p99 s", "ITL p50 ms", "p99 ms"),
        *("output tokens/s", "late ms"),
    ):
        new_column(table, heading)
    for row in rows:
        ttft = ("", "") if row.ttft is None else (f"{row.ttft.p50_ms / 1e3:.2f}", f"{row.ttft.p99_ms / 1e3:.2f}")
        itl = ("", "") if row.itl is None else (f"{row.itl.p50_ms:.1f}", f"{row.itl.p99_ms:.1f}")
        counts = (str(row.requests), str(row.failed), f"{100 * row.good_share:.0f} %")
        table.add_row(
            f"{row.rate:g}/s", *counts, *ttft, *itl, f"{row.output_tokens_per_s:.1f}", f"{row.max_late_ms:.0f}"
        )
    return [table, _goodput_line(rows)]


def _goodput_line(rows: Sequence[RateRow]) -> str:
    best = best_rate(rows)
    if best is None:
        return f"goodput: none of these rates has {100 * CARRIED:.0f} % of its requests in time"
    line = f"goodput: {best.rate:g} requests/s, {best.output_tokens_per_s:.1f} output tokens/s"
    price = best.cost_per_million_output_tokens
    return line if price is None else f"{line}; a million output tokens cost {price:.2f}"


def _cells(seen: Spread) -> list[str]:
    ms = (seen.mean_ms, seen.p50_ms, seen.p95_ms, seen.p99_ms)
    p999 = "" if seen.p999_ms is None else f"{seen.p999_ms:.1f}"
    return [str(seen.count), *(f"{value:.1f}" for value in ms), p999, f"{seen.max_ms:.1f}"]


def _or_unknown(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.0f}"
