"""Flow control of one outgoing link: bytes sent and not yet acknowledged, never more than the sink's window.

Owned by the source machine. Credit is accounted per link, apart from transfers, so that an acknowledgement which
outlives its transfer still frees its bytes.
"""


class CreditWindow:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._next_sequence = 0
        self._outstanding: dict[int, tuple[str, int]] = {}

    def can_send(self, num_bytes: int) -> bool:
        # An idle link may always carry one message, or a block larger than the window would never move.
        return self.used == 0 or self.used + num_bytes <= self.limit

    def take(self, transfer_id: str, num_bytes: int) -> int:
        """Spends credit; returns the sequence number whose acknowledgement gives it back."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._outstanding[sequence] = (transfer_id, num_bytes)
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        return sequence

    def give_back(self, sequence: int, transfer_id: str) -> bool:
        """False when this sequence is not outstanding for this transfer: a repeated or invented acknowledgement."""
        owner, num_bytes = self._outstanding.get(sequence, ("", 0))
        if owner != transfer_id:
            return False
        del self._outstanding[sequence]
        self.used -= num_bytes
        return True

    def give_back_all(self, transfer_id: str) -> None:
        """The sink has read past everything that was sent of this transfer: what is unacknowledged was lost."""
        lost = [sequence for sequence, (owner, _) in self._outstanding.items() if owner == transfer_id]
        for sequence in lost:
            self.give_back(sequence, transfer_id)
