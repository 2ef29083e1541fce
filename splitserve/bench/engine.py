"""`splitserve bench engine`: each step beside its floor, and where the rest goes.

From what was asked for to a report. The command line calls it; nothing outlives the call.
"""

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

import psutil
import torch

from splitserve.bench.progress import Say
from splitserve.bench.report import Report, make_report
from splitserve.bench.steps import EngineRow, StepBench
from splitserve.bench.workload import BLOCK_SIZE, Case, choose_cases, fill_with_noise
from splitserve.engine.device import choose_device
from splitserve.engine.layout import KVLayout
from splitserve.engine.loading import load_runner, resolve_dtype
from splitserve.engine.runner import ModelRunner
from splitserve.engine.stopwatch import Stopwatch
from splitserve.models.cache import cache_root
from splitserve.models.description import ModelDescription
from splitserve.models.locate import locate_model
from splitserve.models.progress import progress_bar
from splitserve.service.errors import InvalidRequest
from splitserve.service.huge_pages import huge_page_nbytes


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """As the command line has them; `chunk` is how many tokens of a prompt one forward computes."""

    model: str | None
    revision: str | None
    dtype: str
    device: str
    threads: int
    decode: str | None
    prefill: str | None
    chunk: int
    clock: Literal["wall", "cpu"]
    is_quick: bool


def run_engine_bench(
    settings: EngineSettings, say: Say, keep: Callable[[Report], None]
) -> tuple[Report, list[EngineRow]]:
    """`say` is told what goes on, and `keep` given the report after each case, for none to be lost.

    Raises InvalidRequest for what cannot be measured here. A KeyboardInterrupt ends it after the cases that are done;
    the report's "cases" tells how many were asked for.
    """
    device = find_device(settings.device)
    if settings.clock == "cpu" and (settings.threads > 1 or device.type != "cpu"):
        raise InvalidRequest("--clock cpu adds up all threads' time: it is for one thread on the cpu", field="clock")
    with progress_bar() as progress:
        description = locate_model(settings.model, revision=settings.revision, progress=progress)
    torch.set_num_threads(settings.threads)
    cases = choose_cases(settings.decode, settings.prefill, description.max_model_len)
    try:
        runner = load_for(description, cases, dtype=settings.dtype, device=device, say=say)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    stopwatch = Stopwatch(device, is_cpu_time=settings.clock == "cpu")
    steps = StepBench(runner, stopwatch, chunk=settings.chunk, is_quick=settings.is_quick)
    say(f"measuring for about {max(1, round(steps.expected_minutes(cases)))} min")
    rows: list[EngineRow] = []
    report = _report(settings, description, cases, runner, rows)
    with suppress(KeyboardInterrupt):
        for number, case in enumerate(cases, 1):
            row = steps.run(case)
            rows.append(row)
            say(f"{number} of {len(cases)}: {case}: {row.step_ms.min:.1f} ms, {row.ratio:.2f} times its floor")
            report = _report(settings, description, cases, runner, rows)
            keep(report)
    return report, rows


def _report(
    settings: EngineSettings,
    description: ModelDescription,
    cases: Sequence[Case],
    runner: ModelRunner,
    rows: Sequence[EngineRow],
) -> Report:
    args = asdict(settings) | {
        "cases": len(cases),
        "model": description.name,
        "dtype": runner.layout.dtype,
        "attention": runner.report.attention,
        "linear": runner.report.linear,
        "layers": str(runner.report.layers),
        "recompute_exact": runner.recompute_exact,
        "peak_memory_gib": round(_peak_memory() / 2**30, 2),
        "huge_pages_gib": round(huge_page_nbytes() / 2**30, 2),
    }
    return make_report("engine", args, [asdict(row) for row in rows], device=runner.pool.tensor.device)


def find_device(name: str) -> torch.device:
    """As `choose_device`; raises InvalidRequest."""
    try:
        return choose_device(name)
    except ValueError as error:
        raise InvalidRequest(str(error), field="device") from error


def load_for(
    description: ModelDescription, cases: Sequence[Case], *, dtype: str, device: torch.device, say: Say
) -> ModelRunner:
    """A runner whose pool holds the largest case, filled with noise. ValueError for a model that cannot be served."""
    dtype = resolve_dtype(dtype, str(device))
    layout = KVLayout(description.num_layers, description.num_kv_heads, description.head_dim, BLOCK_SIZE, dtype)
    # Every sequence of the largest case has blocks of its own: shared ones would stay in a cache.
    pool_nbytes = max(case.batch * layout.blocks_for(case.context) for case in cases) * layout.block_nbytes
    free_nbytes = _free_memory(device)
    if pool_nbytes > free_nbytes:
        raise ValueError(
            f"the largest case needs {pool_nbytes / 2**30:.1f} GiB of KV, {free_nbytes / 2**30:.1f} GiB are free: "
            "--decode and --prefill choose smaller ones"
        )
    say(f"{description.name}, {dtype}; the KV pool of the largest case takes {pool_nbytes / 2**30:.2f} GiB")
    runner = load_runner(
        description.directory,
        dtype=dtype,
        device=str(device),
        block_size=BLOCK_SIZE,
        kv_cache_bytes=pool_nbytes,
        progress=say,
        kernel_folder=cache_root() / "kernels",
    )
    fill_with_noise(runner)
    return runner


def _free_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else psutil.virtual_memory().available


def _peak_memory() -> int:
    """The most bytes that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
