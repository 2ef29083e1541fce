"""A simulated worker: the real role engine, engine loop and KV agent, moved by the test, behind a front of a few lines.

Nothing here has a thread, a process or a socket. Any exception out of `turn` or `step_kv` is one that would have ended
the worker's process.
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.flow import DecodeEngine
from kvtransfer.agent import KVAgent
from kvtransfer.events import Side
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.settings import KVSettings
from prefill_worker.flow import PrefillEngine
from splitserve.engine.block_keys import KeyChain
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import messages, translate
from splitserve.worker.clock import Signs
from splitserve.worker.config import WorkerConfig
from splitserve.worker.engine_process import EngineLoop
from splitserve.worker.engine_setup import EngineContext, model_fingerprint
from tests.router.fakes import model_description
from tests.simulation.hash_model import (
    BLOCK_SIZE,
    EOS_TOKEN_IDS,
    LAYOUT,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    CheckedPool,
    HashRunner,
)
from tests.simulation.stream import JoinStream
from tests.simulation.virtual_time import VirtualClock
from tests.simulation.wires import SimulatedCarrier, Wires

MODEL = model_description(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=EOS_TOKEN_IDS)
CONFIG = WorkerConfig(
    block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=MAX_MODEL_LEN, transfer_timeout=5.0
)
KV_SETTINGS = KVSettings(
    window_bytes=3 * LAYOUT.block_nbytes, frame_bytes=2 * LAYOUT.block_nbytes, transfer_timeout_s=5.0, idle_timeout_s=60
)
FINGERPRINT: Fingerprint = model_fingerprint(MODEL.name, MODEL.revision, LAYOUT)
NUM_BLOCKS = {pb.ROLE_PREFILL: 12, pb.ROLE_DECODE: 10}
HEARTBEAT_TIMEOUT_S = 4.0
DRAIN_TIMEOUT_S = 5.0
DRAIN_GRACE_S = 3.0


class SteppedAgent(KVAgent):
    """A KV agent whose thread is the test, and which notes what it has been lent."""

    def __init__(self, worker_id: str, pool: CheckedPool, carrier: SimulatedCarrier, **others: Any) -> None:
        super().__init__(
            worker_id=worker_id,
            fingerprint=FINGERPRINT,
            store=pool,
            carrier=carrier,
            settings=KV_SETTINGS,
            **others,
        )
        self._pool = pool
        self._wires = carrier.wires
        self._lent: dict[tuple[Side, str], list[int]] = {}

    def start(self) -> None:
        self._carrier.start()
        self._is_open = True

    def step(self) -> None:
        self._step()

    def expect(self, transfer_id: str, block_ids: Sequence[int], num_cached_blocks: int, timeout_s: float) -> None:
        super().expect(transfer_id, block_ids, num_cached_blocks, timeout_s)
        wanted = list(block_ids[num_cached_blocks:])
        assert self._pool.receiving.isdisjoint(wanted), "two transfers receive the same block"
        self._pool.receiving.update(wanted)
        self._lent[Side.SINK, transfer_id] = wanted

    def send(self, transfer_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        super().send(transfer_id, blocks)
        if (Side.SOURCE, transfer_id) in self._live:
            sent = [block for _, block in blocks]
            self._pool.sending.update(sent)
            self._lent.setdefault((Side.SOURCE, transfer_id), []).extend(sent)

    def _end(self, side: Side, transfer_id: str) -> None:
        super()._end(side, transfer_id)
        blocks = self._lent.pop((side, transfer_id), [])
        if side is Side.SINK:
            self._pool.receiving.difference_update(blocks)
        else:
            self._pool.sending.subtract(blocks)
            assert transfer_id not in self._wires.being_read(self._carrier), "unpinned while the transport reads"

    def check(self) -> None:
        """Nothing waits past its deadline, or for a link that is gone, when the KV thread has looked."""
        links = self._wires.links_of(self._carrier)
        for transfer in self._node.sink._transfers.values():
            assert transfer.deadline > self._wires.now(), "a sink waits past its deadline"
            assert transfer.link is None or transfer.link in links, "a sink waits for a link that is gone"


class StepCount:
    """In the place of the step clock: no step is ever seen under way."""

    def __init__(self) -> None:
        self.steps = 0

    def beat(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None:
        self.steps += 1


class SimulatedWorker:
    def __init__(self, worker_id: str, role: pb.Role.ValueType, wires: Wires, clock: VirtualClock) -> None:
        self.worker_id = worker_id
        self.role = role
        self.is_frozen = False
        self.is_dead = False
        self.is_draining = False
        self._is_leaving = False
        self._leave_at = 0.0
        self.stream: JoinStream | None = None
        self.pool = CheckedPool(NUM_BLOCKS[role])
        self.runner = HashRunner(self.pool)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.agent = SteppedAgent(
            worker_id, self.pool, SimulatedCarrier(wires, worker_id), on_event=self._inbox.put, clock=clock
        )
        self.agent.start()
        self._clock = clock
        self._steps = StepCount()
        self._session = 0
        self._load: messages.Load | None = None
        self._links: dict[str, messages.LinkReport] = {}
        context: Any = EngineContext(
            worker_id=worker_id,
            config=CONFIG,
            description=MODEL,
            runner=self.runner,  # type: ignore[arg-type]
            agent=self.agent,
            fingerprint=FINGERPRINT,
            publish=self._on_report,
            max_model_len=MAX_MODEL_LEN,
            clock=clock,
        )
        make: Callable[[EngineContext], Any] = PrefillEngine if self.is_prefill else DecodeEngine
        self.engine = make(context)
        self._loop = EngineLoop(self.engine, self._on_report, self._inbox, self._steps, clock)  # type: ignore[arg-type]

    @property
    def is_prefill(self) -> bool:
        return self.role == pb.ROLE_PREFILL

    @property
    def moves(self) -> bool:
        return not (self.is_frozen or self.is_dead)

    # The engine's two threads

    def turn(self) -> None:
        if self.moves:
            assert self._loop.turn(0.0)
            self._check_deadlines()

    def step_kv(self) -> None:
        if self.moves:
            self.agent.step()
            self.agent.check()

    # The front

    def hello(self) -> pb.WorkerMessage:
        ready = messages.Ready(
            fingerprint=FINGERPRINT,
            num_blocks=self.pool.num_blocks,
            block_size=BLOCK_SIZE,
            block_nbytes=LAYOUT.block_nbytes,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            long_prefill_threshold=CONFIG.long_prefill_threshold,
            max_model_len=MAX_MODEL_LEN,
            kv_endpoint=self.agent.endpoint,
            device="cpu",
            transport="loopback",
            numerics="n",
            recompute_exact=True,
            linear="",
            attention="",
            layers="",
            memory=messages.Memory(0, 0, 0, 0),
            startup={},
        )
        return translate.hello_message(ready, worker_id=self.worker_id, role=self.role, host_id="h", pid=1)

    def joined(self, stream: JoinStream) -> None:
        self._session += 1
        self.stream = stream

    def left(self) -> None:
        """The stream has ended, by whichever side."""
        self.stream = None
        if self._is_leaving:
            self.kill()
            return
        self._inbox.put(messages.EndSession(session=self._session))
        if self.is_prefill:
            self._links.clear()
            self._inbox.put(messages.SetPeers(endpoints={}))

    def _on_report(self, report: messages.Report) -> None:
        if isinstance(report, messages.TransferReport | messages.CacheLookup | messages.Ignored):
            return
        if isinstance(report, messages.Drained):
            self._leave()
            return
        if isinstance(report, messages.Load):
            self._load = report
        if isinstance(report, messages.LinkReport):
            self._links[report.peer] = report
        if self.stream is not None and getattr(report, "session", self._session) == self._session:
            self.stream.up.append(self._to_proto(report))

    def _to_proto(self, report: messages.Report) -> pb.WorkerMessage:
        if isinstance(report, messages.Load):
            return translate.load_message(report, Signs(self._steps.steps, 0.0, 0.0))
        return translate.to_worker_message(report)

    def hear(self, message: pb.RouterMessage | None) -> None:
        assert self.stream is not None
        kind = None if message is None else message.WhichOneof("body")
        if message is None:
            self.left()
        elif kind == "welcome" and self._load is not None:
            self.stream.up.append(self._to_proto(self._load))
        elif kind == "peers":
            sinks = {p.worker_id: translate.to_endpoint(p.kv_endpoint) for p in message.peers.peers}
            if self.is_prefill:
                sinks = {p.worker_id: sinks[p.worker_id] for p in message.peers.peers if p.role == pb.ROLE_DECODE}
                self._links = {peer: report for peer, report in self._links.items() if peer in sinks}
                self._inbox.put(messages.SetPeers(endpoints=sinks))
            self.stream.up.extend(self._to_proto(report) for report in self._links.values())
        elif (command := translate.to_command(message, self._session)) is not None:
            self._inbox.put(command)

    def beat(self) -> None:
        """Signs of life both ways; a router that shows none has been lost."""
        if not self.moves:
            return
        if self.is_draining and not self._is_leaving and self._clock.now > self._leave_at:
            self._leave()
        if self.stream is None:
            return
        self.stream.beat()
        if self._clock.now - self.stream.router_heard_at > HEARTBEAT_TIMEOUT_S:
            self.stream.end_up()
            self.left()

    def drain(self) -> None:
        self.is_draining = True
        self._leave_at = self._clock.now + DRAIN_TIMEOUT_S + DRAIN_GRACE_S
        self._inbox.put(messages.Drain(timeout_s=DRAIN_TIMEOUT_S))
        if self.stream is not None:
            self.stream.up.append(pb.WorkerMessage(draining=pb.Draining(timeout_s=DRAIN_TIMEOUT_S)))

    def _leave(self) -> None:
        """Nothing is left here: the process ends as soon as its router has let go of it."""
        self._is_leaving = True
        if self.stream is None:
            self.kill()
        else:
            self.stream.up.append(pb.WorkerMessage(leave=pb.Leave()))

    def kill(self) -> None:
        self.is_dead = True
        if self.stream is not None:
            self.stream.break_off()
            self.stream = None
        self.agent._carrier.close()

    # What has to hold

    def _check_deadlines(self) -> None:
        """Nothing waits past its deadline when the engine has looked."""
        if self.is_prefill:
            overdue = [a for a in self.engine._attempts.values() if not a.released and a.deadline < self._clock.now]
        else:
            overdue = self.engine._reservations.expired(self._clock.now)
        assert not overdue, f"{self.worker_id} keeps attempts past their deadline"

    def check(self, known: dict[bytes, bytes]) -> None:
        """`known` has the bytes of every block that any request can come to name."""
        allocator = self.engine._allocator
        allocator.check()
        for key, block in allocator._cache._blocks.items():
            assert key in known, f"{self.worker_id} caches a block of tokens that no request has"
            assert bytes(self.pool.view(block)) == known[key], f"{self.worker_id} caches an incomplete block"

    def check_idle(self) -> None:
        self.engine.check()
        self.engine._allocator.check_idle()
        assert not self.agent._live
        assert not self.agent._node.source.is_waiting
        assert not self.agent._node.sink.is_waiting


def keys_of(token_ids: Sequence[int]) -> list[bytes]:
    chain = KeyChain(BLOCK_SIZE, {"model": FINGERPRINT.model, "revision": FINGERPRINT.revision})
    chain.extend(token_ids)
    return chain.complete
