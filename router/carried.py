"""The request as one attempt sees it: made by `flow`, read by `attempt`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from router.causes import AttemptLostError
from router.worker import Start


@dataclass(frozen=True, slots=True)
class Carried:
    """The request as an attempt sees it.

    `start` is what goes on from here: it grows with every token that the attempt has brought. `count_failure` is told
    of a leg that was lost, and raises the client's error if there is to be no other.
    """

    start: Callable[[], Start]
    seconds_left: Callable[[], float]
    count_failure: Callable[[AttemptLostError], Awaitable[None]]
    traceparent: str
