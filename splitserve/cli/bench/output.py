"""Where every benchmark's words and figures go."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from splitserve.service.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from splitserve.bench.report import Report

_WIDE = 200

# What is measured goes to stdout, what happens meanwhile to stderr.
MESSAGES = Console(stderr=True, markup=False, highlight=False)
RESULTS = Console(markup=False, highlight=False)
if not RESULTS.is_terminal:  # a file or a pipe: no column has to be cut off
    RESULTS.width = _WIDE


def require_writable(output: Path | None, flag: str = "--output") -> None:
    """Before minutes of measuring."""
    if output is not None and not output.absolute().parent.is_dir():
        raise InvalidRequest(f"{flag} {output}: there is no directory {output.absolute().parent}", field="output")


def save(report: "Report", output: Path | None) -> None:
    if output is None:
        return
    try:
        report.save(output)
    except OSError as error:
        raise InvalidRequest(f"--output {output}: {error}", field="output") from error


def tell(output: Path | None) -> None:
    if output is not None:
        MESSAGES.print(f"written to {output}")


def show(report: "Report", tables: "Sequence[Table | str]", output: Path | None) -> None:
    from splitserve.bench.tables import machine_line

    RESULTS.print(machine_line(report.machine), soft_wrap=True)
    for shown in tables:
        RESULTS.print(shown, soft_wrap=isinstance(shown, str))
    save(report, output)
    tell(output)
