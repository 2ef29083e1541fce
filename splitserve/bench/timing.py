"""How long things take: several tasks in turns, so that a noisy machine disturbs all of them alike.

Called by every benchmark; keeps no state.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from splitserve.engine.stopwatch import Stopwatch, Task


@dataclass(frozen=True)
class Span:
    """Milliseconds over all rounds. The least is what the machine can do, the median what it did."""

    min: float
    median: float

    def __add__(self, other: "Span") -> "Span":
        return Span(self.min + other.min, self.median + other.median)

    def scaled(self, factor: float) -> "Span":
        return Span(self.min * factor, self.median * factor)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often to measure: at least and at most so many rounds, and in between for `seconds`."""

    at_least: int
    at_most: int
    seconds: float


def measure(tasks: Mapping[str, Task], watch: Stopwatch, rounds: Rounds) -> tuple[int, dict[str, Span]]:
    """Runs every task once per round, in order; returns the number of rounds and each task's times."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    done, started = 0, time.perf_counter()
    while done < rounds.at_least or (done < rounds.at_most and time.perf_counter() - started < rounds.seconds):
        for name, task in tasks.items():
            times[name].append(watch.milliseconds(task))
        done += 1
    return done, {name: Span(min(values), statistics.median(values)) for name, values in times.items()}
