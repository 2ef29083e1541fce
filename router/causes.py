"""Why an attempt was lost: what a worker's word means for the request, and whose word counts when both speak.

Called by `attempt`; `flow` catches its `AttemptLostError`. No state.
"""

from dataclasses import dataclass

from router.events import AttemptEvent, Ended, Refused, TokenArrived, TransferLost, WorkerLost
from router.inbox import Inbox
from splitserve.service.reasons import Reason

Setback = Refused | Ended | TransferLost | WorkerLost
"""What a worker says when it does not go on, or what is said of it when it is gone."""

# Refusals and orderly leave-taking: nobody's failure.
_NOT_A_FAILURE = frozenset({Reason.NO_ROOM, Reason.PREEMPTED, Reason.DRAINING})
# The request itself is at fault: another worker would say the same. INVALID is that only of what we have asked for;
# an attempt that ends with it was spoilt by the other worker.
_FATAL = frozenset({Reason.TOO_LARGE, Reason.INTERNAL})
_FATAL_REFUSALS = _FATAL | {Reason.INVALID}

WORKER_LOST = "worker_lost"

# How long the word of one worker waits for that of the other: they come on two streams, at about the same time.
_ECHO_S = 0.1


@dataclass(eq=False)
class AttemptLostError(Exception):
    """The attempt ended without finishing its samples. `worker` is at fault, or said so.

    The request may have run on the workers in `ran_on`: if they turn out to have died, it may be the cause. If one of
    the `suspects` does, its death was the cause of this, and no other failure. `is_counted`: with a leg, before.
    """

    reason: str
    message: str
    is_failure: bool
    is_fatal: bool = False
    worker: str = ""
    ran_on: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    is_counted: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class SampleLost:
    """One sample of an attempt ended without finishing; others go on."""

    sample: int
    lost: AttemptLostError


_NOBODY: frozenset[str] = frozenset()


def loss(setback: Setback, ran_on: frozenset[str] = _NOBODY, both: frozenset[str] = _NOBODY) -> AttemptLostError:
    """What `setback` means for the request, which may have run on the workers in `ran_on` by then; `both` are the two
    that had a part in it."""
    if isinstance(setback, WorkerLost):
        message = f"{setback.worker}: {setback.message}"
        return AttemptLostError(WORKER_LOST, message, is_failure=True, worker=setback.worker, ran_on=ran_on)
    is_failure = not is_no_failure(setback)
    return AttemptLostError(
        setback.reason.value,
        setback.message,
        is_failure=is_failure,
        is_fatal=setback.reason in (_FATAL_REFUSALS if isinstance(setback, Refused) else _FATAL),
        worker=setback.worker,
        ran_on=ran_on if is_failure else _NOBODY,
        suspects=both if is_effect(setback) else _NOBODY,
    )


def is_no_failure(setback: Refused | Ended | TransferLost) -> bool:
    return setback.reason in _NOT_A_FAILURE


def is_effect(setback: Setback) -> bool:
    """Whether it may only be what one worker sees of the other's end: blocks that stop coming, or are not taken."""
    return not isinstance(setback, WorkerLost) and setback.reason is Reason.TRANSFER_FAILED


async def explanation(inbox: Inbox, setback: Setback, decode: str) -> Setback | TokenArrived:
    """What says more than `setback`, if it is there or comes in a moment: that either worker has died, that the other
    one ended it, or that all blocks had arrived and decode runs. Else `setback` itself.

    Nothing is taken out of the inbox.
    """

    def speaks(event: AttemptEvent) -> bool:
        match event:
            case Refused(worker=worker) | Ended(worker=worker) | TransferLost(worker=worker):
                return worker != setback.worker
            case TokenArrived(worker=worker):
                return worker == decode != setback.worker
            case _:
                return isinstance(event, WorkerLost)

    event = await inbox.find(speaks, _ECHO_S)
    if isinstance(event, WorkerLost | TokenArrived):
        return event
    if isinstance(event, Refused | Ended | TransferLost) and not is_effect(event):
        return event
    return setback
