"""A pair over loopback: what goes wrong between the first chunk and the last token."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.service.reasons import Reason
from splitserve.worker import commands, reports
from tests.reference import greedy
from tests.tiny_models import FAMILIES, VOCAB_SIZE
from tests.workers.pair import Pair

B = 16
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 3 * B + 5, 100]

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_differs_from_one_process(family: str, tiny: Tiny, make_pair: MakePair) -> None:
    """All lengths at once, chunks of 24 tokens shared by several prompts, one decode batch."""
    pair = make_pair(family, max_num_batched_tokens=24)
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = pair.generate(prompts, max_tokens=12)
    assert outputs == [greedy(tiny(family), prompt, 12) for prompt in prompts]
    pair.assert_drained()


def test_text_changes_in_a_later_attempt(tiny: Tiny, make_pair: MakePair) -> None:
    """A re-attempt continues from prompt and outputs as if nothing had happened, its limits still the request's."""
    pair = make_pair()
    prompt = prompt_of(40)
    whole = greedy(tiny("llama"), prompt, 12)
    for cut in (1, 5, 11):
        attempt = pair.begin(prompt, whole[:cut], max_tokens=12)
        pair.until(lambda attempt=attempt: pair.is_finished(attempt))
        tokens = pair.tokens(attempt)
        assert [token.token_id for token in tokens] == whole[cut:]
        assert [token.position for token in tokens] == list(range(cut, 12))
        assert tokens[-1].finish_reason == "length"
    pair.assert_drained()


def test_decode_recomputes_what_it_should_have_received(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes on the wire are the prompt's blocks, and decode computed one token a step and nothing else."""
    pair = make_pair()
    runner = pair.decode.runner
    forwards_before = runner.num_forwards
    computed: list[list[int]] = []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda segments: computed.extend(s.token_ids for s in segments) or run(segments))
    lengths = [1, B, B + 1, 5 * B - 1]
    outputs = pair.generate([prompt_of(length) for length in lengths], max_tokens=6)
    assert [len(output) for output in outputs] == [6] * 4
    blocks = sum(-(-length // B) for length in lengths)
    expected = blocks * pair.decode.runner.layout.block_nbytes
    assert pair.prefill.agent.stats().bytes_sent == expected
    assert pair.decode.agent.stats().bytes_received == expected
    # The first token of each came from prefill; five more each from forwards shared by whoever was running.
    assert 5 <= pair.decode.runner.num_forwards - forwards_before <= 20
    assert all(len(segment_tokens) == 1 for segment_tokens in computed)


def test_decode_step_sends_more_than_one_message(make_pair: MakePair) -> None:
    pair = make_pair()
    attempts = [pair.begin(prompt_of(20, seed), max_tokens=8) for seed in range(4)]
    pair.until(lambda: all(len(pair.tokens(attempt)) >= 2 for attempt in attempts))
    before = len(pair.decode.said(reports.StepTokens))
    forwards = pair.decode.runner.num_forwards
    pair.decode.loop.turn(wait_s=0.0)
    assert pair.decode.runner.num_forwards == forwards + 1
    (report,) = pair.decode.said(reports.StepTokens)[before:]
    assert {token.attempt for token in report.tokens} == set(attempts)


def test_max_tokens_one_runs_a_decode_step(make_pair: MakePair) -> None:
    """C09: the first token ends the request; decode frees its blocks without a forward."""
    pair = make_pair()
    forwards = pair.decode.runner.num_forwards
    (output,) = pair.generate([prompt_of(20)], max_tokens=1)
    assert len(output) == 1
    assert pair.decode.runner.num_forwards == forwards
    pair.assert_drained()


def test_prompt_that_cannot_fit_waits_for_ever(make_pair: MakePair) -> None:
    """C54: each side refuses at once what its pool or the context can never hold, and serves the next one."""
    pair = make_pair(prefill_blocks=4, decode_blocks=3)
    for length, holder, report_of in (
        (3 * B, "the pool has 3", pair.decode),
        (2000, "the context is 1024", pair.decode),
    ):
        attempt = pair.reserve(prompt_of(length))
        pair.until(lambda r=report_of, a=attempt: any(x.attempt == a for x in r.said(reports.Refused)))
        refused = report_of.said(reports.Refused)[-1]
        assert refused.reason is Reason.TOO_LARGE
        assert holder in refused.message
    assert len(pair.generate([prompt_of(2 * B)], max_tokens=4)[0]) == 4
    pair.assert_drained()


def test_prefill_takes_a_prompt_that_it_cannot_finish(make_pair: MakePair) -> None:
    """Blocks for the whole prompt, or a refusal that says so; the reservation is still good for another try."""
    pair = make_pair(prefill_blocks=4, decode_blocks=64)
    first = pair.reserve(prompt_of(3 * B), max_tokens=2)
    second = pair.reserve(prompt_of(2 * B), max_tokens=2)
    pair.prefill_attempt(first, prompt_of(3 * B), max_tokens=2)
    pair.prefill_attempt(second, prompt_of(2 * B), max_tokens=2)
    pair.until(lambda: bool(pair.prefill.said(reports.Refused)))
    refused = pair.prefill.said(reports.Refused)[0]
    assert (refused.attempt, refused.reason) == (second, Reason.NO_ROOM)
    pair.until(lambda: pair.is_finished(first))
    pair.until(lambda: pair.prefill.allocator.counts.in_use == 0)
    pair.prefill_attempt(second, prompt_of(2 * B), max_tokens=2)
    pair.until(lambda: pair.is_finished(second))
    pair.assert_drained()


@pytest.mark.parametrize("turns", range(8))
def test_release_leaks_blocks_at_some_stage(turns: int, make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=16)
    attempt = pair.begin(prompt_of(60), max_tokens=20)
    for _ in range(turns):
        pair.turn()
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.Release(attempt, "test"))
        rig.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()
    assert not pair.prefill.engine._attempts
    assert not pair.decode.engine._running
    assert not pair.decode.engine._reservations


def test_router_that_vanishes_leaves_its_attempts_behind(make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=16)
    for seed in range(3):
        pair.begin(prompt_of(60, seed), max_tokens=50)
    for _ in range(4):
        pair.turn()
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.EndSession(1))
    pair.assert_drained()


