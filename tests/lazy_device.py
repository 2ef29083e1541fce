"""A device that does nothing until somebody waits for it: whoever forgets to wait gets old bytes."""

import threading
from collections.abc import Callable

import torch


class LazyDevice:
    """A `CopyLane` over host memory; the engine's work runs in order, when a copy waits for a mark behind it."""

    def __init__(self) -> None:
        self.num_done = 0
        self.engine_thread = threading.get_ident()
        self._work: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> object:
        assert threading.get_ident() == self.engine_thread
        return len(self._work)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: object) -> None:
        self.reach(after)
        target.copy_(source)

    def reach(self, mark: object) -> None:
        assert isinstance(mark, int)
        while self.num_done < mark:
            self._work[self.num_done]()
            self.num_done += 1
