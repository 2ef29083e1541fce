"""A whole cluster in one thread and virtual time: the real router (membership, dispatcher, flow, attempts, both of its
services) over simulated workers, clients and links.

Moves only when told to. What is wrong at any moment is an AssertionError or the exception that would have ended a
process.
"""

import logging
from collections import Counter
from dataclasses import replace

import structlog
from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.join import ClusterServicer
from router.membership import Membership
from router.metrics import Outcome, RouterMetrics
from router.pacing import Pacer
from router.server import InferenceServicer
from router.serving import Serving
from router.validation import RequestValidator
from splitserve.v1 import cluster_pb2 as pb
from tests.kvtransfer.fake_link import Parcel
from tests.router.fakes import ByteTokenizer, PieceDetokenizer
from tests.simulation.client import Client, Options
from tests.simulation.hash_model import LAYOUT, MODEL, VOCAB_SIZE, kv_bytes
from tests.simulation.router_books import Commands, WatchedDispatcher
from tests.simulation.stream import JoinStream
from tests.simulation.virtual_time import SimulatedLoop, VirtualClock
from tests.simulation.wires import Lane, Wires
from tests.simulation.worker import HEARTBEAT_TIMEOUT_S, SimulatedWorker, keys_of

# How far time goes in one piece: everybody shows a sign of life after each.
BEAT_S = 1.0
# Attempts, patience and deadlines are plenty: whatever fails a request here fails it wrongly.
PLENTY = RouterConfig(
    max_attempts=1000,
    request_timeout=100_000.0,
    failover_timeout=10_000.0,
    passing_timeout=2.0,
    reserve_timeout=2.0,
    prefill_timeout=4.0,  # less than a transfer may stand still
    token_timeout=10.0,
    heartbeat_interval=BEAT_S,
    suspect_timeout=2.0,
    heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
    stall_timeout=10.0,
)
# All of them soon run out.
SCARCE = replace(PLENTY, max_attempts=2, failover_timeout=5.0, request_timeout=60.0)


class CountedOutcomes(RouterMetrics):
    def __init__(self) -> None:
        super().__init__(CollectorRegistry(), MODEL.name)
        self.outcomes: Counter[Outcome] = Counter()

    def count_request(self, outcome: Outcome) -> None:
        super().count_request(outcome)
        self.outcomes[outcome] += 1


