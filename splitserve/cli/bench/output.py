"""Where every benchmark's words and figures go."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from splitserve.service.errors import InvalidRequest

if TYPE_CHECKING:
    from splitserve.bench.report import Report

# What is measured goes to stdout, what happens meanwhile to stderr.
MESSAGES = Console(stderr=True, markup=False, highlight=False)
RESULTS = Console(markup=False, highlight=False)


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
