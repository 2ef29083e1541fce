"""A request is given up at every moment of its life on the workers: what is left of it costs nothing more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.events import TransferComplete
from splitserve.worker import commands, reports
from tests.tiny_models import build
from tests.workers.pair import EngineRig, Pair
from tests.workers.test_hand_off import prompt_of

B = 16
CHUNK = 48


def release(pair: Pair, attempt: str) -> None:
    """As the router does: to whoever has a part in it."""
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.Release(attempt, "the client is gone"))


def test_abandoned_prompts_are_computed_before_a_short_one(tmp_path: Path) -> None:
    """C22: ten prompts of 4,000 tokens whose clients leave, then twenty tokens: at most one chunk lies between."""
    directory = build("llama", tmp_path / "llama", max_position_embeddings=8192)
    pair = Pair(directory, prefill_blocks=2600, decode_blocks=2600, max_num_batched_tokens=128)
    try:
        abandoned = [pair.begin(prompt_of(4000, seed)) for seed in range(10)]
        pair.until(lambda: len(pair.prefill.said(reports.Accepted)) == 10 and pair.prefill.runner.num_forwards > 2)
        for attempt in abandoned:
            release(pair, attempt)
        before = pair.prefill.runner.num_forwards
        short = pair.begin(prompt_of(20), max_tokens=4)
        pair.until(lambda: any(told.attempt == short for told in pair.prefill.said(reports.FirstTokens)))
        assert pair.prefill.runner.num_forwards - before <= 2, "one chunk under way, and its own"
        pair.until(lambda: pair.is_finished(short))
        assert not [told for told in pair.prefill.said(reports.FirstTokens) if told.attempt in abandoned]
        pair.assert_drained()
    finally:
        pair.close()


def forwards(pair: Pair) -> tuple[int, int]:
    return pair.prefill.runner.num_forwards, pair.decode.runner.num_forwards


def in_use(rig: EngineRig) -> int:
    return rig.allocator.counts.total - rig.allocator.available


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_prompt_is_computed_after_its_end(num_chunks: int, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(max_num_batched_tokens=CHUNK)
    before, _ = forwards(pair)
    attempt = pair.begin(prompt_of(10 * CHUNK))
    pair.until(lambda: pair.prefill.said(reports.Accepted) and forwards(pair)[0] - before >= num_chunks)
    release(pair, attempt)
    computed = forwards(pair)
    pair.until(lambda: not in_use(pair.prefill) and not in_use(pair.decode))
    assert forwards(pair) == computed
    pair.assert_drained()


def test_text_goes_on_after_its_end(make_pair: Callable[..., Pair]) -> None:
    """The next step is without it, and its blocks are free at once."""
    pair = make_pair()
    attempt = pair.begin(prompt_of(40), max_tokens=200)
    other = pair.begin(prompt_of(20), max_tokens=30)
    pair.until(lambda: len(pair.tokens(attempt)) >= 5 and len(pair.tokens(other)) >= 5)
    release(pair, attempt)
    told = len(pair.tokens(attempt))
    pair.turn()
    assert in_use(pair.decode) <= -(-60 // B)
    pair.until(lambda: pair.is_finished(other))
    assert len(pair.tokens(attempt)) == told
    assert len(pair.tokens(other)) == 30
    pair.assert_drained()


@pytest.mark.parametrize("is_first", [True, False], ids=["release-first", "blocks-first"])
def test_end_between_the_last_block_and_the_first_step(is_first: bool, make_pair: Callable[..., Pair]) -> None:
    """C25: the transfer is complete and decode has not heard of it when the client leaves, or just has."""
    pair = make_pair()
    attempt = pair.begin(prompt_of(40), max_tokens=20)
    waiting = pair.decode.inbox
    held: list[Any] = []

    def has_completed() -> bool:
        while not waiting.empty():
            held.append(waiting.get())
        return any(isinstance(item, TransferComplete) for item in held)

    pair.until_alone(pair.prefill, has_completed)
    ending = commands.Release(attempt, "the client is gone")
    for item in [ending, *held] if is_first else [*held, ending]:
        waiting.put(item)
    _, before = forwards(pair)
    pair.until(lambda: not in_use(pair.decode))
    assert forwards(pair)[1] == before
    assert len(pair.tokens(attempt)) <= 1, "at most the first token, which decode repeats as it begins"
    pair.assert_drained()
