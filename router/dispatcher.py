"""Late binding: grants what waits in the queue a pair of workers as soon as one has room.

Runs on the event loop, never waits: the queue is looked through when someone joins it, and soon after every change of
load or membership. `serving` submits a request and gets its `RequestFlow`, which joins the queue once for each attempt;
`scheduler` decides, and the grant is an `Attempt`. Owns the queue, and makes every attempt and leg; the workers'
sessions are `membership`'s.
"""

import asyncio
import itertools
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence, Set

from router.attempt import Attempt
from router.config import RouterConfig
from router.flow import RequestFlow
from router.inbox import Inbox
from router.leg import Leg
from router.membership import End, Membership
from router.metrics import RouterMetrics
from router.pacing import Pacer
from router.queue import RequestQueue, Waiting
from router.request import GenerationRequest
from router.scheduler import (
    DecodeView,
    Demand,
    Placement,
    PrefillView,
    can_prefill,
    choose_prefill,
    could_place,
    could_prefill,
    keep_room,
    place,
)
from router.stages import StageClock
from router.worker import Role, Worker
from splitserve.service.errors import Unavailable
from splitserve.worker.admission import blocks_for, decode_blocks

DRAINING = "this router is shutting down"


class ClusterDispatcher:
    def __init__(self, config: RouterConfig, membership: Membership, metrics: RouterMetrics, pacer: Pacer) -> None:
        self._pacer = pacer
        self._config = config
        self._membership = membership
        self._metrics = metrics
        self._turn = 0
        self._arrivals = itertools.count()
        self._is_kicked = False
        self._is_draining = False
        # Who room is kept for, as of the last look through the queue.
        self._kept: list[Demand] = []
        self.queue = RequestQueue(config.max_queue_requests, config.max_queue_tokens)
        membership.on_change(self.kick)

    def submit(self, request: GenerationRequest, stages: StageClock) -> RequestFlow:
        """Admits the request and queues its first attempt; raises Overloaded or Unavailable at once."""
        if self._is_draining:
            raise Unavailable(DRAINING, reason="DRAINING", retry_after_s=1.0)
        self._check_workers(Demand(len(request.prompt_ids), request.sampling.n))
        self.queue.check_room(len(request.prompt_ids))
        return RequestFlow(request, stages, self, self._config, self._metrics, next(self._arrivals))

    def _check_workers(self, demand: Demand) -> None:
        """Whoever could only wait for other workers to come is told at once."""
        if not self._membership.is_ready:
            why = self._membership.why_not_ready()
            if self._config.without_prefill == "refuse" and not self._membership.staying(Role.PREFILL):
                why += f" (--without-prefill {self._config.without_prefill})"
        elif not self.could_place(demand):
            why = self._too_large(demand)
        else:
            return
        raise Unavailable(why, reason="NO_WORKERS", retry_after_s=1.0)

    def drain(self) -> None:
        """No new request is admitted from now on; those that are here go on, also on workers that join only now."""
        self._is_draining = True

    @property
    def is_ready(self) -> bool:
        return self._membership.is_ready and not self._is_draining

    def why_not_ready(self) -> str:
        return DRAINING if self._is_draining else self._membership.why_not_ready()

    def deaths_among(self, workers: Set[str]) -> Mapping[str, End]:
        return self._membership.deaths_among(workers)

    async def deaths_until(
        self, workers: Set[str], is_enough: Callable[[int], bool], timeout_s: float
    ) -> Mapping[str, End]:
        return await self._membership.deaths_until(workers, is_enough, timeout_s)

    def enqueue(self, waiting: Waiting, pause_s: float = 0.0) -> None:
        """Waits from now on; for the first `pause_s` its place and its room are kept, but it is granted no pair."""
        if pause_s > 0:
            waiting.is_paused = True
            asyncio.get_running_loop().call_later(pause_s, self._resume, waiting)
        self.queue.add(waiting)
        self._grant_waiting()

    def _resume(self, waiting: Waiting) -> None:
        waiting.is_paused = False
        self._grant_waiting()

    def withdraw(self, waiting: Waiting) -> None:
        """The request no longer waits: out of the queue, or, if it was granted a pair just now, off it."""
        self.queue.remove(waiting)
        if waiting.attempt is not None:
            self.close(waiting.attempt, "no longer wanted")

    def close(self, attempt: Attempt, reason: str) -> None:
        attempt.close(reason)
        self.kick()

    def kick(self) -> None:
        """Has the queue looked through after this turn of the event loop: a request whose attempt was ended in it is
        queued again by then, in its place before new work."""
        if not self._is_kicked:
            self._is_kicked = True
            asyncio.get_running_loop().call_soon(self._grant_waiting)

    def _grant_waiting(self) -> None:
        """Grants pairs, in order of the queue, to all that find one.

        The head, the first that only waits for room, may be passed by those that find some, but not for long: then room
        is kept for it, and they go on with what is left. One that no worker here could ever hold is passed.
        """
        self._is_kicked = False
        if not self.queue:
            self._kept = []
            return
        head: Waiting | None = None
        kept = self._kept = []
        # Who computes short prompts has nothing to do with who computes long ones.
        without_room_of: dict[bool, list[Demand]] = {False: [], True: []}
        most_locally = self._membership.max_local_tokens
        prefills, decodes = self._views(kept)
        for waiting in self.queue.in_order():
            demand = waiting.demand
            without_room = without_room_of[demand.num_tokens <= most_locally]
            if any(demand.needs_no_less(other) for other in without_room):
                continue
            placement = place(demand, prefills, decodes, self._config.routing, self._turn)
            if placement is not None:
                if waiting.is_paused:
                    kept.append(demand)
                else:
                    self.queue.remove(waiting)
                    waiting.grant(self._grant(demand, placement))
                prefills, decodes = self._views(kept)
                continue
            without_room[:] = [other for other in without_room if not other.needs_no_less(demand)] + [demand]
            if head is None and could_place(demand, prefills, decodes):
                head = waiting
                if self._may_not_be_passed(head):
                    kept.append(demand)
                    prefills, decodes = self._views(kept)

    def _may_not_be_passed(self, head: Waiting) -> bool:
        """A re-attempt never, because it was admitted once; others have been passed for long enough."""
        now = asyncio.get_running_loop().time()
        if head.blocked_since is None:
            head.blocked_since = now
        return head.is_retry or now - head.blocked_since >= self._config.passing_timeout

    def could_place(self, demand: Demand) -> bool:
        """Whether some pair that is here, or decode worker by itself, would have room for the request if it were idle.

        Workers that have just fallen silent are counted in: most are back in a moment, and the others soon gone.
        """
        workers = self._membership.staying(Role.DECODE)
        prefills = self._prefill_views(self._membership.staying(Role.PREFILL), workers)
        return could_place(demand, prefills, [worker.decode_view() for worker in workers])

    def no_pair(self, demand: Demand, interrupted_by: str) -> Unavailable:
        """For a request that has waited for long enough; `interrupted_by` is empty before its first attempt."""
        if not self._membership.is_ready:
            why = self._membership.why_not_ready()
        elif self.could_place(demand):
            why = f"no {'decode worker' if self._is_local(demand) else 'pair of workers'} has room"
        else:
            why = self._too_large(demand)
        message = f"interrupted by {interrupted_by}, and {why}" if interrupted_by else why
        if self._is_draining:  # other routers may have a pair
            return Unavailable(f"{message}; {DRAINING}", reason="DRAINING", retry_after_s=1.0)
        return Unavailable(message, reason="NO_WORKERS", retry_after_s=1.0)

    def _too_large(self, demand: Demand) -> str:
        whoever = "decode worker" if self._is_local(demand) else "linked pair of workers"
        samples = "" if demand.num_samples == 1 else f" for {demand.num_samples} samples"
        return f"no {whoever} here can hold {demand.num_tokens} tokens{samples}"

    def _is_local(self, demand: Demand) -> bool:
        """Whether its decode worker is to compute the prompt."""
        return demand.num_tokens <= self._membership.max_local_tokens

    def _prefill_views(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> list[PrefillView]:
        """Whoever computes prompts, each with the lengths that it is given."""
        most = self._membership.max_local_tokens
        views = [worker.prefill_view(range(most + 1, sys.maxsize)) for worker in prefills]
        return views + [worker.prefill_view(range(1, most + 1)) for worker in decodes if most > 0]

    def _views(self, kept: Sequence[Demand]) -> tuple[list[PrefillView], list[DecodeView]]:
        """The workers that may get new work, less the room that is kept for `kept`."""
        workers = self._membership.candidates(Role.DECODE)
        prefills = self._prefill_views(self._membership.candidates(Role.PREFILL), workers)
        decodes = [worker.decode_view() for worker in workers]
        for demand in kept:
            prefills, decodes = keep_room(demand, prefills, decodes)
        return prefills, decodes

    def _grant(self, demand: Demand, placement: Placement) -> Attempt:
        """Takes the room on both workers at once, so that the next placement sees it as taken."""
        self._turn += 1
        prefill = self._membership.get(placement.prefill)
        decode = self._membership.get(placement.decode)
        assert prefill is not None
        assert decode is not None
        # Random per attempt and made here: no client's id is ever a key.
        attempt_id, inbox = uuid.uuid4().hex, Inbox()
        is_local, num_tokens = placement.is_local, demand.num_tokens
        leg = Leg(attempt_id, decode, inbox) if is_local else self._leg(prefill, num_tokens, inbox)
        attempt = Attempt(attempt_id, leg, decode, inbox, self, self._config, self._metrics, self._pacer)
        num_blocks = decode_blocks(demand.num_tokens, demand.num_samples, decode.identity.block_size)
        decode.promise(attempt_id, attempt, num_blocks, num_tokens if is_local else 0, demand.num_samples)
        return attempt

    def _leg(self, worker: Worker, num_tokens: int, inbox: Inbox) -> Leg:
        leg = Leg(uuid.uuid4().hex, worker, inbox)
        worker.promise(leg.leg_id, leg, blocks_for(num_tokens, worker.identity.block_size), num_tokens)
        return leg

    def has_prefill(self, decode: Worker, num_tokens: int) -> bool:
        """Whether a prefill worker that is here could take the prompt for `decode` if it were idle and, where it has
        just lost its link, had it back: it dials again at once."""
        linked = [w for w in self._membership.candidates(Role.PREFILL) if decode.worker_id in w.links]
        return any(could_prefill(view, num_tokens) for view in self._prefill_views(linked, ()))

    def next_leg(self, decode: Worker, num_tokens: int, unwanted: Set[str], inbox: Inbox) -> Leg | None:
        """On a worker that has room, which is promised now; on an unwanted one only if there is no other."""
        prefills, _ = self._views(self._kept)
        others = [view for view in prefills if view.worker != decode.worker_id]
        linked = [v for v in others if decode.worker_id in v.reachable and could_prefill(v, num_tokens)]
        wanted = [view for view in linked if view.worker not in unwanted] or linked
        choices = [view for view in wanted if can_prefill(view, num_tokens)]
        if not choices:
            return None
        chosen = choose_prefill(choices, decode.decode_view(), self._turn)
        worker = self._membership.get(chosen.worker)
        assert worker is not None
        return self._leg(worker, num_tokens, inbox)
