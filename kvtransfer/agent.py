"""The KV thread of one process and its public face: every method may be called from any thread and returns at once.

Built by a worker's engine process, which owns it. The thread owns the carrier's sockets and all protocol state;
requests reach it through a queue, outcomes come back as events. Each `expect` and each `open` is answered by exactly
one terminal event: until then the blocks named belong to the KV thread (sink) or stay pinned for it (source).
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from kvtransfer.carrier import Carrier, LinkId, SendHandle
from kvtransfer.context import Context
from kvtransfer.counters import Counters, KVStats
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import (
    AgentStopped,
    FailureReason,
    KVEvent,
    Side,
    TransferAcked,
    TransferComplete,
    TransferFailed,
)
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.frames import Frame
from kvtransfer.messages import AnyMessage, encode
from kvtransfer.node import Node
from kvtransfer.settings import KVSettings
from kvtransfer.store import BlockStore
from kvtransfer.ticket import Ticket
from splitserve.service.errors import Internal, InvalidRequest, Unavailable

log = structlog.get_logger(__name__)


class KVAgent:
    def __init__(
        self,
        *,
        worker_id: str,
        fingerprint: Fingerprint,
        store: BlockStore,
        carrier: Carrier,
        settings: KVSettings,
        on_event: Callable[[KVEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_event` is called in the KV thread and must not block; `carrier` is not yet started."""
        self._worker_id = worker_id
        self._carrier = carrier
        self._on_event = on_event
        self._counters = Counters()
        self._outbox = _Outbox(carrier, self._emit)
        context = Context(
            worker_id=worker_id,
            fingerprint=fingerprint,
            store=store,
            outbox=self._outbox,
            settings=settings,
            counters=self._counters,
            clock=clock,
        )
        self._store = store
        self._node = Node(context, carrier.connect)
        self._lock = threading.Lock()
        # Guarded by the lock: the queue to the KV thread, the transfers without a terminal event, whether it runs.
        self._commands: deque[Callable[[], None]] = deque()
        self._live: set[tuple[Side, str]] = set()
        self._is_open = False
        self._is_closing = False
        self._pid = 0
        self._num_turns = 0
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-{worker_id}", daemon=True)

    # Lifetime.

    def start(self) -> None:
        """Binds the endpoint. Raises Unavailable when it cannot."""
        self._pid = os.getpid()
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def close(self) -> None:
        """Fails what is open, ends all links, waits for the thread. Every terminal event has been given on return."""
        if self._is_forked:
            return  # thread and sockets are the parent's
        self._is_closing = True
        self._carrier.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def endpoint(self) -> KVEndpoint:
        """What peers dial; valid after `start`."""
        return self._carrier.endpoint

    @property
    def num_turns(self) -> int:
        """Rises every half a second at least while the KV thread lives."""
        return self._num_turns

    def stats(self) -> KVStats:
        return self._counters.snapshot()

    # Requests to the KV thread.

    def set_peers(self, peers: Mapping[str, KVEndpoint]) -> None:
        """The sinks that we may send to, by worker id. Links to all others end."""
        others = {worker_id: endpoint for worker_id, endpoint in peers.items() if worker_id != self._worker_id}
        self._submit(partial(self._node.dialer.set_peers, others))

    def expect(self, transfer_id: str, block_ids: Sequence[int], num_cached_blocks: int, timeout_s: float) -> None:
        """Sink: blocks num_cached_blocks.. of `block_ids` (position = logical index) are to be filled.

        Their ownership passes to the KV thread until the terminal event. `timeout_s` limits the time without progress.
        """
        wanted = block_ids[num_cached_blocks:] if num_cached_blocks >= 0 else ()
        if not 0 <= num_cached_blocks <= len(block_ids) or len(set(wanted)) != len(wanted):
            counts = f"{num_cached_blocks} cached of {len(block_ids)} blocks"
            raise InvalidRequest(f"transfer {transfer_id}: {counts}, or a repeated block id", field="block_ids")
        self._store.lend(wanted)
        request = partial(self._node.sink.expect, transfer_id, tuple(block_ids), num_cached_blocks, timeout_s)
        self._begin(Side.SINK, transfer_id, request)

    def open(self, ticket: Ticket) -> None:
        """Source: begins a transfer; it waits a short while for a link to the sink if there is none yet."""
        self._begin(Side.SOURCE, ticket.transfer_id, partial(self._node.source.open, ticket))

    def send(self, transfer_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        """Source: (logical index, block id) pairs, each index once. The blocks stay pinned until the terminal event."""
        self._store.lend([block_id for _, block_id in blocks])
        self._submit(partial(self._node.source.send, transfer_id, tuple(blocks)))

    def finish(self, transfer_id: str, keys: list[bytes], payload: bytes) -> None:
        """Source: nothing more to send. `keys` has one key for each of the ticket's num_blocks, cached ones too."""
        self._submit(partial(self._node.source.finish, transfer_id, list(keys), payload))

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Either side. Answered by the terminal event; a transfer that has had its own is left alone."""
        self._submit(partial(self._cancel, transfer_id, reason))

    def _cancel(self, transfer_id: str, reason: str) -> None:
        self._node.source.cancel(transfer_id, reason)
        self._node.sink.cancel(transfer_id, reason)

    def _begin(self, side: Side, transfer_id: str, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_open or self._is_forked:
                raise Unavailable("no KV thread runs in this process", reason="KV_THREAD_CLOSED")
            if (side, transfer_id) in self._live:
                raise Internal(f"transfer {transfer_id} is already open", reason="TRANSFER_EXISTS")
            self._live.add((side, transfer_id))
            self._commands.append(command)
        self._carrier.wake()

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_open or self._is_forked:
                return  # everything has had its terminal event
            self._commands.append(command)
        self._carrier.wake()

    @property
    def _is_forked(self) -> bool:
        """A child has neither the thread nor usable sockets; it has to build an agent of its own."""
        return self._pid not in (0, os.getpid())

    # The KV thread.

    def _run(self) -> None:
        try:
            self._carrier.start()
        except Exception as error:
            self._start_error = error
            self._started.set()
            return
        with self._lock:
            self._is_open = True
        self._started.set()
        failure = ""
        try:
            while not self._is_closing:
                self._step()
        except Exception as error:
            log.exception("kv thread failed", worker_id=self._worker_id)
            failure = f"{type(error).__name__}: {error}"
        self._shut_down()
        if failure:
            self._emit(AgentStopped(failure))

    def _step(self) -> None:
        self._num_turns += 1
        events = self._carrier.poll(self._node.poll_interval())
        # Requests first: an expectation is queued before its ticket leaves, so it must be known before blocks are read.
        self._run_commands()
        ended = self._apply_cuts()
        for event in events:
            if event.link not in ended:
                self._node.handle(event)
                ended |= self._apply_cuts()
        self._node.tick()
        self._apply_cuts()

    def _run_commands(self) -> None:
        while True:
            with self._lock:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _apply_cuts(self) -> set[LinkId]:
        """Ends the links that the protocol gave up, which may make it give up more."""
        ended: set[LinkId] = set()
        while self._outbox.cuts:
            link, reason = self._outbox.cuts.popleft()
            if link not in ended:
                ended.add(link)
                self._carrier.disconnect(link)
                self._node.lost(link, reason)
        return ended

    def _shut_down(self) -> None:
        with self._lock:
            self._is_open = False
        try:
            self._run_commands()  # what was asked before the end is answered too
        except Exception:
            log.exception("kv request failed while closing", worker_id=self._worker_id)
        self._carrier.close()
        self._node.sink.close()
        self._node.source.close()
        with self._lock:
            forgotten = list(self._live)
        for side, transfer_id in forgotten:  # only after an error: requests that were never carried out
            self._emit(TransferFailed(transfer_id, side, FailureReason.SHUTDOWN, "the KV thread ended by an error"))

    def _emit(self, event: KVEvent) -> None:
        match event:
            case TransferComplete():
                self._end(Side.SINK, event.transfer_id)
                path = self._counters.peer(event.source_worker_id).path
                _log_transfer("received", event, peer=event.source_worker_id, path=path)
            case TransferAcked():
                self._end(Side.SOURCE, event.transfer_id)
                path = self._counters.peer(event.sink_worker_id).path
                _log_transfer("sent", event, peer=event.sink_worker_id, path=path)
            case TransferFailed():
                self._end(event.side, event.transfer_id)
                # A client that leaves is no trouble; what fails by itself is.
                write = log.info if event.reason is FailureReason.CANCELLED else log.warning
                write(
                    "kv transfer failed",
                    transfer_id=event.transfer_id,
                    side=event.side.value,
                    reason=event.reason.value,
                    detail=event.detail,
                )
            case _:
                log.info("kv link", event_type=type(event).__name__, worker_id=self._worker_id, change=str(event))
        try:
            self._on_event(event)
        except Exception:
            # The owner's mistake must not end the other transfers.
            log.exception("kv event handler failed", event_type=type(event).__name__)

    def _end(self, side: Side, transfer_id: str) -> None:
        with self._lock:
            self._live.discard((side, transfer_id))


def _log_transfer(what: str, event: TransferComplete | TransferAcked, *, peer: str, path: str) -> None:
    log.info(
        f"kv blocks {what}",
        transfer_id=event.transfer_id,
        peer=peer,
        **({"path": path} if path else {}),
        num_bytes=event.num_bytes,
        seconds=round(event.seconds, 6),
        mb_per_s=round(event.num_bytes / event.seconds / 1e6, 1) if event.seconds > 0 else 0.0,
    )


class _Outbox:
    """Carries out what the protocol machines ask, in the KV thread."""

    def __init__(self, carrier: Carrier, emit: Callable[[KVEvent], None]) -> None:
        self._carrier = carrier
        self.emit = emit
        self.cuts: deque[tuple[LinkId, str]] = deque()

    def send(self, link: LinkId, message: AnyMessage, frames: Sequence[Frame] = ()) -> SendHandle:
        return self._carrier.send(link, encode(message), frames)

    def cut(self, link: LinkId, reason: str) -> None:
        self.cuts.append((link, reason))
