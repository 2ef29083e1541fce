"""The request as one attempt sees it: made by `chain`, read by `attempt`."""

from collections.abc import Callable
from dataclasses import dataclass

from router.failures import ChainFailures
from router.stages import StageClock
from router.worker import Start


@dataclass(frozen=True, slots=True)
class Carried:
    """`start` is what goes on from here: it grows with every token that the attempt has brought."""

    start: Callable[[], Start]
    seconds_left: Callable[[], float]
    failures: ChainFailures
    stages: StageClock
    traceparent: str
