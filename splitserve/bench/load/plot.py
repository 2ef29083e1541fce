"""Pictures of what a benchmark of load has seen. matplotlib is an extra of its own: without it there are none."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.bench.load.gaps import gaps_of
from splitserve.service.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from splitserve.bench.load.arrivals import RateRow
    from splitserve.bench.load.burst import BurstResult, Measured

_INCHES = (11.0, 5.0)
_DOTS_PER_INCH = 120


def require_matplotlib() -> None:
    """Before minutes of measuring. Raises InvalidRequest where there is none."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InvalidRequest("a plot needs matplotlib: pip install 'splitserve[bench]'", field="plot") from None


def plot_burst(measured: "Measured", result: "BurstResult", title: str, path: Path) -> None:
    """Every token of the running streams as a dot: when it came, and how long after the one before it.

    Writes a PNG. Raises OSError where that cannot be.
    """
    figure, axes = _figure()
    for arrivals in measured.arrivals:
        gaps = list(gaps_of(arrivals))
        axes.scatter(
            [gap.end for gap in gaps], [1e3 * gap.seconds for gap in gaps], s=4, color="tab:blue", linewidths=0
        )
    for burst in measured.bursts:
        axes.axvspan(burst.window.start, burst.window.end, color="tab:red", alpha=0.15, linewidth=0)
    if measured.control is not None:
        axes.axvspan(measured.control.start, measured.control.end, color="tab:gray", alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel("ms since the token before")
    shaded = "bursts red" if measured.control is None else "bursts red, the matmul loop grey"
    axes.set_title(
        f"{title}: p99 {result.quiet.p99_ms:.1f} ms quiet, {result.burst.p99_ms:.1f} ms under bursts ({shaded})",
        fontsize=10,
    )
    _save(figure, path)


def plot_rates(rows: "Sequence[RateRow]", title: str, path: Path) -> None:
    """Requests per second that were answered, and answered within both goals, over those that arrived.

    Writes a PNG. Raises OSError where that cannot be.
    """
    figure, axes = _figure()
    ordered = sorted(rows, key=lambda row: row.rate)
    rates = [row.rate for row in ordered]
    axes.plot(rates, [row.requests_per_s for row in ordered], marker="o", color="tab:gray", label="answered")
    axes.plot(rates, [row.good_per_s for row in ordered], marker="o", color="tab:blue", label="answered in time")
    axes.set_xlabel("requests/s that arrive")
    axes.set_ylabel("requests/s")
    axes.set_title(title, fontsize=10)
    axes.legend()
    _save(figure, path)


def _figure() -> "tuple[Figure, Axes]":
    # No pyplot: it keeps figures, and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes: Axes = figure.subplots()
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
