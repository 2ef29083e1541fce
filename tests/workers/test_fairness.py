"""Who waits too long: the planners in simulated clusters, step after step, with what keeps arriving."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker import scheduler as decode
from decode_worker.scheduler import ReservationView, SequenceView, StepPlan
from router.queue import Waiting
from router.scheduler import Demand
from router.worker import LoadReport, Role
from splitserve.worker import reports
from splitserve.worker.chunks import PromptView, plan_chunks
from tests.router.cluster_fakes import Router
from tests.workers.pair import Pair
from tests.workers.test_hand_off import prompt_of


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


@dataclass
class PrefillTier:
    """One prefill worker's steps. `ended` maps each prompt to the number of the step that ended it, from 1."""

    budget: int = 512
    scored_budget: int = 256
    threshold: int = 256
    block_size: int = 16
    prompts: dict[str, PromptView] = field(default_factory=dict)
    num_steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_tokens: int, *, is_scored: bool = False) -> None:
        self.prompts[name] = PromptView(name, num_tokens, 0, is_scored)

    def num_shares(self, prompt: PromptView) -> int:
        """Steps that the prompt takes of those behind it, at most."""
        share = min(self.threshold, self.scored_budget // 2) if prompt.is_scored else self.threshold
        return ceil_div(prompt.num_left, share)

    def step(self) -> int:
        """Computes one step; returns how many tokens it took."""
        self.num_steps += 1
        chunks = plan_chunks(
            list(self.prompts.values()),
            token_budget=self.budget,
            scored_budget=self.scored_budget,
            threshold=self.threshold,
            block_size=self.block_size,
        )
        for chunk in chunks:
            view = self.prompts[chunk.attempt]
            assert chunk.start == view.num_computed
            self.prompts[chunk.attempt] = view = replace(view, num_computed=chunk.start + chunk.length)
            if view.num_left == 0:
                del self.prompts[chunk.attempt]
                self.ended[chunk.attempt] = self.num_steps
        return sum(chunk.length for chunk in chunks)


def test_giant_prompt_starves_the_others() -> None:
    """C47: 30,000 tokens, and twenty prompts of 50 that come while it is computed: each ends within a few steps of its
    arrival, and the giant is not late by more than their tokens."""
    tier = PrefillTier()
    tier.add("giant", 30_000)
    tier.step()
    arrivals = {}
    for number in range(20):
        arrivals[f"s{number}"] = tier.num_steps
        tier.add(f"s{number}", 50)
        if number % 5 == 4:
            tier.step()
    while tier.prompts:
        tier.step()
    assert max(tier.ended[name] - arrived for name, arrived in arrivals.items()) <= 2
    assert tier.ended["giant"] == ceil_div(30_000 + 20 * 50, 512)


def test_giant_prompts_are_starved_by_an_endless_crowd() -> None:
    """Short ones fill every step: each giant in turn still gets its share, and the short ones end at once."""
    tier = PrefillTier()
    tier.add("first", 30_000)
    tier.add("second", 30_000)
    late = 0
    while not {"first", "second"} <= tier.ended.keys():
        for number in range(5):
            tier.add(f"{tier.num_steps}/{number}", 51)
        assert tier.step() == tier.budget
        late = max(
            late, max((tier.num_steps - int(name.split("/")[0]) for name in tier.prompts if "/" in name), default=0)
        )
    share = ceil_div(30_000, tier.threshold)
    assert tier.ended["first"] <= share
    assert tier.ended["second"] <= 2 * share
    assert late <= 1


ARRIVAL = st.tuples(st.integers(0, 6), st.one_of(st.integers(1, 12), st.integers(1, 150)), st.booleans())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(ARRIVAL, min_size=1, max_size=25),
    st.sampled_from([(2, 1), (16, 8), (17, 3), (24, 12)]),
    st.sampled_from([2, 5, 12, 40]),
    st.sampled_from([1, 4]),
)
def test_some_arrival_is_never_computed(
    arrivals: list[tuple[int, int, bool]], budget_and_threshold: tuple[int, int], scored_budget: int, block_size: int
) -> None:
    """Whatever arrives later, a prompt ends within the shares of those up to it; a short one within their number, if
    none of them is scored."""
    budget, threshold = budget_and_threshold
    tier = PrefillTier(budget, scored_budget, threshold, block_size)
    latest: dict[str, int] = {}
    coming = [(when, str(index), size, scored) for index, (when, size, scored) in enumerate(sorted(arrivals))]
    names = {name for _, name, _, _ in coming}
    while coming or tier.prompts:
        while coming and coming[0][0] <= tier.num_steps:
            _, name, size, is_scored = coming.pop(0)
            tier.add(name, size, is_scored=is_scored)
            ahead = tier.prompts.values()
            plain = size <= threshold and not any(prompt.is_scored for prompt in ahead)
            latest[name] = tier.num_steps + (len(ahead) if plain else sum(map(tier.num_shares, ahead)))
        tier.step()
    assert tier.ended.keys() == names
    assert {name: step for name, step in tier.ended.items() if step > latest[name]} == {}


