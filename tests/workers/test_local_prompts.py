"""Prompts that a decode worker computes itself, beside what it decodes: another text, a stream that stands still, lost
blocks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.engine.batch import Segment
from splitserve.engine.sampling_params import SamplingParams
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.reference import greedy, sampled
from tests.workers.pair import EngineRig, Pair, limits
from tests.workers.test_books import ENDLESS, LONG_PROMPT, has_stood_still
from tests.workers.test_hand_off import LENGTHS, B, prompt_of
from tests.workers.test_prefix_cache import X, forget
from tests.workers.test_sampling import EVERYTHING

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]


def begin(pair: Pair, prompt: Sequence[int], outputs: Sequence[int] = (), **options: Any) -> str:
    return pair.begin(prompt, outputs, is_local=True, **options)


def begin_samples(pair: Pair, prompt: Sequence[int], num_samples: int, **changes: Any) -> str:
    start = messages.Start(
        list(prompt), [messages.Sample(index, []) for index in range(num_samples)], limits(**changes)
    )
    pair.decode.inbox.put(commands.Reserve(1, "a", start, 60.0, is_local=True))
    return "a"


def ids(pair: Pair, attempt: str, sample: int = 0) -> list[int]:
    return [token.token_id for token in pair.tokens(attempt) if token.sample == sample]


def finish(pair: Pair, attempt: str, num_samples: int = 1) -> list[int]:
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens(attempt)) == num_samples)
    return ids(pair, attempt)


def steps_of(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """From now on, the length of every segment of every step."""
    steps: list[list[int]] = []
    run = rig.runner.run

    def note(segments: Sequence[Segment]) -> torch.Tensor:
        steps.append([len(segment.token_ids) for segment in segments])
        return run(segments)

    monkeypatch.setattr(rig.runner, "run", note)
    return steps


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_text_differs_from_one_process(family: str, tiny: Tiny, make_pair: MakePair) -> None:
    """All lengths at once in chunks of 24 tokens, beside two that were handed over; prefill has no part in them."""
    pair = make_pair(family, max_num_batched_tokens=24)
    handed_over = [pair.begin(prompt_of(length, 1), max_tokens=30) for length in (20, 33)]
    pair.until(lambda: all(len(pair.tokens(attempt)) >= 2 for attempt in handed_over))
    forwards, sent = pair.prefill.runner.num_forwards, pair.prefill.agent.stats().bytes_sent
    outputs = pair.generate([prompt_of(length) for length in LENGTHS], max_tokens=12, is_local=True)
    assert outputs == [greedy(tiny(family), prompt_of(length), 12) for length in LENGTHS]
    assert [finish(pair, attempt) for attempt in handed_over] == [
        greedy(tiny(family), prompt_of(length, 1), 30) for length in (20, 33)
    ]
    assert (pair.prefill.runner.num_forwards, pair.prefill.agent.stats().bytes_sent) == (forwards, sent)
    assert [report.num_computed_tokens for report in pair.decode.said(reports.FirstTokens)].count(100) == 1
    pair.assert_drained()


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_tokens_depend_on_who_computes_the_prompt(cut: int, make_pair: MakePair) -> None:
    """Ids, logprobs, positions and ends, sampled with everything on, from the start and in a later attempt."""
    pair, prompt = make_pair(), prompt_of(2 * B + 3)
    expected = pair.begin(prompt, **EVERYTHING)
    before = finish(pair, expected)[:cut]
    attempt = begin(pair, prompt, before, **EVERYTHING)
    finish(pair, attempt)
    told = [(t.position, t.token_id, t.finish_reason, t.logprobs) for t in pair.tokens(attempt)]
    assert told == [(t.position, t.token_id, t.finish_reason, t.logprobs) for t in pair.tokens(expected)][cut:]
    pair.assert_drained()


def test_long_prompt_stops_what_decodes(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """C47: every step has a token of each running sequence, and never more tokens than its budget."""
    pair = make_pair(max_num_batched_tokens=32)
    running = [begin(pair, prompt_of(20, seed), max_tokens=ENDLESS) for seed in range(3)]
    pair.until(lambda: all(len(pair.tokens(attempt)) >= 2 for attempt in running))
    begin(pair, prompt_of(LONG_PROMPT), max_tokens=4)
    pair.decode.loop.turn(wait_s=0.0)  # takes it in
    steps, before = steps_of(pair.decode, monkeypatch), [len(pair.tokens(attempt)) for attempt in running]
    for _ in range(10):
        pair.decode.loop.turn(wait_s=0.0)
    assert steps == [[1, 1, 1, 29]] * 10
    assert [len(pair.tokens(attempt)) for attempt in running] == [count + 10 for count in before]
    assert pair.decode.engine.load().num_waiting == 1
    assert pair.decode.engine.load().waiting_tokens == LONG_PROMPT - 11 * 29


def test_short_prompt_waits_for_a_long_one(make_pair: MakePair) -> None:
    """C47: it gets its part of the very next step."""
    pair = make_pair(max_num_batched_tokens=32)
    begin(pair, prompt_of(LONG_PROMPT), max_tokens=4)
    for _ in range(3):
        pair.turn()
    short = begin(pair, prompt_of(12, 1), max_tokens=4)
    pair.turn()
    assert len(pair.tokens(short)) == 1
    assert pair.decode.engine.load().num_running == 1


def test_more_sequences_than_a_step_has_tokens_starve_a_prompt(
    make_pair: MakePair, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C47: it has half of each step all the same, and short ones a part of that."""
    pair = make_pair(max_num_batched_tokens=4)
    running = [begin(pair, prompt_of(8, seed), max_tokens=ENDLESS) for seed in range(6)]
    pair.until(lambda: all(len(pair.tokens(attempt)) >= 2 for attempt in running))
    prompts, steps = [prompt_of(20, 9), prompt_of(1, 10)], steps_of(pair.decode, monkeypatch)
    long, short = (begin(pair, prompt, max_tokens=3) for prompt in prompts)
    assert finish(pair, short) == greedy(tiny("llama"), prompts[1], 3)
    assert finish(pair, long) == greedy(tiny("llama"), prompts[0], 3)
    assert [lengths[6:] for lengths in steps if len(lengths) > 6][:2] == [[1, 1], [1, 2]]


