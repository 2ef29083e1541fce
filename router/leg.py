"""A leg: the part of whoever computes the prompt in an attempt, from the ticket that a prefill worker is given to the
first tokens.

Made by the dispatcher with room promised on the worker, which knows it by an id of its own: so what an earlier leg
says late is nobody's. Driven and closed by the attempt.
"""

from kvtransfer.ticket import Ticket
from router.events import AttemptEvent, PromptLogprobsArrived
from router.inbox import Inbox
from router.worker import Start, Worker


class Leg:
    """Also the mailbox for what its worker says of it."""

    def __init__(self, leg_id: str, worker: Worker, inbox: Inbox) -> None:
        self.leg_id = leg_id
        self.worker = worker
        self.is_accepted = False
        self.is_closed = False
        self._inbox = inbox
        self._is_handed_over = False
        self._num_to_score = 0
        self._num_scored = 0

    def deliver(self, event: AttemptEvent) -> None:
        self._inbox.put(self, event)

    def hand_over(self, start: Start, ticket: Ticket, timeout_s: float, traceparent: str) -> None:
        self._is_handed_over = True
        self.expect(start)
        self.worker.channel.prefill(self.leg_id, start, ticket, timeout_s, traceparent)

    def expect(self, start: Start) -> None:
        """The prompt is being computed, and its logprobs are on their way if they are wanted."""
        self._num_to_score = 0 if start.sampling.prompt_logprobs is None else len(start.prompt_ids)

    def note_scored(self, arrived: PromptLogprobsArrived) -> None:
        """By position: what is said twice counts once."""
        self._num_scored = max(self._num_scored, arrived.start + len(arrived.tokens))

    @property
    def is_scored(self) -> bool:
        """All of the prompt's logprobs that were asked for are here."""
        return self._num_scored >= self._num_to_score

    def close(self, reason: str, *, is_over: bool = False) -> None:
        """Gives back what the worker may still hold, unless that `is_over`; nothing of it is heard from now on.

        Idempotent; never waits.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self._is_handed_over and not is_over and not self.worker.is_lost:
            self.worker.channel.release(self.leg_id, reason)
        self.worker.forget(self.leg_id)
        self._inbox.drop(self)


class LocalLeg(Leg):
    """The decode worker computes the prompt itself: it is asked with the reservation, speaks of the attempt, and is
    released from both at once."""

    def close(self, reason: str, *, is_over: bool = False) -> None:
        """Idempotent; the attempt gives back what the worker holds."""
        self.is_closed = True
