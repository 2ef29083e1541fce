"""What a pair over NCCL asks of torch, on a machine without a GPU: a library of fakes, and torch's own declarations."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.pairs import nccl
from kvtransfer.pairs.communicator import SINK, SOURCE, PairPlan
from kvtransfer.pairs.nccl import NCCLCommunicator
from kvtransfer.pairs.store import PairStore

NBYTES = 64
REFUSAL = RuntimeError(
    "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\nLast error:\nDuplicate GPU detected"
    "\nException raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error"
)


@dataclass
class Library:
    """Both ranks' groups, and how the fake behaves."""

    wire: "queue.SimpleQueue[torch.Tensor]" = field(default_factory=queue.SimpleQueue)
    groups: "list[FakeGroup]" = field(default_factory=list)
    is_open: threading.Event = field(default_factory=threading.Event)  # messages arrive
    refusal: RuntimeError | None = None
    failure: RuntimeError | None = None  # of a message
    abort: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.is_open.set()

    def make(self, store: PairStore, rank: int, size: int, options: Any) -> "FakeGroup":
        self.groups.append(FakeGroup(self, rank))
        return self.groups[-1]


class FakeWork:
    def __init__(self, group: "FakeGroup", done: Callable[[], None]) -> None:
        self._group, self._done, self._is_done = group, done, False

    def is_completed(self) -> bool:
        if self._group.library.is_open.is_set() and not self._is_done:
            self._done()
            self._is_done = True
        return self._is_done or self._group.num_aborts > 0

    def wait(self) -> bool:
        if self._group.library.failure is not None:
            raise self._group.library.failure
        return True


class FakeGroup:
    """Moves nothing but within a coalesced launch, as a pair must not without one: torch would connect once more."""

    def __init__(self, library: Library, rank: int) -> None:
        self.library, self.rank = library, rank
        self.connected: list[torch.device] = []
        self.num_aborts = 0
        self._launch: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)
        if self.library.refusal is not None:
            raise self.library.refusal

    def _start_coalescing(self) -> None:
        assert self._launch is None
        self._launch = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert (self.rank, peer, len(tensors)) == (SOURCE, SINK, 1)
        assert self._launch is not None
        self._launch.append((lambda tensor: self.library.wire.put(tensor.clone()), tensors[0]))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert (self.rank, peer, len(tensors)) == (SINK, SOURCE, 1)
        assert self._launch is not None
        self._launch.append((lambda tensor: tensor.copy_(self.library.wire.get(timeout=30)), tensors[0]))

    def _end_coalescing(self) -> FakeWork:
        launch, self._launch = self._launch, None
        assert launch

        def done() -> None:
            for operation, tensor in launch:
                operation(tensor)

        return FakeWork(self, done)

    def abort(self) -> None:
        self.num_aborts += 1
        self.library.abort()


class Options:
    _timeout = None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Library]:
    made = Library()
    fake = type("ProcessGroupNCCL", (), {"__new__": lambda cls, *args: made.make(*args), "Options": Options})
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name, value in nccl._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "log.%p"))
    yield made
    made.is_open.set()


def rank(which: int, timeout_s: float = 30.0) -> NCCLCommunicator:
    plan = PairPlan("nccl", which, NBYTES, torch.device("cpu"), "127.0.0.1", timeout_s)
    return NCCLCommunicator(plan, PairStore(lambda key, value: None, 1.0))


def blocks(*fills: int) -> list[torch.Tensor]:
    return [torch.full((NBYTES,), fill, dtype=torch.uint8) for fill in fills]


def test_blocks_are_lost_or_come_in_another_order(library: Library) -> None:
    source, sink = rank(SOURCE), rank(SINK)  # and a first message has gone from one to the other
    assert library.wire.empty()
    assert [group.connected for group in library.groups] == [[torch.device("cpu")]] * 2
    source.send(blocks(3, 1, 2))
    assert sink.receive(3)[:, 0].tolist() == [3, 1, 2]
    assert [group.num_aborts for group in library.groups] == [0, 0]


