"""Pairs over Gloo: host memory over TCP, for machines without GPUs and for testing what NCCL's pairs share with it."""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo

from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.store import PairStore

_TAG = 0


class GlooCommunicator:
    def __init__(self, plan: PairPlan, store: PairStore) -> None:
        self._plan = plan
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=plan.timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=plan.host)]
        options._threads = 1
        self._group = ProcessGroupGloo(store, plan.rank, 2, options)

    @property
    def path(self) -> str:
        return "gloo"

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        # A block on a GPU is sent from a copy in host memory.
        staged = [block.cpu() for block in blocks]
        works = [self._group.send([block], SINK, _TAG) for block in staged]
        for work in works:
            work.wait()

    def receive(self, count: int) -> torch.Tensor:
        staging = torch.empty((count, self._plan.block_nbytes), dtype=torch.uint8)
        works = [self._group.recv([row], SOURCE, _TAG) for row in staging]
        for work in works:
            work.wait()
        return staging

    def abort(self) -> None:
        """Gloo wakes nobody who waits: they wait until their timeout, or until the peer's process ends."""
