"""How long work on a model tells what it is doing: one callback, and a bar for terminals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

Progress = Callable[[str, int, int], None]


def report(progress: Progress | None, stage: str, done: int, total: int) -> None:
    """Calls `progress`, if there is one, with the stage's name, the units done and all units (0: not known)."""
    if progress is not None:
        progress(stage, done, total)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error, one line per stage; on a pipe it writes nothing until the end."""
    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=None)
        bar.update(tasks[stage], completed=done, total=total or None)

    with bar:
        yield update
