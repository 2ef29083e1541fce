"""Pairs over Gloo: host memory over TCP, for machines without GPUs and for testing what NCCL's pairs share with it."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.store import PairStore

_TAG = 0


class GlooCommunicator:
    def __init__(self, plan: PairPlan, store: PairStore) -> None:
        self._plan = plan
        # Torch's stubs know neither the options of a group nor its messages.
        library: Any = ProcessGroupGloo
        options = library._Options()
        options._timeout = timedelta(seconds=plan.timeout_s)
        options._devices = [library.create_device(hostname=plan.host)]
        options._threads = 1
        self._group: Any = library(store, plan.rank, 2, options)

    @property
    def path(self) -> str:
        return "gloo"

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        # A block on a GPU is sent from a copy in host memory.
        staged = [block.cpu() for block in blocks]
        _wait_for_all([self._group.send([block], SINK, _TAG) for block in staged])

    def receive(self, count: int) -> torch.Tensor:
        staging = torch.empty((count, self._plan.block_nbytes), dtype=torch.uint8)
        _wait_for_all([self._group.recv([row], SOURCE, _TAG) for row in staging])
        return staging

    def abort(self) -> None:
        """Gloo wakes nobody who waits: they wait until their timeout, or until the peer's process ends."""


def _wait_for_all(works: Sequence[Any]) -> None:
    """Raises the first failure once none of `works` touches its memory any more: the first to fail ends them all."""
    failure: RuntimeError | None = None
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure
