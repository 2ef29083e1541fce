"""Two ranks that move blocks: rank 0 sends, rank 1 receives, each in the order that the headers say.

Made and used by one lane's thread, which may wait. Every message is one block of the size that both agreed on: one that
is larger than the buffer posted for it ends the process in Gloo, so nothing is posted for any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtransfer.pairs.store import PairStore

SOURCE, SINK = 0, 1


@dataclass(frozen=True)
class PairPlan:
    """What a pair is to be. `host` is the address that Gloo listens on; seconds are those without progress."""

    transport: str
    rank: int
    block_nbytes: int
    device: torch.device
    host: str
    timeout_s: float


class Communicator(Protocol):
    """Any failure is a RuntimeError, and the end of this pair: not of one transfer, and not of another pair."""

    @property
    def path(self) -> str:
        """The transport, and the way it found: "gloo", "nccl P2P/IPC"."""
        ...

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        """uint8 `[block_nbytes]` each; on return none of them is read any more."""
        ...

    def receive(self, count: int) -> torch.Tensor:
        """So many blocks as uint8 `[count, block_nbytes]`, in memory of their own that nobody else writes to."""
        ...

    def abort(self) -> None:
        """From any thread: makes a running call fail soon, if that can be done."""
        ...


def why_not(transport: str, device: torch.device) -> str | None:
    """None where pairs of this transport can be made, else the reason why not."""
    if not torch.distributed.is_available():
        return "this build of torch has no torch.distributed"
    if transport == "gloo":
        return None if torch.distributed.is_gloo_available() else "this build of torch has no Gloo"
    if device.type != "cuda":
        return f"the pool is on {device.type}, not on a GPU"
    return None if torch.distributed.is_nccl_available() else "this build of torch has no NCCL"


def make_communicator(plan: PairPlan, store: PairStore) -> Communicator:
    """Waits for the peer to do the same. RuntimeError when it does not, or the two cannot reach each other."""
    # Late: each loads a library that the other roads do not need.
    if plan.transport == "gloo":
        from kvtransfer.pairs.gloo import GlooCommunicator

        return GlooCommunicator(plan, store)
    from kvtransfer.pairs.nccl import NCCLCommunicator

    return NCCLCommunicator(plan, store)