@dataclass
class Job:
    """A request of the simulated decode tier. A sample's table holds `num_blocks` blocks while it runs."""

    name: str
    arrival: int
    num_prompt: int
    num_wanted: int
    num_outputs: int = 0
    num_blocks: int = 0
    waiting: Waiting | None = None
    attempts: int = 0
    ready_at: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_outputs


class DecodeTier:
    """The real queue and dispatcher before one simulated pool that follows the real plans.

    Blocks take `delay` steps to arrive, and two to come back from a reservation that was revoked.
    """

    BLOCK = 4

    def __init__(self, num_blocks: int, delay: int, passing_timeout: float) -> None:
        self._router = Router(passing_timeout=passing_timeout)
        self._router.join(Role.PREFILL, "p", block_size=self.BLOCK, num_blocks=10**6, max_num_batched_tokens=10**6)
        self._decode = self._router.join(Role.DECODE, "d", block_size=self.BLOCK, num_blocks=num_blocks).worker
        self._num_blocks = num_blocks
        self._delay = delay
        self.queued: list[Job] = []
        self.reserved: list[Job] = []
        self.running: list[Job] = []
        self.returning: list[tuple[int, int]] = []
        self.num_steps = 0

    @property
    def num_available(self) -> int:
        held = sum(job.num_blocks for job in self.reserved + self.running) + sum(n for _, n in self.returning)
        assert held <= self._num_blocks, "blocks are given twice"
        return self._num_blocks - held

    def add(self, job: Job, *, was_preempted: bool = False) -> None:
        demand = Demand(job.num_tokens, was_preempted=was_preempted)
        job.waiting = Waiting(demand, job.attempts > 0, 0, job.arrival)
        self.queued.append(job)
        self._router.dispatcher.enqueue(job.waiting)

    async def step(self) -> list[Job]:
        """One step of everything; returns who has ended in it."""
        self.num_steps += 1
        self.returning = [(when, n) for when, n in self.returning if when > self.num_steps]
        for job in [job for job in self.reserved if job.ready_at <= self.num_steps]:
            self.reserved.remove(job)
            self.running.append(job)
            job.num_outputs += 1
        plan = self._plan()
        names = {job.name: job for job in self.reserved + self.running}
        for name in plan.revoke + plan.preempt:
            self._give_way(names[name])
        for name in plan.grow:
            names[name].num_blocks += 1
        for name in plan.run:
            names[name].num_outputs += 1
        assert self.num_available >= 0
        ended = [job for job in self.running if job.num_outputs >= job.num_wanted]
        for job in ended:
            self._let_go(job)
        self._decode.load = LoadReport(
            blocks_free=self.num_available, num_running=len(self.running), num_waiting=len(self.reserved)
        )
        await self._answer()
        return ended

    def _plan(self) -> StepPlan:
        plan = decode.plan_step(
            [SequenceView(j.name, j.num_tokens, j.num_blocks, num_freed=j.num_blocks) for j in self.running],
            [ReservationView(job.name, job.num_blocks) for job in self.reserved],
            returning=sum(n for _, n in self.returning),
            available=self.num_available,
            block_size=self.BLOCK,
        )
        assert not self.running or self.running[0].name not in plan.preempt
        return plan

    def _give_way(self, job: Job) -> None:
        if job in self.reserved:
            self.returning.append((self.num_steps + 2, job.num_blocks))
        self._let_go(job)
        self.add(job, was_preempted=True)

    def _let_go(self, job: Job) -> None:
        (self.reserved if job in self.reserved else self.running).remove(job)
        job.num_blocks = 0

    async def _answer(self) -> None:
        """What the router grants upon the load becomes a reservation, or is refused."""
        self._router.membership.changed()
        await asyncio.sleep(0)
        for job in [job for job in self.queued if job.waiting is not None and job.waiting.attempt is not None]:
            for worker in self._router.membership:
                worker.promises.clear()
            self.queued.remove(job)
            job.attempts += 1
            num_blocks = job.num_tokens // self.BLOCK + 1
            if num_blocks > self.num_available:
                # The router had not heard yet of what else was taken.
                self.add(job)
                continue
            job.num_blocks = num_blocks
            job.ready_at = self.num_steps + self._delay
            self.reserved.append(job)