class Cluster:
    def __init__(self, config: RouterConfig = PLENTY, pause_s: float = 0.0) -> None:
        """`pause_s`: how long tokens wait for others, as they do on a router that has too much to do."""
        # Log records cost more than all else here.
        self._log_config = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        self.clock = VirtualClock()
        self.loop = SimulatedLoop(self.clock)
        self.wires = Wires(self.clock)
        self.workers: list[SimulatedWorker] = []
        self.clients: list[Client] = []
        self.known: dict[bytes, bytes] = {}
        self.config = config
        self._commands = Commands(self.clients, self.workers)
        self.metrics = CountedOutcomes()
        pacer = Pacer()
        pacer.pause_s = pause_s
        self.membership = Membership(config, MODEL.name, MODEL.revision)
        self.dispatcher = WatchedDispatcher(config, self.membership, self.metrics, pacer)
        self._validator = RequestValidator(MODEL, ByteTokenizer(), self.membership.limits)
        serving = Serving(
            detokenizer=PieceDetokenizer([bytes([65 + token]) for token in range(VOCAB_SIZE)]),
            validator=self._validator,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            request_timeout_s=config.request_timeout,
        )
        limits = self.membership.limits
        self._public = InferenceServicer(serving, model=MODEL, validator=self._validator, limits=limits)
        self._internal = ClusterServicer(config, self.membership, "router")
        self._watch = self.loop.create_task(self.membership.watch())
        self.loop.run_ready()

    def close(self) -> None:
        self._watch.cancel()
        for client in self.clients:
            client.may_read.set()
            client.leave()
        for worker in self.workers:
            if not worker.is_dead:
                worker.kill()
        self.loop.run_ready()
        self._validator.close()
        self.loop.close()
        structlog.configure(**self._log_config)

    # Who comes and goes

    def add_worker(self, role: pb.Role.ValueType) -> SimulatedWorker:
        letter = "p" if role == pb.ROLE_PREFILL else "d"
        worker = SimulatedWorker(f"{letter}{len(self.workers)}", role, self.wires, self.clock)
        self.workers.append(worker)
        worker.turn()
        self.join(worker)
        return worker

    def join(self, worker: SimulatedWorker) -> None:
        stream = JoinStream(worker.hello(), self.clock, self._commands.told)
        stream.serve(self.loop.create_task(self._internal.Join(stream, stream)))  # type: ignore[arg-type]
        worker.joined(stream)
        self.loop.run_ready()

    def is_busy(self, worker: SimulatedWorker) -> bool:
        """Whether the router has something on it."""
        joined = self.membership.get(worker.worker_id)
        return joined is not None and bool(joined.attempts)

    def num_lost(self) -> int:
        return sum(self.membership.get(worker.worker_id) is None for worker in self.workers)

    def cut_join(self, worker: SimulatedWorker) -> None:
        if worker.stream is not None:
            worker.stream.break_off()
            self.loop.run_ready()

    def kill(self, worker: SimulatedWorker) -> None:
        worker.kill()
        self.loop.run_ready()

    def submit(
        self, prompt_ids: list[int], max_tokens: int, options: Options, num_samples: int, deadline_s: float | None
    ) -> Client:
        number = len(self.clients)
        client = Client(prompt_ids, max_tokens, options, num_samples, deadline_s, number, self.clock, self.num_lost)
        self.clients.append(client)
        for token_ids in client.reference.sequences():
            whole = kv_bytes(token_ids)
            for index, key in enumerate(keys_of(token_ids)):
                self.known[key] = whole[index * LAYOUT.block_nbytes : (index + 1) * LAYOUT.block_nbytes]
        client.call(self._public.Generate, self.loop)
        self.loop.run_ready()
        return client

    # Messages

    def deliver_up(self, worker: SimulatedWorker) -> bool:
        """What a frozen worker has said is on its way all the same."""
        if worker.stream is None or not worker.stream.up:
            return False
        worker.stream.deliver_up()
        self.loop.run_ready()
        return True

    def deliver_down(self, worker: SimulatedWorker) -> bool:
        if worker.stream is None or not worker.stream.down or not worker.moves:
            return False
        worker.hear(worker.stream.deliver_down())
        return True

    def repeat(self, worker: SimulatedWorker, way: str, place: int, *, is_late: bool) -> None:
        """Something that was said on the worker's stream is said again: what comes next now and then once more, or
        what came once."""
        if worker.stream is not None:
            worker.stream.repeat(way, place, is_late=is_late)
            self.loop.run_ready()

    def deliver_kv(self, lane: Lane, position: int = 0) -> bool:
        receiver = self._owner(lane)
        if not lane.parcels or not receiver.moves:
            return False
        lane.deliver(position)
        receiver.step_kv()
        return True

    def replay_kv(self, lane: Lane, parcel: Parcel) -> None:
        receiver = self._owner(lane)
        if receiver.moves:
            lane.replay(parcel)
            receiver.step_kv()

    def _owner(self, lane: Lane) -> SimulatedWorker:
        return next(worker for worker in self.workers if worker.agent.carrier is lane.receiver)

    # Time

    def move(self, without: str = "") -> None:
        """What is under way arrives, except `without` ("up", "down" or "kv"), and every engine turns once."""
        for worker in self.workers:
            while without != "down" and self.deliver_down(worker):
                pass
            worker.turn()
            worker.step_kv()
        for lane in list(self.wires.lanes):
            while without != "kv" and self.deliver_kv(lane):
                pass
        for worker in self.workers:
            while without != "up" and self.deliver_up(worker):
                pass

    def pass_time(self, seconds: float, *, is_moving: bool) -> None:
        """Engines and KV threads go on; messages move only if `is_moving`."""
        left = seconds
        while left > 0:
            piece = min(left, BEAT_S)
            left -= piece
            self.loop.pass_time(piece)
            for worker in self.workers:
                if piece == BEAT_S:
                    worker.beat()
                    if worker.moves and worker.stream is None and not worker.is_draining:
                        self.join(worker)
                worker.turn()
                worker.step_kv()
            if is_moving:
                self.move()
            self.loop.run_ready()
            self._check_router()

    # What has to hold

    def check(self) -> None:
        for worker in self.workers:
            if not worker.is_dead:
                worker.check(self.known)
        self._check_router()

    def _check_router(self) -> None:
        assert not self.loop.errors, self.loop.errors
        self.dispatcher.check()
        for client in self.clients:
            client.check_deadline(self.config.request_timeout)
        for joined in self.membership:
            assert self.clock.now - joined.last_heard <= HEARTBEAT_TIMEOUT_S + BEAT_S, "nobody misses a silent worker"
            assert joined.promises.keys() <= joined.attempts.keys(), "room is promised to an attempt that is gone"
        waiting = self.dispatcher.queue.in_order()
        assert self.dispatcher.queue.num_tokens == sum(entry.demand.num_tokens for entry in waiting)
        assert self.metrics.outcomes.total() == sum(client.is_over for client in self.clients), "an outcome too many"

    def check_idle(self) -> None:
        for worker in self.workers:
            if not worker.is_dead:
                worker.check_idle()
        for joined in self.membership:
            assert not joined.attempts, f"{joined.worker_id} still has attempts"
        assert len(self.dispatcher.queue) == self.dispatcher.queue.num_tokens == 0