def test_sequence_out_of_blocks_takes_the_others_down(tiny: Tiny, make_pair: MakePair) -> None:
    """C41: the youngest gives way and is told so; the oldest goes on to its exact end; a later attempt finishes too."""
    pair = make_pair(decode_blocks=9)
    prompts = [prompt_of(2 * B, seed) for seed in range(3)]
    attempts = [pair.begin(prompt, max_tokens=60) for prompt in prompts]
    pair.until(lambda: pair.is_finished(attempts[0]))
    whole = greedy(tiny("llama"), prompts[0], 60)
    assert [token.token_id for token in pair.tokens(attempts[0])] == whole
    preempted = [a for a in attempts if any(e.reason is Reason.PREEMPTED for e in pair.endings(a))]
    assert attempts[2] in preempted
    assert attempts[0] not in preempted
    for attempt in preempted:
        index = attempts.index(attempt)
        so_far = [token.token_id for token in pair.tokens(attempt)]
        retry = pair.begin(prompts[index], so_far, max_tokens=60)
        pair.until(lambda retry=retry: pair.is_finished(retry))
        rest = [token.token_id for token in pair.tokens(retry)]
        assert so_far + rest == greedy(tiny("llama"), prompts[index], 60)
    pair.until(lambda: all(pair.is_finished(a) for a in attempts if a not in preempted))
    pair.assert_drained()


def test_pool_that_is_all_one_sequence_hangs(make_pair: MakePair) -> None:
    """C44: growth beyond the pool ends by length."""
    pair = make_pair(decode_blocks=3)
    (output,) = pair.generate([prompt_of(20)], max_tokens=900)
    assert 3 * B - 20 <= len(output) <= 3 * B - 20 + 1
    pair.assert_drained()


def test_seeded_text_depends_on_its_company(make_pair: MakePair) -> None:
    pair = make_pair()
    prompt = prompt_of(30)
    (alone,) = pair.generate([prompt], max_tokens=12, temperature=1.0, seed=7)
    company = [prompt, *(prompt_of(length) for length in (5, 17, 33))]
    assert pair.generate(company, max_tokens=12, temperature=1.0, seed=7)[0] == alone
    (other,) = pair.generate([prompt], max_tokens=12, temperature=1.0, seed=8)
    assert other != alone
