"""Who has joined this router: the sessions, their liveness, and what the cluster as a whole can do.

State of the event loop's thread. `join` adds sessions and feeds them; `dispatcher` places
attempts on them, and every attempt and leg hears of the end of its own.
"""

import asyncio
import contextlib
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from typing import Any

import structlog

from router.config import RouterConfig
from router.links import warning
from router.request import ClusterLimits, DecodeCapacity
from router.scheduler import max_decode_tokens, max_prefill_tokens
from router.worker import Identity, Link, Role, Worker
from splitserve.service.errors import InvalidRequest

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_SWEEP_INTERVAL_S = 0.2
# Ids of the dead that are remembered: far more than die during the life of a request.
_MAX_DEAD = 1024


class End(enum.Enum):
    """How a session ended."""

    SEEN = enum.auto()
    "Its stream ended."
    SILENT = enum.auto()
    "It said nothing any more, or got no further."


class Membership:
    def __init__(self, config: RouterConfig, model: str, revision: str) -> None:
        self._config = config
        self._model = model
        self._revision = revision
        self._workers: dict[str, Worker] = {}
        # Whose session has ended and who has not come back under its id, which is drawn anew at every start.
        self._dead: OrderedDict[str, End] = OrderedDict()
        self._has_changed = asyncio.Event()
        self._was_aggregated = False
        self._listeners: list[Callable[[], None]] = []

    # Changes

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after anything that could let a waiting request go, or change readiness."""
        self._listeners.append(listener)

    def changed(self) -> None:
        self._has_changed.set()
        self._note_way()
        for listener in self._listeners:
            listener()

    def _note_way(self) -> None:
        """A set-up that is broken must not look healthy and slow."""
        if self.is_aggregated != self._was_aggregated:
            self._was_aggregated = self.is_aggregated
            if self._was_aggregated:
                log.warning("no prefill worker can reach a decode worker: decode workers compute prompts themselves")
            else:
                log.info("prefill workers compute prompts")

    def check(self, identity: Identity) -> None:
        """Raises InvalidRequest when the worker serves something else than this router."""
        for field, theirs, ours in (
            ("model", identity.model, self._model),
            ("revision", identity.revision, self._revision),
        ):
            if theirs != ours:
                raise InvalidRequest(f"{field}: this router serves {ours!r}, the worker {theirs!r}", field=field)

    def add(self, worker: Worker) -> None:
        """A new session of a known worker first ends the old one's attempts."""
        predecessor = self._workers.get(worker.worker_id)
        if predecessor is not None:
            self.remove(predecessor, "the worker joined again")
        self._workers[worker.worker_id] = worker
        self._dead.pop(worker.worker_id, None)
        log.info("worker joined", worker=worker.worker_id, kind=worker.role, session=worker.session)
        self.changed()

    def remove(self, worker: Worker, reason: str, end: End = End.SEEN) -> None:
        """Any end of a session, clean or not: its attempts end. Idempotent."""
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
            if not worker.is_draining:
                self._note_death(worker, end)
            for other in self._workers.values():
                other.links.pop(worker.worker_id, None)
            write = log.info if worker.is_draining else log.warning
            write("worker left", worker=worker.worker_id, reason=reason, attempts=len(worker.attempts))
        worker.lose(reason)
        self.changed()

    def _note_death(self, worker: Worker, end: End) -> None:
        self._dead[worker.worker_id] = end
        while len(self._dead) > _MAX_DEAD:
            self._dead.popitem(last=False)

    async def watch(self) -> None:
        """Takes a worker for dead that is silent, or whose step gets no further. Runs until cancelled."""
        while True:
            for worker in list(self._workers.values()):
                if worker.silence_s() > self._config.heartbeat_timeout:
                    self.remove(worker, f"silent for {worker.silence_s():.1f} s", End.SILENT)
                elif worker.load.step_age_s > self._config.stall_timeout:
                    reason = f"its step has got no further for {worker.load.step_age_s:.1f} s"
                    self.remove(worker, reason, End.SILENT)
                elif worker.load.idle_silence_s > self._config.stall_timeout:
                    reason = f"its idle engine has been silent for {worker.load.silence_s:.1f} s"
                    self.remove(worker, reason, End.SILENT)
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    # Views

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def deaths_among(self, workers: Set[str]) -> dict[str, End]:
        """Those that are gone: a worker that has joined again under its id has lost a session, not its life."""
        return {worker: self._dead[worker] for worker in workers if worker in self._dead}

    async def deaths_until(
        self, workers: Set[str], is_enough: Callable[[int], bool], timeout_s: float
    ) -> dict[str, End]:
        """As `deaths_among`, as soon as their number `is_enough` and after `timeout_s` in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_enough(len(self.deaths_among(workers))):
                    self._has_changed.clear()
                    await self._has_changed.wait()
        return self.deaths_among(workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def of_role(self, role: Role) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.role is role]

    def staying(self, role: Role) -> list[Worker]:
        """Workers that are here and not about to leave."""
        return [worker for worker in self.of_role(role) if not worker.is_draining]

    def candidates(self, role: Role) -> list[Worker]:
        """Workers that may get new work: heard of lately, front and engine, and not about to leave."""
        return [worker for worker in self.staying(role) if worker.has_reported and not self._is_suspect(worker)]

    def _is_suspect(self, worker: Worker) -> bool:
        return max(worker.silence_s(), worker.load.idle_silence_s) > self._config.suspect_timeout

    @property
    def is_ready(self) -> bool:
        """There is a pair, or a decode worker that computes prompts itself."""
        return self.has_pair or (self._is_local_without_prefill and bool(self.staying(Role.DECODE)))

    @property
    def max_local_tokens(self) -> int:
        """Prompts of up to so many tokens are computed by their decode worker."""
        return sys.maxsize - 1 if self.is_aggregated else self._config.split_threshold

    @property
    def is_aggregated(self) -> bool:
        """There is no pair, and decode workers are to compute all prompts themselves meanwhile."""
        return self._is_local_without_prefill and not self.has_pair

    @property
    def _is_local_without_prefill(self) -> bool:
        return self._config.without_prefill == "local"

    @property
    def has_pair(self) -> bool:
        """At least one prefill worker has a verified link to a decode worker, and both stay."""
        sinks = {worker.worker_id for worker in self.staying(Role.DECODE)}
        links = (link for source in self.staying(Role.PREFILL) for link in source.links.items())
        return any(link.reachable and peer in sinks for peer, link in links)

    def _has_link(self, worker: Worker) -> bool:
        """Whether blocks can flow between this worker and some other that is here."""
        if worker.role is Role.PREFILL:
            return any(link.reachable and peer in self._workers for peer, link in worker.links.items())
        sources = [source.links.get(worker.worker_id) for source in self.of_role(Role.PREFILL)]
        return any(link is not None and link.reachable for link in sources)

    def why_not_ready(self) -> str:
        needed = [Role.DECODE] if self._is_local_without_prefill else list(Role)
        missing = [role.value for role in needed if not self.of_role(role)]
        if missing:
            return f"no {' and no '.join(missing)} worker has joined"
        leaving = [role.value for role in needed if not self.staying(role)]
        if leaving:
            return f"every {' and every '.join(leaving)} worker is about to end"
        failures = sorted({link.detail for w in self for link in w.links.values() if not link.reachable})
        return "no pair of workers can exchange KV blocks" + (f": {'; '.join(failures)}" if failures else " yet")

    def limits(self) -> ClusterLimits:
        def capacities(role: Role) -> list[Identity]:
            # Of those that leave only while there is nobody else: the next ones are likely to be alike.
            return [worker.identity for worker in self.staying(role) or self.of_role(role)]

        def roomiest(role: Role, max_tokens: Callable[[int, int, int], int]) -> int:
            sizes = (max_tokens(c.num_blocks, c.block_size, c.max_model_len) for c in capacities(role))
            return max(sizes, default=0)

        most_prefill = roomiest(Role.PREFILL, max_prefill_tokens)
        if most_prefill or self.is_aggregated:
            most_locally = min(self.max_local_tokens, roomiest(Role.DECODE, max_prefill_tokens))
            most_prefill = max(most_prefill, most_locally)
        # A sequence may have to be computed anew by a prefill worker at any length, so the shorter role counts.
        contexts = [max(w.identity.max_model_len for w in self.of_role(role)) for role in Role if self.of_role(role)]
        return ClusterLimits(
            ready=self.is_ready,
            max_prompt_tokens_prefill=most_prefill,
            max_prompt_tokens_decode=roomiest(Role.DECODE, max_decode_tokens),
            max_model_len=min(contexts, default=0),
            decodes=tuple(DecodeCapacity(c.num_blocks, c.block_size, c.max_num_seqs) for c in capacities(Role.DECODE)),
        )

    def kv_cache_usage(self) -> float:
        total = sum(worker.identity.num_blocks for worker in self)
        taken = sum(worker.load.blocks_in_use + worker.load.blocks_reserved for worker in self)
        return taken / total if total else 0.0

    def num_running(self) -> int:
        return sum(len(worker.attempts) for worker in self.of_role(Role.DECODE))

    def state_of(self, worker: Worker) -> str:
        if worker.is_draining:
            return "draining"
        if self._has_link(worker) or (worker.role is Role.DECODE and self.is_aggregated):
            return "ready"
        opposite = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
        return "unreachable" if self.of_role(opposite) and self._was_tried(worker) else "starting"

    def _was_tried(self, worker: Worker) -> bool:
        return bool(worker.links) or any(worker.worker_id in source.links for source in self)

    def link_warning(self, source: Worker, peer: str, link: Link) -> str | None:
        sink = self._workers.get(peer)
        is_same_host = sink is not None and sink.identity.host_id == source.identity.host_id
        return warning(link.detail, link.fallback, is_same_host=is_same_host) if link.reachable else None

    def describe(self) -> dict[str, Any]:
        """The cluster as `/cluster` shows it, without the queue."""
        workers = [self._describe_worker(worker) for worker in self]
        kinds = ("total", "free", "cached", "in_use", "reserved")
        return {
            "model": self._model,
            "revision": self._revision,
            "ready": self.is_ready,
            "aggregated": self.is_aggregated,
            "pool": {kind: sum(worker["blocks"][kind] for worker in workers) for kind in kinds},
            "workers": workers,
        }

    def _describe_worker(self, worker: Worker) -> dict[str, Any]:
        identity, load = worker.identity, worker.load
        return {
            "id": identity.worker_id,
            "role": identity.role.value,
            "pid": identity.pid,
            "host": identity.host_id,
            "state": self.state_of(worker),
            "device": identity.device,
            "topology_group": identity.topology_group,
            "transport": identity.transport,
            "blocks": {
                "total": identity.num_blocks,
                "free": load.blocks_free,
                "cached": load.blocks_cached,
                "in_use": load.blocks_in_use,
                "reserved": load.blocks_reserved,
            },
            "running": load.num_running,
            "waiting": load.num_waiting,
            "attempts": len(worker.attempts),
            "steps": load.engine_steps,
            "kv_bytes_sent": load.kv_bytes_sent,
            "kv_bytes_received": load.kv_bytes_received,
            "links": {
                peer: {
                    "reachable": link.reachable,
                    "detail": link.detail,
                    "bytes_per_s": round(link.bytes_per_s) or None,
                    "warning": self.link_warning(worker, peer, link),
                }
                for peer, link in worker.links.items()
            },
            "recompute_exact": identity.recompute_exact,
        }
