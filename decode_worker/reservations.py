"""The attempts whose blocks are on their way to this worker, from `Reserve` until they have arrived or are given up.

Called by the flow, on the engine thread. While a transfer is open its blocks belong to the KV thread: nobody here reads
or frees them, and they are taken back only with the terminal event. A transfer that fails may be followed by another
one for the same reservation.
"""

import uuid
from collections.abc import Iterator

from msgspec.structs import replace

from decode_worker.hand_off import renewal_problem
from decode_worker.scheduler import ReservationView
from decode_worker.state import Phase, Reservation
from kvtransfer.ticket import Ticket
from splitserve.engine.allocator import BlockAllocator
from splitserve.engine.block_keys import KeyChain
from splitserve.worker import commands, messages
from splitserve.worker.engine_setup import EngineContext
from splitserve.worker.sampling import sampling_params


class Reservations:
    """Owns the reservations and their transfers, the oldest first, and frees what becomes of none."""

    def __init__(self, context: EngineContext, allocator: BlockAllocator) -> None:
        self._agent = context.agent
        self._layout = context.runner.layout
        self._worker_id = context.worker_id
        self._clock = context.clock
        self._allocator = allocator
        self._by_attempt: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_attempt)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(list(self._by_attempt.values()))

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._by_attempt

    def __getitem__(self, attempt: str) -> Reservation:
        return self._by_attempt[attempt]

    def get(self, attempt: str) -> Reservation | None:
        """None also for one that is ending."""
        reservation = self._by_attempt.get(attempt)
        return None if reservation is None or reservation.phase is Phase.CLOSING else reservation

    def of_transfer(self, transfer_id: str) -> Reservation | None:
        """The one whose open transfer this is."""
        reservations = (r for r in self._by_attempt.values() if r.phase is not Phase.PARKED)
        return next((r for r in reservations if r.transfer_id == transfer_id), None)

    def take_room(self, command: commands.Reserve, keys: KeyChain, cached: list[int]) -> Reservation:
        """For a transfer that is to be opened: `cached` blocks, which the caller has pinned, begin it, whatever prefill
        has to compute of them anew, and the rest is reserved."""
        start, num_full = command.start, len(keys.complete)
        reserved = self._allocator.reserve(num_full + len(start.samples) - len(cached))
        assert reserved is not None, "room is judged without hits"
        blocks = cached + reserved
        return Reservation(
            attempt=command.attempt,
            session=command.session,
            start=start,
            params=sampling_params(start.limits),
            token_ids=start.token_ids,
            keys=keys,
            num_cached_blocks=len(cached),
            full_blocks=blocks[:num_full],
            own_blocks=blocks[num_full:],
            keep_s=command.keep_s,
            traceparent=command.traceparent,
        )

    # Transfers

    def open(self, reservation: Reservation, timeout_s: float) -> Ticket:
        """From here on the KV thread may write to the reserved blocks; the ticket lets a prefill worker send them."""
        reservation.phase, reservation.renewal = Phase.RECEIVING, None
        reservation.transfer_id = uuid.uuid4().hex
        reservation.deadline = self._clock() + timeout_s
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

    def park(self, reservation: Reservation) -> None:
        """Its transfer has failed; the blocks wait for another one, but not for long."""
        reservation.phase = Phase.PARKED
        reservation.deadline = self._clock() + reservation.keep_s

    def renew(self, reservation: Reservation, command: commands.Renew) -> None:
        """Ends the open transfer so that the command can be carried out with its terminal event."""
        reservation.phase, reservation.renewal = Phase.RENEWING, command
        self._agent.cancel(reservation.transfer_id, "another ticket takes its place")

    def grow(self, reservation: Reservation, samples: list[messages.Sample], vocab_size: int) -> str | None:
        """Takes in what the samples have more than before; else says why that cannot be, and changes nothing."""
        start = replace(reservation.start, samples=samples)
        if problem := renewal_problem(reservation.start, start, vocab_size):
            return problem
        num_blocks = len(start.token_ids) // self._layout.block_size + len(start.samples)
        more = self._allocator.reserve(num_blocks - len(reservation.blocks))
        if more is None:
            return "no block for the tokens that have come since"
        reservation.grow(start, more)
        return None

    # Endings

    def remove(self, reservation: Reservation) -> None:
        """Its blocks are somebody else's business from now on."""
        del self._by_attempt[reservation.attempt]

    def free(self, reservation: Reservation) -> None:
        """No transfer is open for it any more: its blocks go back."""
        self.remove(reservation)
        self._allocator.cancel_reservation(reservation.reserved_blocks)
        self._allocator.release(reservation.pinned_blocks)

    def close(self, attempt: str, reason: str) -> None:
        """Ends the attempt's reservation, if it has one that is not ending yet; with a transfer open its blocks come
        back with the terminal event."""
        reservation = self.get(attempt)
        if reservation is None:
            return
        if reservation.phase is Phase.PARKED:
            self.free(reservation)
            return
        if reservation.phase is Phase.RECEIVING:
            self._agent.cancel(reservation.transfer_id, reason)
        reservation.phase = Phase.CLOSING

    # Views

    def attempts_of(self, session: int) -> set[str]:
        return {r.attempt for r in self._by_attempt.values() if r.session == session}

    def expired(self, now: float) -> list[Reservation]:
        return [r for r in self._not_closing if now > r.deadline]

    @property
    def num_seqs(self) -> int:
        """How many sequences they are to become."""
        return sum(len(reservation.samples) for reservation in self._by_attempt.values())

    def incomplete(self) -> list[ReservationView]:
        """Those that can be revoked."""
        return [ReservationView(r.attempt, len(r.reserved_blocks)) for r in self._not_closing]

    @property
    def num_returning(self) -> int:
        """Blocks that come back some time soon."""
        closing = (r for r in self._by_attempt.values() if r.phase is Phase.CLOSING)
        return sum(len(reservation.reserved_blocks) for reservation in closing)

    @property
    def _not_closing(self) -> list[Reservation]:
        return [r for r in self._by_attempt.values() if r.phase is not Phase.CLOSING]
