"""What the front tells its engine: what to serve, what the routers ask for (`translate`), and when to end.

Sent by `front`. `engine_process` starts with the first and ends with `Stop`; the flow of the engine's role handles
the others.
"""

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.ticket import Ticket
from splitserve.worker.config import WorkerConfig
from splitserve.worker.messages import Message, Sample, Start


class Configure(Message, frozen=True):
    """The first command: what to serve, and under which id."""

    worker_id: str
    config: WorkerConfig


class Reserve(Message, frozen=True):
    """`is_local`: this worker computes the prompt itself."""

    session: int
    attempt: str
    start: Start
    timeout_s: float
    traceparent: str = ""
    keep_s: float = 0.0
    is_local: bool = False


class Renew(Message, frozen=True):
    """Closes the transfer of a reservation and opens another, with these outputs."""

    session: int
    attempt: str
    transfer_id: str
    samples: list[Sample]
    timeout_s: float


class Prefill(Message, frozen=True):
    session: int
    attempt: str
    start: Start
    ticket: Ticket
    timeout_s: float


class Release(Message, frozen=True):
    """Of the whole attempt, or of the `samples` named, which decode."""

    attempt: str
    reason: str
    samples: tuple[int, ...] = ()


class EndSession(Message, frozen=True):
    """The router connection is gone: whatever it had here ends."""

    session: int


class SetPeers(Message, frozen=True):
    """Every worker that this one may send blocks to, by id."""

    endpoints: dict[str, KVEndpoint]


class Drain(Message, frozen=True):
    """Takes no new work from now on, and ends what is left after `timeout_s`."""

    timeout_s: float


class Stop(Message, frozen=True):
    pass


Command = Configure | Reserve | Renew | Prefill | Release | EndSession | SetPeers | Drain | Stop
