"""The floor of what takes a pair: two ranks of Gloo or NCCL, a message for each block, and nothing else.

The bytes land where they belong; nobody checks them.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from kvtransfer.pairs.nccl import prepare_environment
from splitserve.bench.kv.pool import BenchPool
from splitserve.bench.kv.ways import PATIENCE_S
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.ports import LOOPBACK

_SOURCE, _SINK = 0, 1
_TAG = 0
_ACK_NBYTES = 8
# Torch's stubs know neither its groups' options nor their messages.
_distributed: Any = torch.distributed
_PATIENCE = timedelta(seconds=PATIENCE_S)


class RankReceiver:
    def __init__(self, pool: BenchPool, library: str) -> None:
        """`library` is "gloo" or "nccl"."""
        self._pool = pool
        self._store = _distributed.TCPStore(LOOPBACK, 0, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
        self._rank = _Rank(library, _SINK, self._store, pool.device)
        self._num_due, self._num_blocks = 0, 0

    @property
    def address(self) -> bytes:
        return str(self._store.port).encode()

    def prepare(self, transfer_ids: Sequence[str], num_blocks: int) -> None:
        self._rank.await_other()
        self._num_due, self._num_blocks = len(transfer_ids), num_blocks

    def receive(self) -> None:
        for _ in range(self._num_due):
            self._rank.receive(list(self._pool.rows[: self._num_blocks]))
            self._rank.acknowledge()

    def close(self) -> None:
        self._rank.close()


class RankSender:
    def __init__(self, pool: BenchPool, address: bytes, library: str) -> None:
        """Raises Unavailable where the two ranks cannot be formed, in the library's own words."""
        self._pool = pool
        store = _distributed.TCPStore(LOOPBACK, int(address), is_master=False, timeout=_PATIENCE)
        self._rank = _Rank(library, _SOURCE, store, pool.device)
        self._rank.await_other()

    def send(self, transfer_id: str, num_blocks: int) -> None:
        self._rank.send(list(self._pool.rows[:num_blocks]))
        self._rank.await_acknowledgement()

    def close(self) -> None:
        self._rank.close()


class _Rank:
    """Formed on a thread of its own: the library waits there for the other rank, and NCCL without a time limit."""

    def __init__(self, library: str, rank: int, store: Any, device: torch.device) -> None:
        self._library, self._other, self._device = library, 1 - rank, device
        self._word = torch.zeros(_ACK_NBYTES, dtype=torch.uint8, device=device)
        form = _form_gloo if library == "gloo" else _form_nccl
        self._formed = _in_background(lambda: form(store, rank, device))

    def await_other(self) -> None:
        try:
            self._formed.result(PATIENCE_S)
        except TimeoutError:
            raise Internal(f"no second rank of {self._library} within {PATIENCE_S:g} s") from None
        except (RuntimeError, ValueError) as error:
            raise Unavailable(f"{self._library}: {' '.join(str(error).split())}") from error

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._move(self._formed.result().send, rows)

    def receive(self, rows: Sequence[torch.Tensor]) -> None:
        self._move(self._formed.result().recv, rows)

    def acknowledge(self) -> None:
        self.send([self._word])

    def await_acknowledgement(self) -> None:
        self.receive([self._word])

    def _move(self, operation: Callable[..., Any], rows: Sequence[torch.Tensor]) -> None:
        move = self._move_at_once if self._device.type == "cuda" else self._move_each
        try:
            move(operation, rows)
        except RuntimeError as error:
            raise Internal(f"{self._library}: {' '.join(str(error).split())}") from error

    def _move_each(self, operation: Callable[..., Any], rows: Sequence[torch.Tensor]) -> None:
        for work in [operation([row], self._other, _TAG) for row in rows]:
            work.wait()

    def _move_at_once(self, operation: Callable[..., Any], rows: Sequence[torch.Tensor]) -> None:
        """In one launch. In the environment of a pair torch's own wait would look only every millisecond."""
        group = self._formed.result()
        group._start_coalescing()
        for row in rows:
            operation([row], self._other, _TAG)
        group._end_coalescing()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._formed.done() and self._formed.exception() is None:
            self._formed.result().abort()


def _form_gloo(store: Any, rank: int, device: torch.device) -> Any:
    from kvtransfer.pairs.gloo import new_group  # late: not every build of torch has it

    return new_group(store, rank, LOOPBACK, PATIENCE_S)


def _form_nccl(store: Any, rank: int, device: torch.device) -> Any:
    prepare_environment()  # of the pairs that follow in this process
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    group = _distributed.ProcessGroupNCCL(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group


def _in_background(work: Callable[[], Any]) -> "Future[Any]":
    """Unlike an executor's, the thread holds nobody's process up at its end."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
