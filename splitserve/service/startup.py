"""How the start of a process is told in one line, how long it took and which part of it took how long; and what keeps
the longest of these parts short, the imports.

A worker's front logs the line; `splitserve up` finds it again in the worker's output, whatever form the log has.
"""

import gc
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# What is shorter goes to "other": nobody waits for it.
_SHORT_S = 0.05
# So many containers more than at the last look; 700 by default. A few MB, if all of them were garbage.
_COLLECTED_AFTER = 10_000
_LINE = re.compile(r"started in [\d.]+ s: [^'\"\x1b]+")


def process_age_s() -> float:
    """Seconds since the kernel started this process, to some 10 ms: imports count, whatever they are."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Around the imports of a process that needs many modules: what they make is no garbage, now or ever.

    Looking for some among it takes a tenth of such a start, and later would hold up a step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """For a process that holds thousands of streams: what it has made by now is no garbage, and looking through all the
    streams for some each time a few hundred tokens wait in them takes longer than the tokens do."""
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)


def startup_line(total_s: float, part_seconds: Mapping[str, float], details: str) -> str:
    """Parts in the order given; what none of them accounts for is "other"."""
    shown = {part: seconds for part, seconds in part_seconds.items() if seconds >= _SHORT_S}
    shown["other"] = max(0.0, total_s - sum(shown.values()))
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in shown.items())
    return f"started in {total_s:.1f} s: {parts}; {details}"


def find_startup_line(output: Iterable[str]) -> str | None:
    """The newest such line in a process's output, without what a log puts around it."""
    found = [match.group() for line in output if (match := _LINE.search(line))]
    return found[-1] if found else None
