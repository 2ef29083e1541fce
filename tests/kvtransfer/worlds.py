"""Workers without a model: a bytearray for a pool, an agent, and the events it gave; over either carrier."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvtransfer.agent import KVAgent
from kvtransfer.carrier import ZMQ, Carrier
from kvtransfer.events import KVEvent, LinkUp, TransferAcked, TransferComplete, TransferFailed
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.memory import MemoryHub
from kvtransfer.pairs.carrier import PairCarrier, PairSettings
from kvtransfer.settings import KVSettings
from kvtransfer.ticket import Ticket
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings

FINGERPRINT = Fingerprint(
    model="tiny",
    revision="r1",
    dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    layout_version=2,
    tp_rank=0,
    tp_size=1,
)
# Generous: a test that waits this long has found a state without a deadline.
PATIENCE_S = 60.0
# Nobody wakes a thread that waits in Gloo: so long it takes to let go of a frozen peer.
GLOO_TIMEOUT_S = 4.0


class ByteStore:
    """A pool of bytes. Each block can hold a pattern of its own."""

    def __init__(self, num_blocks: int, block_nbytes: int = 1024) -> None:
        self.block_nbytes = block_nbytes
        self.num_blocks = num_blocks
        self._memory = memoryview(bytearray(num_blocks * block_nbytes))

    def lend(self, block_ids: Iterable[int]) -> None:
        pass

    def view(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"no block {block_id}")
        return self._memory[block_id * self.block_nbytes : (block_id + 1) * self.block_nbytes]

    def tensor_view(self, block_id: int) -> torch.Tensor:
        return torch.frombuffer(self.view(block_id), dtype=torch.uint8)

    def write(self, block_id: int, data: memoryview | torch.Tensor) -> None:
        self.view(block_id)[:] = data.numpy().data if isinstance(data, torch.Tensor) else data

    def fill(self, block_id: int, seed: object) -> bytes:
        """Gives the block a pattern that names its seed all over; returns it."""
        word = f"<{seed}>".encode()
        pattern = (word * (self.block_nbytes // len(word) + 1))[: self.block_nbytes]
        self.write(block_id, memoryview(pattern))
        return pattern


E = TypeVar("E", bound=KVEvent)


@dataclass
class Recorder:
    """Collects an agent's events and lets a test wait for one."""

    events: list[KVEvent] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    react: Callable[[KVEvent], None] | None = None

    def __call__(self, event: KVEvent) -> None:
        if self.react is not None:
            self.react(event)
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, kind: type[E], transfer_id: str | None = None, count: int = 1) -> E:
        """The count-th event of this kind (of this transfer)."""

        def found() -> list[E]:
            return [
                event
                for event in self.events
                if isinstance(event, kind) and transfer_id in (None, getattr(event, "transfer_id", None))
            ]

        with self.changed:
            if not self.changed.wait_for(lambda: len(found()) >= count, PATIENCE_S):
                raise AssertionError(f"no {kind.__name__} of {transfer_id}; seen: {self.events}")
            return found()[count - 1]

    def wait_for_any(self, *kinds: type[KVEvent]) -> KVEvent:
        """The first event of any of these kinds."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: [event for event in self.events if isinstance(event, kinds)], PATIENCE_S
            )
        assert found, f"none of {kinds}; seen: {self.events}"
        return found[0]

    def wait_for_end(self, transfer_id: str) -> KVEvent:
        """The terminal event of a transfer, whatever it is."""
        with self.changed:
            found = self.changed.wait_for(lambda: self.terminal(transfer_id), PATIENCE_S)
        assert found, f"{transfer_id} has no end; seen: {self.events}"
        return found[0]

    def terminal(self, transfer_id: str) -> list[KVEvent]:
        kinds = (TransferAcked, TransferComplete, TransferFailed)
        with self.changed:
            return [event for event in self.events if isinstance(event, kinds) and event.transfer_id == transfer_id]


@dataclass
class Worker:
    """One process's share of a test: an agent with its pool and its events."""

    worker_id: str
    store: ByteStore
    seen: Recorder
    agent: KVAgent

    def ticket_for(
        self, transfer_id: str, block_ids: list[int], num_cached: int = 0, timeout_s: float = 30.0
    ) -> Ticket:
        """What a sink does for a reservation: expects the transfer, issues its ticket."""
        self.agent.expect(transfer_id, block_ids, num_cached, timeout_s)
        return Ticket(transfer_id, self.worker_id, num_cached, len(block_ids))

    def push(self, ticket: Ticket, block_ids: list[int], payload: bytes = b"") -> None:
        """What a source does with a ticket, all at once. `block_ids` are those of the not-cached blocks."""
        self.agent.open(ticket)
        indices = range(ticket.num_cached_blocks, ticket.num_blocks)
        self.agent.send(ticket.transfer_id, list(zip(indices, block_ids, strict=True)))
        self.agent.finish(ticket.transfer_id, keys_for(ticket.num_blocks), payload)


def keys_for(num_blocks: int) -> list[bytes]:
    return [index.to_bytes(32, "little") for index in range(num_blocks)]


def worker_carrier(transport: str, block_nbytes: int, port: int = 0) -> Carrier:
    """As a worker has it, for "gloo", "tcp" or "ipc"; the last two without a pair."""
    control = ZeroMQCarrier(ZeroMQSettings(max_block_bytes=block_nbytes, port=port, use_ipc=transport != "tcp"))
    taken = "gloo" if transport == "gloo" else ZMQ
    return PairCarrier(control, PairSettings((taken,), block_nbytes, torch.device("cpu"), timeout_s=GLOO_TIMEOUT_S))


class World:
    """Makes workers that reach one another over one kind of carrier, and ends them."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._hub = MemoryHub()
        self._agents: list[KVAgent] = []

    def carrier(self, block_nbytes: int) -> Carrier:
        match self.transport:
            case "loopback":
                return self._hub.carrier()
            case "bare tcp" | "bare ipc":
                use_ipc = self.transport == "bare ipc"
                return ZeroMQCarrier(ZeroMQSettings(max_block_bytes=block_nbytes, use_ipc=use_ipc))
            case "tcp" | "ipc" | "gloo":
                return worker_carrier(self.transport, block_nbytes)
        raise ValueError(self.transport)

    def worker(
        self,
        worker_id: str,
        *,
        num_blocks: int = 64,
        block_nbytes: int = 1024,
        settings: KVSettings | None = None,
        fingerprint: Fingerprint = FINGERPRINT,
        wrap: Callable[[Carrier], Carrier] = lambda carrier: carrier,
        store: ByteStore | None = None,
    ) -> Worker:
        store = store or ByteStore(num_blocks, block_nbytes)
        seen = Recorder()
        agent = KVAgent(
            worker_id=worker_id,
            fingerprint=fingerprint,
            store=store,
            carrier=wrap(self.carrier(store.block_nbytes)),
            settings=settings or KVSettings(),
            on_event=seen,
        )
        self._agents.append(agent)
        agent.start()
        return Worker(worker_id, store, seen, agent)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()


@contextmanager
def world(transport: str) -> Iterator[World]:
    made = World(transport)
    try:
        yield made
    finally:
        made.close()


def connect(source: Worker, *sinks: Worker) -> None:
    """Links a source to sinks and waits until blocks can flow."""
    source.agent.set_peers({sink.worker_id: sink.agent.endpoint for sink in sinks})
    for count in range(len(sinks)):
        source.seen.wait(LinkUp, count=count + 1)
