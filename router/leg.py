"""A leg: one prefill worker's part in an attempt, from the ticket that it is given to the first tokens.

Made by the dispatcher with room promised on the worker, which knows it by an id of its own: so what an earlier leg
says late is nobody's. Driven and closed by the attempt. Where the decode worker computes the prompt itself, the leg
is its own: it has the attempt's id, and nothing is handed over.
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
        self._num_to_score = 0 if start.sampling.prompt_logprobs is None else len(start.prompt_ids)
        self.worker.channel.prefill(self.leg_id, start, ticket, timeout_s, traceparent)

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
