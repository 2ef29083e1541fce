"""What an attempt waits for, since when, of whom, and for how long. Owned and read by `attempt` alone."""

import asyncio
import enum
from collections.abc import Set

from router.config import RouterConfig
from router.leg import Leg
from router.metrics import RouterMetrics, Stage
from router.patience import Debt
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


class Stages:
    """The state of one attempt, and what its metrics count: a stage is the time from entering a state to its end."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self.enter(State.RESERVING)

    def enter(self, state: State) -> None:
        self.state = state
        self._began = self._clock()

    def observe(self, stage: Stage) -> None:
        self._metrics.observe_stage(stage, self._clock() - self._began)

    def end(self, stage: Stage, states: Set[State], following: State) -> None:
        """Ends `stage` if the attempt is still in one of its `states`; what comes late or again changes nothing."""
        if self.state in states:
            self.observe(stage)
            self.enter(following)


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
