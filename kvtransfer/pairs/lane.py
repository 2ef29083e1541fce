"""The thread of one link that may wait for the library: it forms the pair, then moves blocks in the order asked.

Made, asked and ended by the KV thread; what it tells goes through `tell`, from its own thread. It outlives its link for
as long as the library still waits; until then what it sends from stays untouched, what it receives into is its own.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from kvtransfer.pairs.communicator import Communicator, PairPlan
from kvtransfer.pairs.store import PairStore

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MakeCommunicator = Callable[[PairPlan, PairStore], Communicator]


@dataclass(frozen=True)
class Formed:
    """The pair can move blocks."""

    path: str


@dataclass(frozen=True)
class Arrived:
    """What the oldest unanswered `receive` was for."""

    frames: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Broken:
    """The last that a lane says, unless it was ended."""

    reason: str


@dataclass(frozen=True)
class Published:
    """A key of the rendezvous, for the peer."""

    key: str
    value: bytes


LaneNews = Published | Formed | Arrived | Broken


@dataclass(eq=False)
class LaneHandle:
    done: bool = False


@dataclass(frozen=True)
class _Send:
    blocks: Sequence[torch.Tensor]
    handle: LaneHandle


@dataclass(frozen=True)
class _Receive:
    count: int


class Lane:
    def __init__(
        self,
        plan: PairPlan,
        tell: "Callable[[Lane, LaneNews], None]",
        make: MakeCommunicator,
        form_timeout_s: float,
    ) -> None:
        """Begins at once."""
        self.store = PairStore(lambda key, value: self._say(Published(key, value)), form_timeout_s)
        self._plan = plan
        self._tell = tell
        self._make = make
        self._jobs: queue.SimpleQueue[_Send | _Receive | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by the lock: no job is put in after the thread has left.
        self._has_left = False
        self._is_ended = False
        self._communicator: Communicator | None = None
        self._thread = _LaneThread(target=self._run, name=f"kv-{plan.transport}-{plan.rank}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # as many threads as this process may have
            self._has_left = True
            self._tell(self, Broken(str(error)))

    # The KV thread's.

    def send(self, blocks: Sequence[torch.Tensor]) -> LaneHandle:
        handle = LaneHandle()
        with self._lock:
            if self._has_left or self._is_ended:
                handle.done = True
            else:
                self._jobs.put(_Send(blocks, handle))
        return handle

    def receive(self, count: int) -> None:
        with self._lock:
            if not self._has_left:
                self._jobs.put(_Receive(count))

    def end(self, reason: str) -> None:
        """Nothing is heard of it any more. What it sends is let go when the library has returned."""
        with self._lock:
            self._is_ended = True
            communicator = self._communicator
        self.store.end(reason)
        self._jobs.put(None)
        if communicator is not None:
            communicator.abort()

    def join(self, timeout_s: float) -> bool:
        """True once the thread has left, so that no memory is read or written any more."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The lane's own thread.

    def _run(self) -> None:
        job: _Send | _Receive | None = None
        try:
            communicator = self._make(self._plan, self.store)
            with self._lock:
                self._communicator = communicator
                is_wanted = not self._is_ended
            if not is_wanted:  # it was given up meanwhile, and whoever did so had nothing to abort
                communicator.abort()
                return
            self._say(Formed(communicator.path))
            while (job := self._jobs.get()) is not None and not self._is_ended:
                if isinstance(job, _Send):
                    communicator.send(job.blocks)
                    job.handle.done = True
                else:
                    rows = communicator.receive(job.count)
                    self._say(Arrived(list(rows)))
        except (RuntimeError, ValueError, OSError) as error:  # whatever the library makes of a peer's end
            self._say(Broken(_first_line(error)))
        except Exception as error:
            # No peer's doing, and no reason to leave a link that looks well.
            log.exception("a pair failed")
            self._say(Broken(f"{type(error).__name__}: {_first_line(error)}"))
        finally:
            self._leave(job)

    def _leave(self, job: _Send | _Receive | None) -> None:
        """`job` is the last one taken, done or not: nobody reads its blocks any more."""
        with self._lock:
            self._communicator = None
            self._has_left = True
        while True:
            if isinstance(job, _Send):
                job.handle.done = True
            if self._jobs.empty():
                return
            job = self._jobs.get_nowait()

    def _say(self, news: LaneNews) -> None:
        if not self._is_ended:
            self._tell(self, news)


class _LaneThread(threading.Thread):
    pass


def are_any_left() -> bool:
    """Some lane of this process still waits for its library: an orderly end of the interpreter could crash in it."""
    return any(isinstance(thread, _LaneThread) for thread in threading.enumerate())


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
