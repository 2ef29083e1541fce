"""Pairs over NCCL: from one GPU's memory to another's. Which way it took is read from NCCL's own log.

Two things are torch's to forbid, and are turned off before its first group: a watchdog that ends the process for one
peer's death, and a record of every message.
"""

import atexit
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
import torch

from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.store import PairStore

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # With this torch starts no watchdog at all, whose end after an error would take a minute. Nobody blocks in a wait
    # for all that: a message is looked at until it is done.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
}
_TAG = 0
_POLL_S = 0.0002
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")

_environment_lock = threading.Lock()


def prepare_environment() -> None:
    """Before torch makes the first group of a process, best while it has one thread; what an operator has set stays."""
    with _environment_lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if "NCCL_DEBUG" not in os.environ:
            folder = Path(tempfile.mkdtemp(prefix="splitserve-nccl-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,P2P,SHM,NET"
            os.environ["NCCL_DEBUG_FILE"] = str(folder / "log.%p")


class NCCLCommunicator:
    """Forming has no time limit of its own where the peer freezes in the middle of it: NCCL waits without one."""

    def __init__(self, plan: PairPlan, store: PairStore) -> None:
        prepare_environment()
        from torch.distributed import ProcessGroupNCCL

        self._plan = plan
        self._device = _with_index(plan.device)
        self._is_aborted = False
        self._lock = threading.Lock()
        self._is_released = False
        # Torch orders messages behind the current stream, and the current stream behind messages: not the forward's.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=plan.timeout_s)
        log_file = _log_file()
        start = log_file.stat().st_size if log_file is not None and log_file.is_file() else 0
        # Torch's stubs know none of its messages.
        self._group: Any = ProcessGroupNCCL(store, plan.rank, 2, options)
        try:
            with torch.cuda.device(self._device):
                self._group.eager_connect_single_device(self._device)
        except RuntimeError as error:
            self._release()
            raise RuntimeError(_in_one_line(error)) from error
        # The two ranks know each other; the way between them is found with the first message, and not under a request.
        if plan.rank == SOURCE:
            self.send([torch.zeros(plan.block_nbytes, dtype=torch.uint8, device=self._device)])
        else:
            self.receive(1)
        self._way = _way_taken(log_file, start)

    @property
    def path(self) -> str:
        return f"nccl {self._way}".rstrip()

    def send(self, blocks: Sequence[torch.Tensor]) -> None:
        self._move(self._group.send, SINK, blocks)

    def receive(self, count: int) -> torch.Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            staging = torch.empty((count, self._plan.block_nbytes), dtype=torch.uint8, device=self._device)
        self._move(self._group.recv, SOURCE, staging.unbind())
        return staging

    def _move(self, operation: Callable[..., Any], peer: int, blocks: Sequence[torch.Tensor]) -> None:
        """A message for each block, all in one launch."""
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._group._start_coalescing()
                for block in blocks:
                    operation([block], peer, _TAG)
                self._await(self._group._end_coalescing())
        except RuntimeError as error:
            self._release()  # first: what NCCL has launched touches these blocks until then
            raise RuntimeError(_in_one_line(error)) from error

    def _await(self, work: Any) -> None:
        """A dead peer's message waits for ever on the GPU: hence the deadline."""
        deadline = time.monotonic() + self._plan.timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress for {self._plan.timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._is_aborted:  # which completes messages, too
            raise RuntimeError("the pair was aborted")
        work.wait()  # is done at once, and raises what NCCL has found meanwhile

    def abort(self) -> None:
        self._is_aborted = True
        # NCCL may take its time, and the caller has other links.
        threading.Thread(target=self._release, name="kv-nccl-abort", daemon=True).start()

    def _release(self) -> None:
        """Returns when NCCL touches no block any more, whoever asked for it first."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
            try:
                self._group.abort()
            except RuntimeError as error:
                log.error("NCCL does not let go of a pair", why=_in_one_line(error))


def _with_index(device: torch.device) -> torch.device:
    """NCCL's communicators are found by it."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _in_one_line(error: Exception) -> str:
    """NCCL's own reason comes last, after torch's words on it; what torch adds for its developers is left out."""
    text, _, _ = str(error).partition("Exception raised from")
    return " ".join(text.split()) or type(error).__name__


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
    told. Of pairs of one process that form at the same moment, those of all."""
    ways = {match[3] for match in _CHANNEL.finditer(text) if {match[1], match[2]} == {"0", "1"}}
    return ", ".join(sorted(ways))
