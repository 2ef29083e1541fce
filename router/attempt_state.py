"""What an attempt waits for, of whom, and for how long. Owned and read by `attempt` alone."""

import enum

from router.config import RouterConfig
from router.leg import Leg
from router.patience import Debt
from router.stages import Stage
from router.worker import Worker


class State(enum.Enum):
    """What the attempt waits for."""

    RESERVING = enum.auto()
    SEEKING = enum.auto()
    "Room on some prefill worker."
    HANDING_OVER = enum.auto()
    "A prefill worker's word that it takes the prompt."
    PREFILLING = enum.auto()
    ARRIVING = enum.auto()
    "The blocks; the first token is known."
    RENEWING = enum.auto()
    "Another ticket for the same reservation."
    DECODING = enum.auto()


BEFORE_FIRST_TOKEN = frozenset({State.HANDING_OVER, State.PREFILLING})
WITH_LEG = BEFORE_FIRST_TOKEN | {State.ARRIVING}
WITHOUT_LEG = frozenset({State.SEEKING, State.RENEWING})

STAGES = {
    State.RESERVING: Stage.QUEUE,
    State.SEEKING: Stage.QUEUE,
    State.RENEWING: Stage.QUEUE,
    State.HANDING_OVER: Stage.PREFILL,
    State.PREFILLING: Stage.PREFILL,
    State.ARRIVING: Stage.HANDOFF,
    State.DECODING: Stage.DECODE,
}
"What the request's time counts as meanwhile."


def debt(state: State, leg: Leg, decode: Worker, config: RouterConfig) -> Debt:
    """Whose word is awaited; nobody's while a leg is sought."""
    # Longer than a worker can be dead or stuck without membership knowing.
    answer_s = config.stall_timeout + config.heartbeat_timeout
    if state in (State.RESERVING, State.RENEWING):
        return Debt(decode, answer_s)
    if state is State.HANDING_OVER:
        return Debt(leg.worker, answer_s)
    if state is State.PREFILLING or not leg.is_scored:
        return Debt(leg.worker, config.prefill_timeout)
    return Debt(decode, config.token_timeout, config.prefill_timeout if state is State.ARRIVING else 0.0)
