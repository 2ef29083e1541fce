"""Reports as tables for a terminal. Pure functions; the command line prints what they return."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from splitserve.bench.gpu_pairs import PairRow
from splitserve.bench.parts import PARTS
from splitserve.bench.router import RouterRow
from splitserve.bench.steps import EngineRow
from splitserve.bench.tokens import TokensRow


def engine_tables(rows: Sequence[EngineRow]) -> list[Table]:
    """Steps beside their floors, then where the steps' time goes."""
    return [_floors(rows), _parts(rows)]


def _floors(rows: Sequence[EngineRow]) -> Table:
    table = new_table("step and floor in ms, the least of all rounds")
    for heading in ("case", "step", "median", "floor", "linear", "KV/attn", "ratio", "tokens/s"):
        new_column(table, heading)
    for row in rows:
        linear, other = row.floor_parts_ms.values()
        times = (row.step_ms.min, row.step_ms.median, row.floor_ms.min, linear.min, other.min)
        table.add_row(row.case, *(f"{ms:.1f}" for ms in times), f"{row.ratio:.2f}", f"{row.tokens_per_s:.0f}")
    return table


def _parts(rows: Sequence[EngineRow]) -> Table:
    table = new_table("where a step goes, in ms, one instrumented run; and choosing its tokens")
    for heading in ("case", *PARTS, "greedy", "top_p"):
        new_column(table, heading)
    for row in rows:
        parts = [f"{row.parts_ms[part]:.1f}" for part in PARTS]
        table.add_row(row.case, *parts, *(f"{span.min:.1f}" for span in row.sampler_ms.values()))
    return table


def gpu_tables(tokens: Sequence[TokensRow], pairs: Sequence[PairRow], steps: Sequence[EngineRow]) -> list[Table | str]:
    """Prompts and whether their outputs are transformers', then blocks between two ranks, then the steps."""
    table = new_table("greedy tokens of the cluster and of transformers, float32")
    for heading in ("case", "output tokens", "ties", "equal", "first difference", "margin"):
        new_column(table, heading)
    for row in tokens:
        position = "" if row.first_difference is None else str(row.first_difference)
        margin = "" if row.margin is None else f"{row.margin:.2g}"
        equal = "yes" if row.is_equal else "NO"
        counts = (str(row.output_tokens), str(row.ties))
        table.add_row(f"prompt of {row.prompt_tokens}", *counts, equal, position, margin)
    speed = new_table("steps of the engine, the least of all rounds")
    for heading in ("case", "step ms", "median", "tokens/s", "TFLOP/s", "floor ms", "ratio"):
        new_column(speed, heading)
    for step in steps:
        times = (f"{step.step_ms.min:.2f}", f"{step.step_ms.median:.2f}")
        rates = (f"{step.tokens_per_s:.0f}", f"{step.gflop_s / 1e3:.3g}")
        speed.add_row(step.case, *times, *rates, f"{step.floor_ms.min:.2f}", f"{step.ratio:.2f}")
    return [table, *_pairs(pairs), speed]


def _pairs(rows: Sequence[PairRow]) -> list[Table | str]:
    """What was answered, then in a line each what was not."""
    table = new_table("blocks by two ranks")
    for heading in ("case", "path", "MiB", "GB/s", "equal"):
        new_column(table, heading)
    for row in rows:
        size = "" if row.bytes is None else f"{row.bytes / (1 << 20):.1f}"
        rate = "" if row.gb_s is None else f"{row.gb_s:.2f}"
        equal = "" if row.is_equal is None else "yes" if row.is_equal else "NO"
        table.add_row(row.case, row.path or "refused", size, rate, equal)
    return [table, *(f"{row.case}: {row.refusal}" for row in rows if row.refusal)]


def router_table(rows: Sequence[RouterRow]) -> Table:
    table = new_table("one router process: as fast as it can, then at half that rate")
    for heading in (
        *("case", "tokens/s", "of a core", "cpu us/token", "tokens/chunk"),
        *("half: cpu us/token", "tokens/chunk", "p50 ms", "p99 ms", "MiB", "KiB/stream", "opening: cpu ms"),
    ):
        new_column(table, heading)
    for row in rows:
        table.add_row(
            f"{row.edge} {row.streams}",
            *(f"{row.tokens_per_s:.0f}", f"{row.core_share:.2f}", f"{row.cpu_us_per_token:.0f}"),
            *(f"{row.tokens_per_chunk:.2f}", f"{row.half_load_cpu_us_per_token:.0f}"),
            *(f"{row.half_load_tokens_per_chunk:.2f}", f"{row.latency_ms_p50:.1f}", f"{row.latency_ms_p99:.1f}"),
            f"{row.memory_mib:.0f}",
            *(
                "" if cost is None else f"{cost:.1f}"
                for cost in (row.memory_kib_per_stream, row.opening_cpu_ms_per_stream)
            ),
        )
    return table


def new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def new_column(table: Table, heading: str) -> None:
    table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)


def rates(rows: Sequence[EngineRow]) -> list[str]:
    """What the floors were made of, in a sentence each."""
    reads = [row.read_gb_s for row in rows if row.read_gb_s is not None]
    best = max((row for row in rows if row.matmul_gflop_s is not None), key=_rate, default=None)
    lines = []
    if reads:
        lines.append(f"KV bytes are counted at the bandwidth of reading, {min(reads):.1f} to {max(reads):.1f} GB/s.")
    if best is not None:
        lines.append(f"Attention is counted at {_rate(best):.0f} GFLOP/s, the best batched matmul ({best.matmul}).")
    return lines


def _rate(row: EngineRow) -> float:
    return row.matmul_gflop_s or 0.0


def machine_line(machine: Mapping[str, object]) -> str:
    flags = " ".join(map(str, machine["flags"])) if isinstance(machine["flags"], list) else ""
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores ({flags})"
    threads = f"{machine['threads']} threads" if machine["threads"] != 1 else "1 thread"
    return f"{where}; torch {machine['torch']}, {threads}, load {machine['load_average']}"