@pytest.mark.parametrize("length", [1, B - 1, B, 3 * B + 5])
def test_samples_disturb_one_another(length: int, tiny: Tiny, make_pair: MakePair) -> None:
    """C65: one computation, whole blocks shared, and for each sample the text that it would have alone."""
    pair, prompt = make_pair(), prompt_of(length)
    options = {"temperature": 1.0, "seed": 5, "max_tokens": B + 3}
    attempt = begin_samples(pair, prompt, 3, **options)
    pair.until(lambda: len(pair.decode.engine._running) == 3)
    assert pair.decode.allocator.counts.in_use == length // B + 3
    finish(pair, attempt, 3)
    params = SamplingParams(ignore_eos=True, **options)
    for index in range(3):
        assert ids(pair, attempt, index) == sampled(tiny("llama"), prompt, params, sample_index=index)
    assert [report.num_computed_tokens for report in pair.decode.said(reports.FirstTokens)] == [length]
    pair.assert_drained()


def test_prompt_logprobs_depend_on_who_computes_them(make_pair: MakePair) -> None:
    """From the first token to the last and in order, also where the cache holds the prompt."""
    pair, prompt = make_pair(max_num_batched_tokens=B), prompt_of(3 * B)
    options = {"prompt_logprobs": 2, "max_tokens": 2}
    told: list[list[messages.Logprobs]] = []
    for rig, is_local in ((pair.prefill, False), (pair.decode, True)):
        attempt = pair.begin(prompt, is_local=is_local, **options)
        finish(pair, attempt)
        parts = [report for report in rig.said(reports.PromptLogprobs) if report.attempt == attempt]
        assert [part.start for part in parts] == [0, *(1 + B * number for number in range(1, len(parts)))]
        told.append([entry for part in parts for entry in part.tokens])
    assert len(told[0]) == 3 * B
    assert told[1] == told[0]
    pair.assert_drained()


