"""The report as a table for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from splitserve.bench.kv.measure import KVRow
from splitserve.bench.tables import new_column, new_table

_HEADINGS = ("case", "MiB", "GB/s", "/memcpy", "/floor", "source s/GB", "sink s/GB")


def kv_table(rows: Sequence[KVRow]) -> Table:
    """As wide as a terminal of 80 columns."""
    ours = ", ".join(dict.fromkeys(row.transport for row in rows if row.kind == "transfer"))
    table = new_table(f"blocks from process to process; of workers are {ours}")
    for heading in _HEADINGS:
        new_column(table, heading)
    for row in rows:
        table.add_row(
            f"{row.blocks} {row.transport}",
            f"{row.bytes / (1 << 20):.1f}",
            f"{row.gb_s:.2f}",
            *("" if share is None else f"{share:.2f}" for share in (row.of_memcpy, row.of_floor)),
            f"{row.source_cpu_s_per_gb:.2f}",
            "" if row.sink_cpu_s_per_gb is None else f"{row.sink_cpu_s_per_gb:.2f}",
        )
    return table
