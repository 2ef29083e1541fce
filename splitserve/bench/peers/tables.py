"""Peers as a table for a terminal. Pure functions."""

from collections.abc import Sequence

from rich.table import Table

from splitserve.bench.peers.run import PeerRow
from splitserve.bench.tables import new_column, new_table


def peer_tables(rows: Sequence[PeerRow]) -> list[Table | str]:
    """Who has figures, then who has none and why."""
    table = new_table("one stream and eight in tokens/s; gaps of one stream in ms; first tokens of a burst in s")
    for heading in (
        *("case", "b1", "b8", "quiet p50", "p99", "burst p50", "p99", "max", "p99 / quiet"),
        *("TTFT median", "max", "start s"),
    ):
        new_column(table, heading)
    for row in rows:
        if row.skipped is None:
            table.add_row(row.title, *_cells(row))
    return [table, *(f"{row.title}: skipped, {row.skipped}" for row in rows if row.skipped is not None)]


def _cells(row: PeerRow) -> list[str]:
    gaps = [""] * 6
    if row.burst is not None:
        quiet, burst = row.burst.quiet, row.burst.burst
        ms = (quiet.p50_ms, quiet.p99_ms, burst.p50_ms, burst.p99_ms, burst.max_ms)
        gaps = [*(f"{value:.1f}" for value in ms), f"{row.burst.ratio_p99:.2f}"]
    return [
        *_numbers(1, row.b1_tokens_per_s, row.b8_tokens_per_s),
        *gaps,
        *_numbers(2, row.ttft_median_s, row.ttft_max_s),
        *_numbers(1, row.start_s),
    ]


def _numbers(digits: int, *values: float | None) -> list[str]:
    return ["" if value is None else f"{value:.{digits}f}" for value in values]
