"""A simulated worker: the real role engine, engine loop and KV agent, moved by the test, behind a front of a few lines.

Nothing here has a thread, a process or a socket. Any exception out of `turn` or `step_kv` is one that would have ended
the worker's process.
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.flow import DecodeEngine
from prefill_worker.flow import PrefillEngine
from splitserve.engine.block_keys import KeyChain
from splitserve.engine.floor import Rates, StepFloor
from splitserve.engine.shape import ModelShape
from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker import commands, reports, translate
from splitserve.worker.clock import Signs
from splitserve.worker.config import WorkerConfig
from splitserve.worker.engine_process import EngineLoop
from splitserve.worker.engine_setup import EngineContext
from tests.simulation.engine_books import EngineBooks
from tests.simulation.hash_model import BLOCK_SIZE, LAYOUT, MAX_MODEL_LEN, MODEL, CheckedPool, HashRunner
from tests.simulation.kv_thread import FINGERPRINT, SteppedAgent
from tests.simulation.stream import JoinStream
from tests.simulation.virtual_time import VirtualClock
from tests.simulation.wires import SimulatedCarrier, Wires

CONFIG = WorkerConfig(
    block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=MAX_MODEL_LEN, transfer_timeout=5.0
)
NUM_BLOCKS = {pb.ROLE_PREFILL: 12, pb.ROLE_DECODE: 10}
HEARTBEAT_TIMEOUT_S = 4.0
DRAIN_TIMEOUT_S = 5.0
DRAIN_GRACE_S = 3.0


class StepCount:
    """In the place of the step clock: a step is seen under way only while the test holds it up."""

    def __init__(self, clock: VirtualClock) -> None:
        self.steps = 0
        self._clock = clock
        self._held_from = self._held_until = 0.0

    def hold(self, seconds: float) -> None:
        if not self.is_held:
            self._held_from = self._clock.now
        self._held_until = self._clock.now + seconds

    @property
    def is_held(self) -> bool:
        return self._clock.now < self._held_until

    def read(self) -> Signs:
        return Signs(self.steps, self._clock.now - self._held_from if self.is_held else 0.0, 0.0)

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
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.agent = SteppedAgent(
            worker_id, self.pool, SimulatedCarrier(wires, worker_id), on_event=self._inbox.put, clock=clock
        )
        self.agent.start()
        self._wires = wires
        self._clock = clock
        self.steps = StepCount(clock)
        self._session = 0
        self._load: reports.Load | None = None
        self._links: dict[str, reports.LinkReport] = {}
        context: Any = EngineContext(
            worker_id=worker_id,
            config=CONFIG,
            description=MODEL,
            runner=HashRunner(self.pool),  # type: ignore[arg-type]
            floor=StepFloor(ModelShape(), Rates(1.0, 1.0)),
            agent=self.agent,
            fingerprint=FINGERPRINT,
            publish=self._on_report,
            max_model_len=MAX_MODEL_LEN,
            clock=clock,
        )
        make: Callable[[EngineContext], Any] = PrefillEngine if self.is_prefill else DecodeEngine
        self.engine = make(context)
        self.books = EngineBooks(worker_id, self.engine, self.pool)
        self._loop = EngineLoop(self.engine, self._on_report, self._inbox, self.steps, clock)  # type: ignore[arg-type]

    @property
    def is_prefill(self) -> bool:
        return self.role == pb.ROLE_PREFILL

    @property
    def moves(self) -> bool:
        return not (self.is_frozen or self.is_dead)

    # The engine's two threads

    def turn(self) -> None:
        if self.moves and not self.steps.is_held:
            assert self._loop.turn(0.0)
            self.books.looked(self._clock.now)

    def step_kv(self) -> None:
        if self.moves:
            self.agent.step()

    # The front

    def hello(self) -> pb.WorkerMessage:
        ready = reports.Ready(
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
            topology_group="",
            transport="loopback",
            numerics="n",
            recompute_exact=True,
            linear="",
            attention="",
            layers="",
            memory=reports.Memory(0, 0, 0, 0),
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
        self._command(commands.EndSession(session=self._session))
        if self.is_prefill:
            self._links.clear()
            self._command(commands.SetPeers(endpoints={}))

    def _command(self, command: commands.Command) -> None:
        self.books.hear(command)
        self._inbox.put(command)

    def _on_report(self, report: reports.Report) -> None:
        self.books.say(report, is_spoilt=self._wires.is_spoilt)
        if isinstance(
            report, reports.TransferReport | reports.CacheLookup | reports.Ignored | reports.Step | reports.Slots
        ):
            return
        if isinstance(report, reports.Drained):
            self._leave()
            return
        if isinstance(report, reports.Load):
            self._load = report
        if isinstance(report, reports.LinkReport):
            self._links[report.peer] = report
        if self.stream is not None and getattr(report, "session", self._session) == self._session:
            self.stream.up.append(self._to_proto(report))

    def _to_proto(self, report: reports.Report) -> pb.WorkerMessage:
        if isinstance(report, reports.Load):
            return translate.load_message(report, self.steps.read())
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
                self._command(commands.SetPeers(endpoints=sinks))
            self.stream.up.extend(self._to_proto(report) for report in self._links.values())
        elif (command := translate.to_command(message, self._session)) is not None:
            self._command(command)

    def beat(self) -> None:
        """Signs of life both ways; a router that shows none has been lost."""
        if not self.moves:
            return
        if self.is_draining and not self._is_leaving and self._clock.now > self._leave_at:
            self._leave()
        if self.stream is None:
            return
        self.stream.beat(self.steps.read())
        if self._clock.now - self.stream.router_heard_at > HEARTBEAT_TIMEOUT_S:
            self.stream.end_up()
            self.left()

    def drain(self) -> None:
        if self.is_draining:
            return
        self.is_draining = True
        self._leave_at = self._clock.now + DRAIN_TIMEOUT_S + DRAIN_GRACE_S
        self._command(commands.Drain(timeout_s=DRAIN_TIMEOUT_S))
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
        self.agent.carrier.close()

    # What has to hold

    def check(self, known: dict[bytes, bytes]) -> None:
        """`known` has the bytes of every block that any request can come to name."""
        self.books.check_blocks()
        for key, block in self.engine._allocator._cache._blocks.items():
            assert key in known, f"{self.worker_id} caches a block of tokens that no request has"
            assert bytes(self.pool.view(block)) == known[key], f"{self.worker_id} caches an incomplete block"

    def check_idle(self) -> None:
        self.books.check_idle()
        self.agent.check_idle()


def keys_of(token_ids: Sequence[int]) -> list[bytes]:
    chain = KeyChain(BLOCK_SIZE, {"model": FINGERPRINT.model, "revision": FINGERPRINT.revision})
    chain.extend(token_ids)
    return chain.complete
