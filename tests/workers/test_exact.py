"""Invariant 10 in the default dtype, through both engines: whatever befalls a request, and whoever computes its prompt,
its tokens, their logprobs, K and V are those of the same request alone on workers that hold nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from splitserve.worker import commands, messages
from tests.exactness import require_exact
from tests.tiny_models import build
from tests.workers.pair import EngineRig, Pair
from tests.workers.test_hand_off import B, prompt_of
from tests.workers.test_prefix_cache import X, forget, warm
from tests.workers.test_sampling import EVERYTHING

BUDGETS = (1, 7, 40, 512)  # tokens of a prefill step: a pair of workers each
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 14, "logprobs": 4},
    "everything": EVERYTHING | {"max_tokens": 14},
}
Y = prompt_of(8 * B, 1)

# Layers of more inputs than a lone row is computed the same with; windows shorter than the prompts.
MODELS = ["llama", "gemma2"]


@dataclass(frozen=True)
class Request:
    """`fork` tokens that others begin with too, then its own; sampled by one of `OPTIONS`."""

    length: int
    fork: int
    options: str
    is_local: bool = False
    "Decode computes the prompt itself."

    @property
    def prompt(self) -> list[int]:
        return X[: min(self.fork, self.length)] + Y[self.fork : self.length]


@dataclass(frozen=True)
class Fate:
    """`requests` come together to the pair of `budget`, which holds some blocks of the first one's prompt.

    After `cut` of its tokens the first one's attempt ends, and another begins on the pair of `next_budget`: on
    decode alone if it `goes_on_locally`.
    """

    budget: int
    requests: tuple[Request, ...]
    on_prefill: int = 0
    on_decode: int = 0
    cut: int | None = None
    next_budget: int = 512
    goes_on_locally: bool = False


@dataclass(frozen=True)
class Outcome:
    """`tokens` with position, logprobs and finish reason; `blocks`: those that decode filled, of prompt and outputs."""

    tokens: list[messages.Token]
    blocks: list[bytes]


requests = st.builds(
    Request, st.integers(1, 5 * B), st.integers(0, 5 * B), st.sampled_from(sorted(OPTIONS)), st.booleans()
)
fates = st.builds(
    Fate,
    st.sampled_from(BUDGETS),
    st.lists(requests, min_size=1, max_size=3).map(tuple),
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | st.integers(1, 13),
    st.sampled_from(BUDGETS),
    st.booleans(),
)


def lone(length: int, options: str) -> tuple[Request, ...]:
    return (Request(length, length, options),)


@pytest.fixture(scope="module", params=MODELS)
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Pair]]:
    directory = build(request.param, tmp_path_factory.mktemp("deep") / request.param, intermediate_size=1536)
    made = {budget: Pair(directory, dtype="auto", max_num_batched_tokens=budget) for budget in BUDGETS}
    yield made
    for pair in made.values():
        pair.close()


def told(pair: Pair, attempt: str) -> list[messages.Token]:
    """What decode says of the attempt; under which name does not count."""
    return [msgspec.structs.replace(token, attempt="") for token in pair.tokens(attempt)]


def cached_blocks(rig: EngineRig, tokens: list[int]) -> list[bytes]:
    """The leading blocks of these tokens that `rig` holds."""
    blocks = rig.allocator.pin(rig.engine._key_chain(tokens).complete)
    contents = [bytes(rig.runner.pool.view(block)) for block in blocks]
    rig.allocator.release(blocks)
    return contents


def alone(pair: Pair, request: Request, known: dict[Request, Outcome]) -> Outcome:
    """What becomes of the request with nobody beside it, nothing cached and the whole prompt in one step of prefill."""
    if request not in known:
        for rig in (pair.prefill, pair.decode):
            forget(rig)
        attempt = pair.begin(request.prompt, **OPTIONS[request.options])
        pair.until(lambda: pair.is_finished(attempt))
        pair.assert_drained()
        tokens = told(pair, attempt)
        assert [token.position for token in tokens] == list(range(len(tokens)))
        known[request] = Outcome(tokens, cached_blocks(pair.decode, request.prompt + ids_of(tokens)))
    return known[request]


def ids_of(tokens: list[messages.Token]) -> list[int]:
    return [token.token_id for token in tokens]


def live_through(fate: Fate, pairs: dict[int, Pair]) -> list[list[messages.Token]]:
    """The tokens of each request, over all of its attempts."""
    pair, first = pairs[fate.budget], fate.requests[0]
    num_blocks = first.length // B
    warm(pair, min(fate.on_prefill, num_blocks), min(fate.on_decode, num_blocks), first.prompt)
    attempts = [
        pair.begin(request.prompt, is_local=request.is_local, **OPTIONS[request.options]) for request in fate.requests
    ]
    if fate.cut is not None:
        pair.until(lambda: len(pair.tokens(attempts[0])) >= fate.cut or pair.is_finished(attempts[0]))
        before = told(pair, attempts[0])[: fate.cut]
        for rig in (pair.prefill, pair.decode):
            rig.inbox.put(commands.Release(attempts[0], "cut"))
    pair.until(lambda: all(map(pair.is_finished, attempts[fate.cut is not None :])))
    pair.assert_drained()
    texts = [told(pair, attempt) for attempt in attempts]
    if fate.cut is not None and not before[-1].finish_reason:
        other = pairs[fate.next_budget]
        again = other.begin(first.prompt, ids_of(before), is_local=fate.goes_on_locally, **OPTIONS[first.options])
        other.until(lambda: other.is_finished(again))
        other.assert_drained()
        texts[0] = before + told(other, again)
    return texts


def test_anything_that_befalls_a_request_changes_a_bit(pairs: dict[int, Pair]) -> None:
    """Company, chunks, hits on either side, prompts computed in decode's steps, a second attempt on other workers; lone
    rows of prompts and of decoding."""
    require_exact(pairs[512].prefill.runner)
    known: dict[Request, Outcome] = {}

    # A fate is short enough to read, and shrinking it takes longer than a test may.
    @settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
    @example(Fate(1, lone(33, "everything")))  # every matmul of every forward has one row to compute
    @example(Fate(512, lone(2 * B + 1, "greedy"), on_prefill=2, on_decode=2))  # one token is left to compute
    @example(Fate(512, lone(2 * B, "everything"), on_prefill=2, cut=3, next_budget=7))
    @example(Fate(40, (Request(50, 50, "greedy"), Request(60, 40, "everything"), Request(1, 0, "greedy")), 1, 2, 6, 1))
    @example(Fate(1, (Request(33, 33, "everything", is_local=True),)))
    @example(
        Fate(
            40, (Request(50, 50, "greedy", True), Request(60, 40, "everything"), Request(9, 0, "greedy", True)), 1, 2, 6
        )
    )
    @example(Fate(7, (Request(40, 40, "everything"), Request(2 * B, 2 * B, "greedy", True)), 0, 2, 9, 40, True))
    @given(fates)
    def check(fate: Fate) -> None:
        expected = [alone(pairs[512], request, known) for request in fate.requests]
        assert live_through(fate, pairs) == [outcome.tokens for outcome in expected]
        for request, outcome in zip(fate.requests, expected, strict=True):
            tokens = request.prompt + ids_of(outcome.tokens)
            for pair in (pairs[fate.budget], pairs[fate.next_budget]):
                for rig in (pair.prefill, pair.decode):
                    found = cached_blocks(rig, tokens)
                    assert found == outcome.blocks[: len(found)]
            assert len(outcome.blocks) == (len(tokens) - 1) // B

    check()
