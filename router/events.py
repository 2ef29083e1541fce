"""What workers say about an attempt, translated; and the mailbox that it is put into.

Made by `translate` from a `Join` stream; where a worker can no longer speak for itself, by its lost session (`worker`)
and by `patience`. Read by `attempt` from its `inbox`. Holds no state.
"""

from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from kvtransfer.ticket import Ticket
from router.request import FinishReason, TokenLogprobs
from splitserve.service.reasons import Reason


@dataclass(frozen=True, slots=True)
class Reserved:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AlreadyRunning:
    """Decode's answer to a renewal that came after the blocks."""


@dataclass(frozen=True, slots=True)
class TransferLost:
    """The ticket's transfer has failed; decode keeps the reservation for a while."""

    worker: str
    transfer_id: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Transferred:
    """All blocks of the ticket's transfer are with decode; `num_bytes` of them travelled, 0 if it had them all."""

    transfer_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Accepted:
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    worker: str
    reason: Reason
    message: str


class TokenArrived(Struct, frozen=True, gc=False):
    worker: str
    sample: int
    position: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsArrived:
    """Of the prompt's tokens from position `start` on."""

    start: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FirstTokensArrived:
    tokens: tuple[TokenArrived, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt as a whole, or the `samples` named, while others go on."""

    worker: str
    reason: Reason
    message: str
    samples: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: str
    message: str


AttemptEvent = (
    Reserved
    | AlreadyRunning
    | TransferLost
    | Transferred
    | Accepted
    | Refused
    | PromptLogprobsArrived
    | FirstTokensArrived
    | TokenArrived
    | Ended
    | WorkerLost
)


class Mailbox(Protocol):
    """Where an attempt's events go; never blocks."""

    def deliver(self, event: AttemptEvent) -> None: ...
