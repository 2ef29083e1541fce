"""The product's way: a KV agent in each process, as two workers have them, with tickets, credit and digests.

Both ends are made by what makes a worker's. Which path is taken is the source's choice, by the rules that workers have:
its transport is the first that the sink takes, too, and an endpoint without a path on this host is reached by TCP.
"""

import queue
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvtransfer.agent import KVAgent
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import KVEvent, LinkDown, LinkMeasured, LinkRefused, LinkUp, TransferAcked, TransferComplete
from kvtransfer.ticket import Ticket
from splitserve.bench.kv.pool import BenchPool
from splitserve.bench.kv.ways import PAIRS, PATIENCE_S
from splitserve.service.errors import Internal, Unavailable
from splitserve.worker.config import WorkerConfig
from splitserve.worker.kv import make_agent

_SINK = "sink"
_KEY_NBYTES = 32
_FIRST_TOKEN = b"the first token"

_Event = TypeVar("_Event", bound=KVEvent)


class AgentReceiver:
    """One agent for every source."""

    def __init__(self, pool: BenchPool, transports: str) -> None:
        """`transports` as --kv-transport has them."""
        self._agent, self._events = _start_agent(_SINK, pool, transports)
        self._num_due = 0

    @property
    def address(self) -> bytes:
        return msgspec.json.encode(self._agent.endpoint)

    def prepare(self, transfer_ids: Sequence[str], num_blocks: int) -> None:
        for transfer_id in transfer_ids:
            self._agent.expect(transfer_id, range(num_blocks), 0, PATIENCE_S)
        self._num_due = len(transfer_ids)

    def receive(self) -> None:
        for _ in range(self._num_due):
            _next(self._events, TransferComplete)

    def close(self) -> None:
        self._agent.close()


class AgentSender:
    """`path` is what blocks take: "ipc", "tcp", "gloo", "nccl" and the way that NCCL found."""

    def __init__(self, pool: BenchPool, address: bytes, transport: str) -> None:
        """`transport` is "ipc", "tcp", "gloo" or "nccl". Raises Unavailable where the sink is not reached that way."""
        endpoint = msgspec.json.decode(address, type=KVEndpoint)
        if transport == "tcp":
            endpoint = KVEndpoint(endpoint.tcp)
        wanted = transport if transport in PAIRS else "zmq"
        self._agent, self._events = _start_agent(f"source-{transport}", pool, wanted)
        self._agent.set_peers({_SINK: endpoint})
        self._keys = [index.to_bytes(_KEY_NBYTES, "little") for index in range(pool.num_blocks)]
        try:
            self.path = _path_taken(self._events, transport)
        except Exception:
            self._agent.close()
            raise

    def send(self, transfer_id: str, num_blocks: int) -> None:
        self._agent.open(Ticket(transfer_id, _SINK, 0, num_blocks))
        self._agent.send(transfer_id, [(index, index) for index in range(num_blocks)])
        self._agent.finish(transfer_id, self._keys[:num_blocks], _FIRST_TOKEN)
        _next(self._events, TransferAcked)

    def close(self) -> None:
        self._agent.close()


def _start_agent(worker_id: str, pool: BenchPool, transports: str) -> tuple[KVAgent, "queue.SimpleQueue[KVEvent]"]:
    events: queue.SimpleQueue[KVEvent] = queue.SimpleQueue()

    def on_event(event: KVEvent) -> None:
        if not isinstance(event, LinkMeasured):  # here it is measured from outside
            events.put(event)

    config = WorkerConfig(kv_transport=transports)
    agent = make_agent(config, worker_id, pool.fingerprint, pool.store, pool.device, on_event)
    agent.start()
    return agent, events


def _path_taken(events: "queue.SimpleQueue[KVEvent]", transport: str) -> str:
    match made := _any(events, "LinkUp"):
        case LinkDown(reason=reason) | LinkRefused(detail=reason):
            raise Unavailable(f"--transports {transport}: {reason}")
        case LinkUp(path=path):
            pass
        case _:
            raise Internal(f"instead of LinkUp came {made}")
    if path.split()[0] != transport:
        raise Unavailable(f"no {transport} between two processes here, only {path}: --transports {path}")
    return path


def _next(events: "queue.SimpleQueue[KVEvent]", kind: type[_Event]) -> _Event:
    """The next event, which has to be of this kind: nothing else is expected to happen."""
    event = _any(events, kind.__name__)
    if not isinstance(event, kind):
        raise Internal(f"instead of {kind.__name__} came {event}")
    return event


def _any(events: "queue.SimpleQueue[KVEvent]", awaited: str) -> KVEvent:
    try:
        return events.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise Internal(f"no {awaited} within {PATIENCE_S:g} s") from None
