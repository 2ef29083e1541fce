"""The receiving half of the protocol, without I/O: expectations and messages in, blocks and terminal events out.

Called by `node` in the KV thread, which owns all of its state. Only this code writes a reserved block, and only while
its transfer is open: so a cancel at any moment is safe, whatever is still under way.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvtransfer.carrier import LinkId
from kvtransfer.context import Context
from kvtransfer.events import FailureReason, Side, TransferComplete, TransferFailed, reason_from_peer
from kvtransfer.frames import Frame, digests, num_bytes
from kvtransfer.messages import Acked, BadMessageError, Blocks, BlocksAck, Cancel, Closed, Finish, Open, shorten
from kvtransfer.sink_transfer import Problem, SinkTransfer

# How many ended transfers are remembered, only to tell a late source why; never to act on.
NUM_REMEMBERED = 1024


class Sink:
    def __init__(self, context: Context) -> None:
        self._our = context
        self._transfers: dict[str, SinkTransfer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    # What the engine asks.

    def expect(self, transfer_id: str, block_ids: Sequence[int], num_cached_blocks: int, timeout_s: float) -> None:
        """The caller has made sure that no transfer of this id is expected. `timeout_s` is re-armed by each block."""
        self._transfers[transfer_id] = SinkTransfer(
            transfer_id=transfer_id,
            block_ids=list(block_ids),
            num_cached_blocks=num_cached_blocks,
            timeout_s=timeout_s,
            deadline=self._our.clock() + timeout_s,
        )

    def cancel(self, transfer_id: str, detail: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._fail(transfer, FailureReason.CANCELLED, detail)

    def depends_on(self, link: LinkId) -> bool:
        return any(transfer.link == link for transfer in self._transfers.values())

    # What the link brings.

    def link_lost(self, link: LinkId, reason: str) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.link == link:
                transfer.link = None
                self._fail(transfer, FailureReason.LINK_LOST, reason)

    def receive(
        self, link: LinkId, worker_id: str, message: Open | Blocks | Finish | Cancel, frames: Sequence[Frame]
    ) -> None:
        """Raises BadMessageError when the message cannot come from a correct source: the link has to end."""
        if isinstance(message, Blocks):
            self._on_blocks(link, worker_id, message, frames)
            return
        if frames:
            raise BadMessageError(f"{type(message).__name__} with {len(frames)} raw frames")
        transfer = self._bound(message.transfer_id, link, worker_id)
        if isinstance(message, Cancel):
            if transfer is not None:
                reason = reason_from_peer(message.reason)
                self._fail(transfer, reason, f"the source gave up: {message.detail}", is_told=True)
            self._our.outbox.send(link, Closed(message.transfer_id, "cancelled", is_answer=True))
        elif transfer is None:
            self._our.counters.dropped()
            self._our.outbox.send(link, Closed(message.transfer_id, self._why_closed(message.transfer_id)))
        elif isinstance(message, Open):
            self._on_open(transfer, message)
        else:
            self._on_finish(transfer, message)

    def _bound(self, transfer_id: str, link: LinkId, worker_id: str) -> SinkTransfer | None:
        """The open transfer of this id, if this link may speak for it; the first link that names it may."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.link not in (None, link):
            return None
        if transfer.link is None:
            transfer.link = link
            transfer.source_worker_id = worker_id
            transfer.started_at = self._our.clock()
        return transfer

    def _on_open(self, transfer: SinkTransfer, message: Open) -> None:
        if transfer.is_opened:
            self._our.counters.dropped()
            return
        transfer.is_opened = True
        transfer.traceparent = message.traceparent
        self._progress(transfer)
        problem = transfer.disagreement(message.num_cached_blocks, message.num_blocks)
        if problem is not None:
            self._fail(transfer, *problem)

    def _on_blocks(self, link: LinkId, worker_id: str, message: Blocks, frames: Sequence[Frame]) -> None:
        if not len(message.indices) == len(message.digests) == len(frames):
            counts = f"{len(message.indices)} indices, {len(message.digests)} digests, {len(frames)} frames"
            raise BadMessageError(f"Blocks with {counts}")
        transfer = self._bound(message.transfer_id, link, worker_id)
        if transfer is None:
            self._our.counters.dropped(num_bytes(frames))
            detail = self._why_closed(message.transfer_id)
            self._our.outbox.send(link, BlocksAck(message.transfer_id, message.sequence, is_closed=True, detail=detail))
            return
        problem = self._check_tp(message)
        arrived = zip(message.indices, message.digests, digests(frames), frames, strict=True)
        for index, wanted, found, frame in arrived:
            if problem is None:
                problem = self._take_block(transfer, index, wanted, found, frame)
        if problem is not None:
            self._fail(transfer, *problem)  # first, so that the source hears the reason before "closed"
        # The bytes are out of the receive buffer, taken or not: the credit goes back in any case.
        self._our.outbox.send(link, BlocksAck(message.transfer_id, message.sequence, is_closed=problem is not None))
        if problem is None:
            self._complete_if_whole(transfer)

    def _check_tp(self, message: Blocks) -> Problem | None:
        ours = (self._our.fingerprint.tp_rank, self._our.fingerprint.tp_size)
        theirs = (message.tp_rank, message.tp_size)
        if ours == theirs:
            return None
        return FailureReason.PROTOCOL, f"tensor-parallel rank and size: sink {ours}, source {theirs}"

    def _take_block(
        self, transfer: SinkTransfer, index: int, wanted: bytes, found: bytes, frame: Frame
    ) -> Problem | None:
        """`wanted` is the digest that the source names, `found` that of `frame`."""
        if not transfer.is_expected(index):
            first, last = transfer.num_cached_blocks, transfer.num_blocks - 1
            return FailureReason.PROTOCOL, f"block {index} is outside of {first}..{last}"
        if frame.nbytes != self._our.store.block_nbytes:
            return (
                FailureReason.PROTOCOL,
                f"block {index}: {frame.nbytes} bytes instead of {self._our.store.block_nbytes}",
            )
        if found != wanted:
            return FailureReason.CORRUPT, f"block {index} does not match its digest"
        if index in transfer.received:
            self._our.counters.dropped(frame.nbytes)
            return None
        try:
            self._our.store.write(transfer.block_ids[index], frame)
        except (ValueError, LookupError) as error:
            return FailureReason.INVALID, f"block {index} cannot be written: {error}"
        transfer.received[index] = found
        transfer.num_bytes += frame.nbytes
        self._our.counters.received(transfer.source_worker_id, frame.nbytes)
        self._progress(transfer)
        return None

    def _on_finish(self, transfer: SinkTransfer, finish: Finish) -> None:
        if transfer.finish is not None:
            self._our.counters.dropped()
            return
        problem = transfer.check_finish(finish)
        if problem is not None:
            self._fail(transfer, *problem)
            return
        transfer.finish = finish
        self._progress(transfer)
        self._complete_if_whole(transfer)

    def _progress(self, transfer: SinkTransfer) -> None:
        transfer.deadline = self._our.clock() + transfer.timeout_s

    # What time brings.

    def tick(self) -> None:
        now = self._our.clock()
        for transfer in list(self._transfers.values()):
            if transfer.deadline <= now:
                arrived = f"{len(transfer.received)} of {transfer.num_blocks_expected} blocks"
                finish = "with" if transfer.finish is not None else "without"
                detail = f"no progress for {transfer.timeout_s} s: {arrived} arrived, {finish} Finish"
                self._fail(transfer, FailureReason.TIMEOUT, detail)

    @property
    def is_waiting(self) -> bool:
        return bool(self._transfers)

    def close(self) -> None:
        """Fails everything; peers learn it from the end of their links."""
        for transfer in list(self._transfers.values()):
            self._fail(transfer, FailureReason.SHUTDOWN, "this worker's KV thread is closing", is_told=True)

    # How a transfer ends.

    def _complete_if_whole(self, transfer: SinkTransfer) -> None:
        if not transfer.is_complete:
            return
        problem = transfer.check_digests()
        if problem is not None:
            self._fail(transfer, *problem)
            return
        assert transfer.finish is not None
        assert transfer.link is not None
        self._forget(transfer, "it is complete")
        self._our.outbox.send(transfer.link, Acked(transfer.transfer_id))
        seconds = self._our.clock() - transfer.started_at
        self._our.counters.ended(Side.SINK, "OK", seconds)
        self._our.outbox.emit(
            TransferComplete(
                transfer_id=transfer.transfer_id,
                keys=transfer.finish.keys,
                payload=transfer.finish.payload,
                source_worker_id=transfer.source_worker_id,
                num_bytes=transfer.num_bytes,
                seconds=seconds,
                traceparent=transfer.traceparent,
                transport=self._our.counters.peer(transfer.source_worker_id).transport,
            )
        )

    def _fail(self, transfer: SinkTransfer, reason: FailureReason, detail: str, *, is_told: bool = False) -> None:
        self._forget(transfer, f"{reason.value}: {detail}")
        if transfer.link is not None and not is_told:
            self._our.outbox.send(transfer.link, Cancel(transfer.transfer_id, reason.value, shorten(detail)))
        self._our.counters.ended(Side.SINK, reason.value)
        transport = self._our.counters.peer(transfer.source_worker_id).transport
        self._our.outbox.emit(TransferFailed(transfer.transfer_id, Side.SINK, reason, detail, transport))

    def _forget(self, transfer: SinkTransfer, why: str) -> None:
        del self._transfers[transfer.transfer_id]
        self._ended[transfer.transfer_id] = why
        while len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def _why_closed(self, transfer_id: str) -> str:
        if transfer_id in self._transfers:
            return shorten(f"transfer {transfer_id} belongs to another link")
        why = self._ended.get(transfer_id)
        return shorten(f"transfer {transfer_id} has ended: {why}" if why else f"transfer {transfer_id} is unknown")