def test_prompt_that_is_cached_is_computed_again(make_pair: MakePair, tiny: Tiny) -> None:
    """Blocks that were handed over are found, and what was computed here is found by the next one, on its way already;
    the last token of a whole hit goes to a copy, and who reads the cached block notices nothing."""
    pair = make_pair(max_num_batched_tokens=2 * B)
    reader = pair.begin(X[: 4 * B], max_tokens=40)
    pair.until(lambda: len(pair.tokens(reader)) >= 2)
    again = begin(pair, X[: 4 * B], max_tokens=6)
    further = begin(pair, X[: 7 * B], max_tokens=6)
    assert finish(pair, again) == greedy(tiny("llama"), X[: 4 * B], 6)
    assert finish(pair, further) == greedy(tiny("llama"), X[: 7 * B], 6)
    computed = {report.attempt: report.num_computed_tokens for report in pair.decode.said(reports.FirstTokens)}
    assert computed == {again: 1, further: 3 * B}
    cached = {report.attempt: report.num_cached_tokens for report in pair.decode.said(reports.Accepted)}
    assert cached == {again: 4 * B - 1, further: 4 * B}
    assert finish(pair, reader) == greedy(tiny("llama"), X[: 4 * B], 40)
    pair.assert_drained()
    sent = pair.prefill.agent.stats().bytes_sent
    assert finish(pair, pair.begin(X[: 7 * B], max_tokens=6)) == greedy(tiny("llama"), X[: 7 * B], 6)
    assert pair.prefill.agent.stats().bytes_sent == sent, "decode was sent what it had computed"


def test_first_token_that_ends_the_request_decodes_on(make_pair: MakePair) -> None:
    pair = make_pair()
    forwards = pair.decode.runner.num_forwards
    attempt = begin(pair, prompt_of(20), max_tokens=1)
    assert len(finish(pair, attempt)) == 1
    assert pair.decode.runner.num_forwards == forwards + 1
    assert pair.decode.said(reports.StepTokens) == []
    pair.assert_drained()
    pair.decode.inbox.put(commands.Reserve(1, attempt, messages.Start([5], [messages.Sample(0, [])], limits()), 60.0))
    pair.turn()
    assert pair.decode.said(reports.Ignored) == [reports.Ignored("reserve")]


