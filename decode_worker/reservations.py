"""The attempts whose blocks are on their way to this worker, from `Reserve` to the terminal event of their transfer.

Called by the flow, on the engine thread. While a transfer is open its blocks belong to the KV thread: nobody here reads
or frees them, and they are taken back only with the terminal event.
"""

from decode_worker.scheduler import ReservationView
from decode_worker.state import Phase, Reservation
from kvtransfer.agent import KVAgent
from kvtransfer.ticket import Ticket
from splitserve.engine.layout import KVLayout


class Reservations:
    """Owns the reservations and their transfers, the oldest first; whose blocks are whose is the allocator's
    knowledge."""

    def __init__(self, agent: KVAgent, layout: KVLayout, worker_id: str) -> None:
        self._agent = agent
        self._layout = layout
        self._worker_id = worker_id
        self._by_attempt: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_attempt)

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._by_attempt

    def __getitem__(self, attempt: str) -> Reservation:
        return self._by_attempt[attempt]

    def open(self, reservation: Reservation, timeout_s: float) -> Ticket:
        """From here on the KV thread may write to the reserved blocks; the ticket lets a prefill worker send them."""
        self._by_attempt[reservation.attempt] = reservation
        num_blocks = self._layout.blocks_for(len(reservation.token_ids))
        self._agent.expect(
            reservation.transfer_id,
            reservation.blocks[:num_blocks],
            num_cached_blocks=reservation.num_cached_blocks,
            timeout_s=timeout_s,
        )
        return Ticket(
            transfer_id=reservation.transfer_id,
            sink_worker_id=self._worker_id,
            num_cached_blocks=reservation.num_cached_blocks,
            num_blocks=num_blocks,
        )

    def close(self, attempt: str, reason: str) -> None:
        """Ends the attempt's transfer, if it has one that is not ending yet; its blocks come back with the terminal
        event."""
        reservation = self._by_attempt.get(attempt)
        if reservation is not None and reservation.phase is Phase.RECEIVING:
            reservation.phase = Phase.CLOSING
            self._agent.cancel(reservation.transfer_id, reason)

    def take_back(self, transfer_id: str) -> Reservation | None:
        """The reservation whose transfer has ended, no longer one of these."""
        found = next((r for r in self._by_attempt.values() if r.transfer_id == transfer_id), None)
        return None if found is None else self._by_attempt.pop(found.attempt)

    def attempts_of(self, session: int) -> set[str]:
        return {r.attempt for r in self._by_attempt.values() if r.session == session}

    def expired(self, now: float) -> list[Reservation]:
        return [r for r in self._receiving if now > r.deadline]

    @property
    def num_seqs(self) -> int:
        """How many sequences they are to become."""
        return sum(len(reservation.samples) for reservation in self._by_attempt.values())

    def incomplete(self) -> list[ReservationView]:
        """Those that can be revoked."""
        return [ReservationView(r.attempt, len(r.reserved_blocks)) for r in self._receiving]

    @property
    def num_returning(self) -> int:
        """Blocks that come back some time soon."""
        closing = (r for r in self._by_attempt.values() if r.phase is Phase.CLOSING)
        return sum(len(reservation.reserved_blocks) for reservation in closing)

    @property
    def _receiving(self) -> list[Reservation]:
        return [r for r in self._by_attempt.values() if r.phase is Phase.RECEIVING]
