"""The search for the next prefill worker of an attempt whose reservation is kept. Owned and asked by the attempt."""

import asyncio
from collections.abc import Set
from typing import Protocol

from router.causes import AttemptLostError
from router.inbox import Inbox
from router.leg import Leg
from router.worker import Worker


class LegSource(Protocol):
    """Where legs come from; `dispatcher` is the one."""

    def has_prefill(self, decode: Worker, num_tokens: int) -> bool:
        """Whether some prefill worker that is here could take the prompt if it were idle."""

    def next_leg(self, decode: Worker, num_tokens: int, unwanted: Set[str], inbox: Inbox) -> Leg | None:
        """On a worker that has room, which is promised now; on an unwanted one only if there is no other."""


class LegSearch:
    """`why` is what the leg before was lost to: the attempt too, where no other is found within `patience_s`."""

    why: AttemptLostError

    def __init__(self, legs: LegSource, decode: Worker, inbox: Inbox, *, patience_s: float) -> None:
        self._legs = legs
        self._decode = decode
        self._inbox = inbox
        self._patience_s = patience_s
        self._unwanted: set[str] = set()
        self._clock = asyncio.get_running_loop().time
        self._until = self._clock()

    def begin(self) -> None:
        """The time for it starts anew."""
        self._until = self._clock() + self._patience_s

    def leave(self, leg: Leg, why: AttemptLostError) -> None:
        """From now on its worker is taken only if there is no other."""
        self._unwanted.add(leg.worker.worker_id)
        self.why = why

    def next_leg(self, num_tokens: int) -> Leg | None:
        """With room promised on its worker; None while none has room. Raises `why` where it is of no use to wait."""
        leg = self._legs.next_leg(self._decode, num_tokens, self._unwanted, self._inbox)
        if leg is None and not (self._clock() < self._until and self._legs.has_prefill(self._decode, num_tokens)):
            raise self.why
        return leg