def test_torch_declares_its_messages_otherwise(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's groups are of the same class and cannot coalesce: they say so, and not that arguments are wrong."""
    alone = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroupGloo(alone, 0, 1, timeout=nccl.timedelta(seconds=5))
    monkeypatch.setattr(library, "make", lambda *_: group)
    with pytest.raises(RuntimeError, match="does not implement startCoalescing"):
        rank(SOURCE)


def test_refusal_loses_its_reason(library: Library) -> None:
    library.refusal = REFUSAL
    with pytest.raises(RuntimeError) as raised:
        rank(SOURCE)
    said = "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5 Last error: Duplicate GPU detected"
    assert str(raised.value) == said
    assert library.groups[0].num_aborts == 1  # else the group's end would throw where nobody can catch it


def test_dead_peer_is_waited_for(library: Library) -> None:
    source = rank(SOURCE, timeout_s=0.05)
    library.is_open.clear()
    with pytest.raises(RuntimeError, match=r"no progress for 0\.05 s"):
        source.send(blocks(1))
    assert library.groups[0].num_aborts == 1


def test_abort_wakes_nobody_or_holds_its_caller_up(library: Library) -> None:
    """Whoever waits hears of it; its blocks are let go when NCCL has let go, and the caller waits for neither."""
    source = rank(SOURCE)
    library.is_open.clear()
    may_end, ended = threading.Event(), queue.SimpleQueue[str]()
    library.abort = lambda: may_end.wait(30)

    def send() -> None:
        try:
            source.send(blocks(1))
        except RuntimeError as error:
            ended.put(f"{error}, {may_end.is_set()}")

    waiter = threading.Thread(target=send)
    waiter.start()
    source.abort()
    source.abort()
    while library.groups[0].num_aborts == 0:
        time.sleep(0.001)
    assert ended.empty()
    may_end.set()
    waiter.join(30)
    assert ended.get_nowait() == "the pair was aborted, True"
    assert library.groups[0].num_aborts == 1


def test_aborted_message_has_arrived(library: Library) -> None:
    """An abort completes what is under way: no byte of it has to be there."""
    sink = rank_after_greeting(library)
    library.is_open.clear()
    sink._is_aborted = True
    library.groups[0].num_aborts = 1
    with pytest.raises(RuntimeError, match="aborted"):
        sink.receive(1)


def rank_after_greeting(library: Library) -> NCCLCommunicator:
    library.wire.put(blocks(0)[0])
    return rank(SINK)


def test_library_that_does_not_let_go_ends_the_caller(library: Library) -> None:
    sink = rank_after_greeting(library)

    def fails() -> None:
        raise RuntimeError("Future for ProcessGroup abort timed out")

    library.abort, library.failure = fails, RuntimeError("remote process exited\nLast error:\nconnection closed")
    library.wire.put(blocks(0)[0])
    with pytest.raises(RuntimeError, match=r"^remote process exited Last error: connection closed$"):
        sink.receive(1)
    sink.abort()
    assert library.groups[0].num_aborts == 1


def test_operators_settings_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*nccl._ENVIRONMENT, "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"]
    for name in names:
        monkeypatch.setenv(name, "to be undone")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    folders: Sequence[Path] = []
    monkeypatch.setattr(nccl.atexit, "register", lambda function, folder, **_: folders.append(folder))
    nccl.prepare_environment()
    first = {name: os.environ[name] for name in names}
    nccl.prepare_environment()
    assert {name: os.environ[name] for name in names} == first
    assert first["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert first["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert [str(folder / "log.%p") for folder in folders] == [first["NCCL_DEBUG_FILE"]]
    folders[0].rmdir()
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "%h.log")
    nccl.prepare_environment()
    assert len(folders) == 1
    assert nccl._log_file() is None