@pytest.mark.parametrize("how", ["release", "session", "deadline", "drain"])
@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_prompt_that_is_given_up_keeps_its_blocks(how: str, num_turns: int, make_pair: MakePair) -> None:
    """C25, C26: before, in and between its chunks."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = begin(pair, X, max_tokens=4, timeout_s=0.0 if how == "deadline" else 60.0)
    if how != "deadline":
        for _ in range(num_turns):
            pair.turn()
    if how == "release":
        pair.decode.inbox.put(commands.Release(attempt, "test"))
    elif how == "session":
        pair.decode.inbox.put(commands.EndSession(1))
    elif how == "drain":
        pair.decode.inbox.put(commands.Drain(0.0))
    pair.assert_drained()
    assert has_stood_still(pair, pair.decode)
    assert pair.tokens(attempt) == []
    told = [ending.reason for ending in pair.endings(attempt)]
    refused = [report.reason for report in pair.decode.said(reports.Refused)]
    # One that has not come yet is refused by a worker that drains.
    assert told + refused == {"deadline": [Reason.TIMEOUT], "drain": [Reason.DRAINING]}.get(how, [])
    if how != "drain":
        assert len(finish(pair, begin(pair, X, max_tokens=4))) == 4


def test_released_prompt_leaves_unfinished_blocks_in_the_cache(make_pair: MakePair, tiny: Tiny) -> None:
    pair = make_pair(max_num_batched_tokens=B + 5)
    attempt = begin(pair, X, max_tokens=4)
    for _ in range(2):
        pair.turn()
    pair.decode.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()
    assert pair.decode.allocator.counts.cached == 2 * (B + 5) // B
    assert finish(pair, begin(pair, X, max_tokens=4)) == greedy(tiny("llama"), X, 4)


def test_prompt_is_kept_while_what_decodes_gives_way(make_pair: MakePair, tiny: Tiny) -> None:
    """Out of blocks the youngest prompt goes, and no more of them than are needed; what decodes has its whole text."""
    pair = make_pair(decode_blocks=11, max_num_batched_tokens=3)
    old = begin(pair, prompt_of(B), max_tokens=2 * B + 2)
    pair.until(lambda: len(pair.tokens(old)) >= 1)
    older, younger = (begin(pair, prompt_of(length, 1), max_tokens=2) for length in (3 * B, 5 * B - 1))
    pair.turn()
    assert pair.decode.allocator.available == 0
    pair.until(lambda: bool(pair.endings(younger)))
    assert [ending.reason for ending in pair.endings(younger)] == [Reason.PREEMPTED]
    assert finish(pair, old) == greedy(tiny("llama"), prompt_of(B), 2 * B + 2)
    assert finish(pair, older) == greedy(tiny("llama"), prompt_of(3 * B, 1), 2)
    assert pair.endings(older) == []
    assert pair.tokens(younger) == []
    pair.assert_drained()


def test_prompt_without_room_is_taken(make_pair: MakePair) -> None:
    """As a reservation is: with blocks for all of it and for the first decoded token, and a place in the batch."""
    pair = make_pair(decode_blocks=6, max_num_seqs=2)
    first = begin(pair, prompt_of(3 * B), max_tokens=ENDLESS)
    for length, reason in ((2 * B, Reason.NO_ROOM), (6 * B, Reason.TOO_LARGE), (2000, Reason.TOO_LARGE)):
        begin(pair, prompt_of(length, 1))
        pair.turn()
        assert pair.decode.said(reports.Refused)[-1].reason is reason
    begin(pair, prompt_of(4, 1), max_tokens=ENDLESS)
    pair.turn()
    begin(pair, prompt_of(4, 2))
    pair.turn()
    assert pair.decode.said(reports.Refused)[-1].message == "2 sequences run or are reserved already"
    assert len(pair.decode.said(reports.Refused)) == 4
    pair.decode.inbox.put(commands.EndSession(1))
    pair.assert_drained()
    assert pair.endings(first) == []


def test_prompt_of_nan_lives_on_in_the_cache(make_pair: MakePair, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """C64: the attempt ends, its neighbour does not, and nobody is served from its blocks."""
    pair = make_pair()
    running = begin(pair, prompt_of(20), max_tokens=12)
    pair.until(lambda: len(pair.tokens(running)) >= 2)
    run = pair.decode.runner.run

    def spoil(segments: Sequence[Segment]) -> torch.Tensor:
        logits = run(segments).clone()
        logits[-1] = float("nan")
        return logits

    broken = begin(pair, X, max_tokens=4)
    monkeypatch.setattr(pair.decode.runner, "run", spoil)
    pair.turn()
    monkeypatch.undo()
    assert [ending.reason for ending in pair.endings(broken)] == [Reason.INTERNAL]
    assert finish(pair, running) == greedy(tiny("llama"), prompt_of(20), 12)
    again = begin(pair, X, max_tokens=4)
    assert finish(pair, again) == greedy(tiny("llama"), X, 4)
    assert [a.num_cached_tokens for a in pair.decode.said(reports.Accepted) if a.attempt == again] == [0]
    pair.assert_drained()


def test_ruined_pool_shows_in_the_text(make_pair: MakePair, tiny: Tiny) -> None:
    """What earlier owners left behind in its blocks is never read."""
    pair = make_pair(max_num_batched_tokens=7)
    forget(pair.decode)
    assert finish(pair, begin(pair, prompt_of(2 * B + 3), max_tokens=4)) == greedy(
        tiny("llama"), prompt_of(2 * B + 3), 4
    )
