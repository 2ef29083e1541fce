"""Pairs over NCCL: from one GPU's memory to another's. Which way it took is read from NCCL's own log."""

import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.store import PairStore

# Torch's own watchdog would end the process for one peer's death; a pair's end is ours to handle.
_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_POLL_S = 0.0002
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")


def prepare_environment() -> None:
    """Before torch makes the first group of a process; what an operator has set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "NCCL_DEBUG" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="splitserve-nccl-"))
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,P2P,SHM,NET"
        os.environ["NCCL_DEBUG_FILE"] = str(folder / "log.%p")


class NCCLCommunicator:
    def __init__(self, plan: PairPlan, store: PairStore) -> None:
        prepare_environment()
        from torch.distributed import ProcessGroupNCCL

        self._plan = plan
        self._is_aborted = False
        with torch.cuda.device(plan.device):
            self._stream = torch.cuda.Stream(plan.device)  # type: ignore[no-untyped-call]
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=plan.timeout_s)
            log = _log_file()
            start = log.stat().st_size if log is not None and log.is_file() else 0
            # Torch's stubs know none of its messages.
            self._group: Any = ProcessGroupNCCL(store, plan.rank, 2, options)
            # NCCL connects with the first message: better now than under a request.
            greeting = torch.zeros(plan.block_nbytes, dtype=torch.uint8, device=plan.device)
            if plan.rank == SOURCE:
                self.send([greeting])
            else:
                self.receive(1)
        self._way = _way_taken(log, start)

    @property
    def path(self) -> str:
        return f"nccl {self._way}".rstrip()

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        with torch.cuda.device(self._plan.device), torch.cuda.stream(self._stream):
            self._group._start_coalescing(self._plan.device)
            for block in blocks:
                self._group.send([block], SINK, 0)
            self._group._end_coalescing(self._plan.device).wait()
            self._reach_here()

    def receive(self, count: int) -> torch.Tensor:
        with torch.cuda.device(self._plan.device), torch.cuda.stream(self._stream):
            staging = torch.empty((count, self._plan.block_nbytes), dtype=torch.uint8, device=self._plan.device)
            self._group._start_coalescing(self._plan.device)
            for row in staging:
                self._group.recv([row], SOURCE, 0)
            self._group._end_coalescing(self._plan.device).wait()
            self._reach_here()
        return staging

    def _reach_here(self) -> None:
        """Waits until the stream has done all of this. A dead peer's kernel waits for ever: hence the deadline."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        deadline = time.monotonic() + self._plan.timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if self._is_aborted:
                raise RuntimeError("the pair was aborted")
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"no progress for {self._plan.timeout_s:g} s")
            time.sleep(_POLL_S)

    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            self._group.abort()


def _log_file() -> Path | None:
    """Of this process; None where an operator has sent NCCL's log elsewhere."""
    name = os.environ.get("NCCL_DEBUG_FILE", "")
    return Path(name.replace("%p", str(os.getpid()))) if name and "%h" not in name else None


def _way_taken(log: Path | None, start: int) -> str:
    text = ""
    if log is not None:
        with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(start)
            text = lines.read()
    return way_of(text)


def way_of(text: str) -> str:
    """From NCCL's log: the ways that the channels between ranks 0 and 1 took, such as "P2P/CUMEM"; "" if it is not
    told."""
    ways = {match[3] for match in _CHANNEL.finditer(text) if {match[1], match[2]} == {"0", "1"}}
    return ", ".join(sorted(ways))
