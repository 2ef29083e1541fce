"""What every benchmark leaves behind: what was measured, on which machine, with which arguments, row by row."""

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The processor's units that decide how fast a matmul can be.
_UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


@dataclass(frozen=True)
class Report:
    """`rows` hold plain values only: the JSON file is exactly this, and `summary`'s keys beside the others."""

    bench: str
    version: str
    date: str  # ISO 8601, UTC
    machine: Mapping[str, Any]
    args: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Raises OSError where the file cannot be written."""
        body = dataclasses.asdict(self)
        body = {key: value for key, value in body.items() if key not in ("summary", "rows")}
        body |= {**self.summary, "rows": self.rows}
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def make_report(
    bench: str,
    args: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    device: torch.device,
    summary: Mapping[str, Any] | None = None,
) -> Report:
    return Report(
        bench=bench,
        version=_own_version(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=describe_machine(device),
        args=args,
        rows=rows,
        summary=summary or {},
    )


def make_load_report(
    bench: str, settings: "DataclassInstance", rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> Report:
    """Of a benchmark whose work another process does: `settings` are its arguments."""
    args = dataclasses.asdict(settings)
    return make_report(bench, args, rows, device=torch.device("cpu"), summary=summary)


def _own_version() -> str:
    try:
        return version("splitserve")
    except PackageNotFoundError:
        return "source tree"  # run from there, without an installation


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What a reader has to know before comparing with another machine; `load_average` tells how quiet it was."""
    model, flags = _processor()
    machine: dict[str, Any] = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "flags": [unit for unit in _UNITS if unit in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["cuda"] = torch.version.cuda
    return machine


def _processor() -> tuple[str, frozenset[str]]:
    """Name and flags as the kernel has them; where it names no processor, the architecture."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip().lower(), value.strip())
    flags = found.get("flags") or found.get("features") or ""
    return found.get("model name") or platform.machine(), frozenset(flags.split())
