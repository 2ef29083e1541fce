"""How long one thing takes on a device.

Used at a worker's start and by every benchmark; keeps no state.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Task = Callable[[], object]


@dataclass(frozen=True)
class Stopwatch:
    """Times what runs on `device`: by the wall, or by the processor's own account, which leaves out other programs."""

    device: torch.device
    is_cpu_time: bool = False

    def milliseconds(self, task: Task) -> float:
        """One run of `task`, until the device has finished it."""
        started = self.now_ms()
        task()
        return self.now_ms() - started

    def now_ms(self) -> float:
        """Once the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.process_time() if self.is_cpu_time else time.perf_counter()) * 1e3
