"""The product's way: a KV agent in each process, as two workers have them, with tickets, credit and digests.

Both ends are made by what makes a worker's. Which path is taken is the source's choice, by the rule that workers have:
an endpoint without a path on this host is reached by TCP.
"""

import queue
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch

from kvtransfer.agent import KVAgent
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import KVEvent, LinkMeasured, LinkUp, TransferAcked, TransferComplete
from kvtransfer.ticket import Ticket
from splitserve.bench.kv.pool import BenchPool
from splitserve.bench.kv.ways import PATIENCE_S
from splitserve.service.errors import Internal, Unavailable
from splitserve.worker.config import WorkerConfig
from splitserve.worker.kv import make_agent

_SINK = "sink"
_KEY_NBYTES = 32
_FIRST_TOKEN = b"the first token"

_Event = TypeVar("_Event", bound=KVEvent)


class AgentReceiver:
    """One agent for every source."""

    def __init__(self, pool: BenchPool) -> None:
        self._agent, self._events = _start_agent(_SINK, pool)
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
    def __init__(self, pool: BenchPool, address: bytes, path: str) -> None:
        """`path` is "ipc" or "tcp". Raises Unavailable where the sink is not reached that way."""
        endpoint = msgspec.json.decode(address, type=KVEndpoint)
        if path == "tcp":
            endpoint = KVEndpoint(endpoint.tcp)
        self._agent, self._events = _start_agent(f"source-{path}", pool)
        self._agent.set_peers({_SINK: endpoint})
        self._keys = [index.to_bytes(_KEY_NBYTES, "little") for index in range(pool.store.num_blocks)]
        taken = _next(self._events, LinkUp).path
        if taken != path:
            self._agent.close()
            raise Unavailable(f"no {path} between two processes here, only {taken}: --transports {taken}")

    def send(self, transfer_id: str, num_blocks: int) -> None:
        self._agent.open(Ticket(transfer_id, _SINK, 0, num_blocks))
        self._agent.send(transfer_id, [(index, index) for index in range(num_blocks)])
        self._agent.finish(transfer_id, self._keys[:num_blocks], _FIRST_TOKEN)
        _next(self._events, TransferAcked)

    def close(self) -> None:
        self._agent.close()


def _start_agent(worker_id: str, pool: BenchPool) -> tuple[KVAgent, "queue.SimpleQueue[KVEvent]"]:
    events: queue.SimpleQueue[KVEvent] = queue.SimpleQueue()

    def on_event(event: KVEvent) -> None:
        if not isinstance(event, LinkMeasured):  # here it is measured from outside
            events.put(event)

    agent = make_agent(WorkerConfig(), worker_id, pool.fingerprint, pool.store, torch.device("cpu"), on_event)
    agent.start()
    return agent, events


def _next(events: "queue.SimpleQueue[KVEvent]", kind: type[_Event]) -> _Event:
    """The next event, which has to be of this kind: nothing else is expected to happen."""
    try:
        event = events.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise Internal(f"no {kind.__name__} within {PATIENCE_S:g} s") from None
    if not isinstance(event, kind):
        raise Internal(f"instead of {kind.__name__} came {event}")
    return event
