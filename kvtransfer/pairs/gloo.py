"""Pairs over Gloo: host memory over TCP, for machines without GPUs and for testing what NCCL's pairs share with it."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.store import PairStore

_TAG = 0


def new_group(store: Any, rank: int, host: str, timeout_s: float) -> Any:
    """One of two ranks, which listens on `host`. RuntimeError when the other does not come within the time."""
    # Torch's stubs know neither the options of a group nor its messages.
    library: Any = ProcessGroupGloo
    options = library._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [library.create_device(hostname=host)]
    options._threads = 1
    return library(store, rank, 2, options)


class GlooCommunicator:
    def __init__(self, plan: PairPlan, store: PairStore) -> None:
        self._plan = plan
        self._stream: torch.cuda.Stream | None = None
        self._group = new_group(store, plan.rank, plan.host, plan.timeout_s)

    @property
    def path(self) -> str:
        return "gloo"

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        staged = [self._in_host_memory(block) for block in blocks]
        _wait_for_all([self._group.send([block], SINK, _TAG) for block in staged])

    def receive(self, count: int) -> torch.Tensor:
        staging = torch.empty((count, self._plan.block_nbytes), dtype=torch.uint8)
        _wait_for_all([self._group.recv([row], SOURCE, _TAG) for row in staging])
        return staging

    def _in_host_memory(self, block: torch.Tensor) -> torch.Tensor:
        """A copy of a block on a GPU, made beside the forward."""
        if block.device.type != "cuda":
            return block
        if self._stream is None:
            self._stream = torch.cuda.Stream(block.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return block.cpu()

    def abort(self) -> None:
        """Gloo wakes nobody who waits: they wait until their timeout, or until the peer's process ends."""


def _wait_for_all(works: Sequence[Any]) -> None:
    """Raises the first failure once none of `works` touches its memory any more: the first to fail ends them all."""
    failure = ""
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            failure = failure or str(error)
    if failure:
        # Another error than the library's, whose traceback would keep the group, its threads and sockets.
        raise RuntimeError(failure)
