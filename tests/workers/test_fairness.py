"""Who waits too long: the planners in simulated clusters, step after step, with what keeps arriving."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker import scheduler as prefill
from prefill_worker.scheduler import PromptView


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


@dataclass
class PrefillTier:
    """One prefill worker's steps. `ended` maps each prompt to the number of the step that ended it, from 1."""

    budget: int = 512
    threshold: int = 256
    block_size: int = 16
    prompts: dict[str, PromptView] = field(default_factory=dict)
    num_steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_tokens: int) -> None:
        self.prompts[name] = PromptView(name, num_tokens, 0)

    def step(self) -> int:
        """Computes one step; returns how many tokens it took."""
        self.num_steps += 1
        chunks = prefill.plan_step(
            list(self.prompts.values()),
            token_budget=self.budget,
            threshold=self.threshold,
            block_size=self.block_size,
        )
        for chunk in chunks:
            view = self.prompts[chunk.attempt]
            assert chunk.start == view.num_computed
            self.prompts[chunk.attempt] = view = PromptView(view.attempt, view.num_tokens, chunk.start + chunk.length)
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


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.one_of(st.integers(1, 12), st.integers(1, 150))), min_size=1, max_size=25),
    st.sampled_from([(2, 1), (16, 8), (17, 3), (24, 12)]),
    st.sampled_from([1, 4]),
)
def test_some_arrival_is_never_computed(
    arrivals: list[tuple[int, int]], budget_and_threshold: tuple[int, int], block_size: int
) -> None:
    """Whatever arrives later, a prompt ends within the shares of those up to it, a short one within their number."""
    budget, threshold = budget_and_threshold
    tier = PrefillTier(budget, threshold, block_size)
    latest: dict[str, int] = {}
    waiting = sorted((when, size) for when, size in arrivals)
    sizes = {f"{index}": size for index, (_, size) in enumerate(waiting)}
    coming = [(when, str(index)) for index, (when, _) in enumerate(waiting)]
    while coming or tier.prompts:
        while coming and coming[0][0] <= tier.num_steps:
            name = coming.pop(0)[1]
            tier.add(name, sizes[name])
            shares = sum(ceil_div(prompt.num_left, threshold) for prompt in tier.prompts.values())
            latest[name] = tier.num_steps + (len(tier.prompts) if sizes[name] <= threshold else shares)
        tier.step()
    assert tier.ended.keys() == sizes.keys()
    assert {name: step for name, step in tier.ended.items() if step > latest[name]} == {}
