"""The sending half of the protocol, without I/O: tickets and blocks in, messages and terminal events out.

Called by `node` in the KV thread, which owns all of its state. A transfer's blocks stay pinned until its terminal
event: an acknowledgement of all of them, or a failure once neither the sink nor the transport can still read them.
"""

from collections.abc import Callable, Sequence

import msgspec

from kvtransfer.carrier import Connected, LinkId
from kvtransfer.context import Context
from kvtransfer.credit import CreditWindow
from kvtransfer.events import FailureReason, LinkMeasured, Side, TransferAcked, TransferFailed, reason_from_peer
from kvtransfer.frames import Frame, digests, num_bytes
from kvtransfer.messages import Acked, Blocks, BlocksAck, Cancel, Closed, Open, shorten
from kvtransfer.source_link import ReadyLink
from kvtransfer.source_transfer import SourceTransfer
from kvtransfer.ticket import Ticket


class Source:
    def __init__(self, context: Context) -> None:
        self._our = context
        self._transfers: dict[str, SourceTransfer] = {}
        self._links: dict[LinkId, ReadyLink] = {}
        self._link_by_worker: dict[str, LinkId] = {}

    # What the engine asks.

    def open(self, ticket: Ticket) -> None:
        """The caller has made sure that no transfer of this id is open."""
        now = self._our.clock()
        transfer = SourceTransfer(ticket=ticket, opened_at=now, progress_at=now)
        self._transfers[ticket.transfer_id] = transfer
        link = self._link_by_worker.get(ticket.sink_worker_id)
        if not 0 <= ticket.num_cached_blocks <= ticket.num_blocks:
            self._fail(transfer, FailureReason.INVALID, f"ticket of {ticket.num_blocks} blocks is inconsistent")
        elif link is not None:
            self._attach(transfer, self._links[link])

    def send(self, transfer_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        """Queues (logical index, block id) pairs. Ignored when the transfer has already ended."""
        self._advance(transfer_id, lambda transfer: transfer.enqueue(blocks))

    def finish(self, transfer_id: str, keys: list[bytes], payload: bytes) -> None:
        """No more blocks come. `keys` names every logical block, cached ones too. Ignored when already ended."""
        self._advance(transfer_id, lambda transfer: transfer.request_finish(keys, payload))

    def cancel(self, transfer_id: str, detail: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._fail(transfer, FailureReason.CANCELLED, detail)

    def _advance(self, transfer_id: str, change: Callable[[SourceTransfer], str | None]) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.is_ended:
            return
        transfer.progress_at = self._our.clock()
        error = change(transfer)
        if error is not None:
            self._fail(transfer, FailureReason.INVALID, error)
        elif transfer.link is not None:
            self._pump(self._links[transfer.link])

    # What the dialler tells.

    def link_ready(self, worker_id: str, connection: Connected, window_bytes: int, max_message_bytes: int) -> None:
        ready = ReadyLink(
            connection=connection,
            worker_id=worker_id,
            credit=CreditWindow(window_bytes),
            max_message_bytes=min(max_message_bytes, self._our.settings.frame_bytes),
            progress_at=self._our.clock(),
        )
        self._links[ready.link] = ready
        self._link_by_worker[worker_id] = ready.link
        for transfer in list(self._transfers.values()):
            is_waiting = transfer.link is None and not transfer.is_ended
            if is_waiting and transfer.ticket.sink_worker_id == worker_id:
                self._attach(transfer, ready)

    def link_lost(self, link: LinkId, reason: str) -> None:
        ready = self._links.pop(link, None)
        if ready is None:
            return
        if self._link_by_worker.get(ready.worker_id) == link:
            del self._link_by_worker[ready.worker_id]
        self._our.counters.in_flight(ready.worker_id, 0, ready.credit.peak)
        for transfer in list(ready.transfers.values()):
            self._fail(transfer, FailureReason.LINK_LOST, reason)

    def unreachable(self, worker_id: str, detail: str) -> None:
        """No link to this worker will come: what waits for one fails now."""
        for transfer in list(self._transfers.values()):
            if transfer.link is None and transfer.ticket.sink_worker_id == worker_id:
                self._fail(transfer, FailureReason.UNREACHABLE, detail)

    def depends_on(self, link: LinkId) -> bool:
        ready = self._links.get(link)
        return ready is not None and bool(ready.transfers or ready.closing)

    # What the sink says.

    def receive(self, link: LinkId, message: BlocksAck | Acked | Cancel | Closed) -> None:
        ready = self._links.get(link)
        if ready is None:
            self._our.counters.dropped()
            return
        transfer = ready.transfers.get(message.transfer_id)
        match message:
            case BlocksAck():
                self._on_blocks_ack(ready, transfer, message)
            case Acked():
                self._on_acked(ready, transfer)
            case Cancel():
                self._on_cancel(transfer, message)
            case Closed():
                self._on_closed(ready, transfer, message)
        if ready.credit.used == 0:
            ready.bandwidth.interrupted()
        self._pump(ready)
        self._our.counters.in_flight(ready.worker_id, ready.credit.used, ready.credit.peak)

    def _on_blocks_ack(self, ready: ReadyLink, transfer: SourceTransfer | None, ack: BlocksAck) -> None:
        used_before = ready.credit.used
        if not ready.credit.give_back(ack.sequence, ack.transfer_id):
            self._our.counters.dropped()
            return
        ready.progress_at = self._our.clock()
        self._measure(ready, used_before - ready.credit.used)
        if transfer is None:
            return
        transfer.acknowledge(ack.sequence)
        transfer.progress_at = ready.progress_at
        if transfer.is_ended:
            self._settle(transfer)
        elif ack.is_closed:
            self._fail(transfer, FailureReason.CLOSED, ack.detail)

    def _measure(self, ready: ReadyLink, nbytes: int) -> None:
        ready.bandwidth.acknowledged(nbytes, ready.progress_at, is_idle=ready.credit.used == 0)
        bytes_per_s = ready.bandwidth.news()
        if bytes_per_s is not None:
            made = ready.connection
            self._our.outbox.emit(LinkMeasured(ready.worker_id, made.path, bytes_per_s, made.fallback))

    def _on_acked(self, ready: ReadyLink, transfer: SourceTransfer | None) -> None:
        if transfer is None or transfer.is_ended:
            self._our.counters.dropped()
        elif not transfer.is_finish_sent:
            self._our.outbox.cut(ready.link, f"the sink acknowledged {transfer.transfer_id} before its end")
        else:
            ready.credit.give_back_all(transfer.transfer_id)
            transfer.acked_after = self._our.clock() - transfer.started_at
            self._settle(transfer)

    def _on_cancel(self, transfer: SourceTransfer | None, cancel: Cancel) -> None:
        if transfer is None or transfer.is_ended:
            self._our.counters.dropped()
            return
        self._fail(transfer, reason_from_peer(cancel.reason), f"the sink gave up: {cancel.detail}")

    def _on_closed(self, ready: ReadyLink, transfer: SourceTransfer | None, closed: Closed) -> None:
        if closed.is_answer and ready.closing.pop(closed.transfer_id, None) is not None:
            ready.credit.give_back_all(closed.transfer_id)
        elif transfer is not None and not transfer.is_ended:
            self._fail(transfer, FailureReason.CLOSED, closed.detail)
        else:
            self._our.counters.dropped()

    # What time brings.

    def tick(self) -> None:
        now = self._our.clock()
        for transfer in list(self._transfers.values()):
            if transfer.is_ended:
                self._settle(transfer)
                continue
            ready = self._links.get(transfer.link) if transfer.link is not None else None
            overdue = transfer.overdue(now, self._our.settings, ready.progress_at if ready is not None else 0.0)
            if overdue is not None:
                self._fail(transfer, *overdue)
        for ready in list(self._links.values()):
            if ready.closing and min(ready.closing.values()) <= now:
                self._our.outbox.cut(ready.link, "the sink did not confirm the end of a failed transfer")

    @property
    def is_waiting(self) -> bool:
        return bool(self._transfers) or any(ready.closing for ready in self._links.values())

    @property
    def is_settling(self) -> bool:
        """Some ended transfer waits for the transport to let go of its blocks."""
        return any(transfer.is_ended for transfer in self._transfers.values())

    def close(self) -> None:
        """The carrier is closed and reads nothing any more: everything fails now."""
        for transfer in list(self._transfers.values()):
            transfer.in_flight.clear()
            transfer.held.clear()
            transfer.link = None
            self._fail(transfer, FailureReason.SHUTDOWN, "this worker's KV thread is closing")
            self._settle(transfer)

    # How blocks move.

    def _attach(self, transfer: SourceTransfer, ready: ReadyLink) -> None:
        now = self._our.clock()
        transfer.link = ready.link
        transfer.started_at = transfer.progress_at = now
        ready.transfers[transfer.transfer_id] = transfer
        ticket = transfer.ticket
        self._our.outbox.send(
            ready.link, Open(ticket.transfer_id, ticket.num_cached_blocks, ticket.num_blocks, ticket.traceparent)
        )
        self._pump(ready)

    def _pump(self, ready: ReadyLink) -> None:
        """Sends what credit allows, the oldest transfer first."""
        for transfer in list(ready.transfers.values()):
            while transfer.queue:
                batch = transfer.next_batch(self._our.store.block_nbytes, ready.max_message_bytes)
                if not ready.credit.can_send(len(batch) * self._our.store.block_nbytes):
                    return
                self._send_batch(ready, transfer, batch)
            if transfer.finish is not None and not transfer.is_finish_sent and not transfer.is_ended:
                first, last = transfer.ticket.num_cached_blocks, transfer.ticket.num_blocks
                values = [transfer.digests[index] for index in range(first, last)]
                transfer.is_finish_sent = True
                transfer.progress_at = self._our.clock()
                self._our.outbox.send(ready.link, msgspec.structs.replace(transfer.finish, digests=values))

    def _send_batch(self, ready: ReadyLink, transfer: SourceTransfer, batch: list[tuple[int, int]]) -> None:
        try:
            frames: list[Frame] = [self._frame(block_id, ready) for _, block_id in batch]
        except (ValueError, LookupError) as error:
            self._fail(transfer, FailureReason.INVALID, f"a block cannot be read: {error}")
            return
        values = digests(frames)
        for index, value in zip((index for index, _ in batch), values, strict=True):
            transfer.digests[index] = value
            transfer.queue.popleft()
        nbytes = num_bytes(frames)
        sequence = ready.credit.take(transfer.transfer_id, nbytes)
        message = Blocks(
            transfer_id=transfer.transfer_id,
            sequence=sequence,
            indices=[index for index, _ in batch],
            digests=values,
            tp_rank=self._our.fingerprint.tp_rank,
            tp_size=self._our.fingerprint.tp_size,
        )
        if not transfer.in_flight:
            transfer.progress_at = self._our.clock()
        transfer.in_flight[sequence] = self._our.outbox.send(ready.link, message, frames)
        ready.bandwidth.sent(self._our.clock())
        transfer.num_bytes += nbytes
        self._our.counters.sent(ready.worker_id, len(batch), nbytes)
        self._our.counters.in_flight(ready.worker_id, ready.credit.used, ready.credit.peak)

    def _frame(self, block_id: int, ready: ReadyLink) -> Frame:
        store = self._our.store
        return store.tensor_view(block_id) if ready.connection.has_tensors else store.view(block_id)

    # How a transfer ends.

    def _fail(self, transfer: SourceTransfer, reason: FailureReason, detail: str) -> None:
        if transfer.is_ended:
            return
        transfer.failure = (reason, detail)
        transfer.queue.clear()
        ready = self._links.get(transfer.link) if transfer.link is not None else None
        if ready is not None:
            # The sink answers Closed after all that it read before: that settles the credit of lost messages too.
            self._our.outbox.send(ready.link, Cancel(transfer.transfer_id, reason.value, shorten(detail)))
            ready.closing[transfer.transfer_id] = self._our.clock() + self._our.settings.closing_timeout_s
        self._settle(transfer)

    def _settle(self, transfer: SourceTransfer) -> None:
        is_known = self._transfers.get(transfer.transfer_id) is transfer
        if not is_known or not transfer.is_ended or transfer.is_readable_by_transport:
            return
        self._forget(transfer)
        sink = transfer.ticket.sink_worker_id
        transport = self._our.counters.peer(sink).transport
        if transfer.acked_after is not None:
            self._our.counters.ended(Side.SOURCE, "OK", transfer.acked_after)
            self._our.outbox.emit(
                TransferAcked(transfer.transfer_id, sink, transfer.num_bytes, transfer.acked_after, transport)
            )
            return
        assert transfer.failure is not None
        reason, detail = transfer.failure
        self._our.counters.ended(Side.SOURCE, reason.value)
        self._our.outbox.emit(TransferFailed(transfer.transfer_id, Side.SOURCE, reason, detail, transport))

    def _forget(self, transfer: SourceTransfer) -> None:
        del self._transfers[transfer.transfer_id]
        ready = self._links.get(transfer.link) if transfer.link is not None else None
        if ready is not None:
            ready.transfers.pop(transfer.transfer_id, None)