JOBS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(2, 40)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(JOBS, st.integers(18, 40), st.integers(1, 6), st.sampled_from([0.0, 3600.0]))
def test_some_request_is_preempted_for_ever(
    jobs: list[tuple[int, int, int]], num_blocks: int, delay: int, passing_timeout: float
) -> None:
    """Whatever arrives when: every request ends, in no more steps than if they ran one after the other."""

    async def simulate() -> None:
        tier = DecodeTier(num_blocks, delay, passing_timeout)
        coming = [Job(str(i), i, prompt, wanted) for i, (_, prompt, wanted) in enumerate(sorted(jobs))]
        when = {job.name: arrival for job, (arrival, _, _) in zip(coming, sorted(jobs), strict=True)}
        limit = max(when.values()) + sum(job.num_wanted * 2 + delay + 4 for job in coming)
        unfinished = len(coming)
        while unfinished:
            for job in [job for job in coming if when[job.name] <= tier.num_steps]:
                coming.remove(job)
                tier.add(job)
            unfinished -= len(await tier.step())
            assert tier.num_steps <= limit, f"{unfinished} requests never end"

    asyncio.run(simulate())


def test_engine_computes_a_giant_prompt_first(make_pair: Callable[..., Pair]) -> None:
    """C47 with real steps: short prompts that come behind it have their first tokens while it is under way."""
    pair = make_pair(max_num_batched_tokens=32, prefill_blocks=80, decode_blocks=80)
    giant = pair.begin(prompt_of(900), max_tokens=2)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    load = pair.prefill.engine.load()
    assert (load.tokens_ahead, load.waiting_tokens > 800) == (16, True)
    steps = pair.prefill.runner.num_forwards
    short = [pair.begin(prompt_of(10, seed), max_tokens=2) for seed in range(4)]
    pair.until(lambda: len(pair.prefill.said(reports.FirstTokens)) >= 4)
    assert {report.attempt for report in pair.prefill.said(reports.FirstTokens)} == set(short)
    pair.until(lambda: pair.is_finished(giant))
    # One step was done before the short ones came; their 40 tokens cost at most two steps more.
    assert pair.prefill.runner.num_forwards - steps <= ceil_div(900 + 40, 32) - 1
    pair.until(lambda: all(map(pair.is_finished, short)))
    pair.assert_drained()
