"""What a prefill worker keeps of an attempt, from its admission until its blocks have arrived."""

from dataclasses import dataclass, field

from kvtransfer.ticket import Ticket
from splitserve.worker.prompts import Prompt


@dataclass(slots=True)
class PrefillAttempt(Prompt):
    """A prompt being computed or sent: `num_sent` blocks are on their way."""

    ticket: Ticket
    deadline: float
    num_sent: int
    released: bool = field(default=False)
    "Nobody wants the result any more: no more chunks, no reports."

    @property
    def is_computing(self) -> bool:
        return not self.released and not self.is_complete
