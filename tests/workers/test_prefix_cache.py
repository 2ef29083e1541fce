"""Blocks that are there already, on one side or on both: what is computed, what is sent, and whose text it is."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.ticket import Ticket
from splitserve.engine.batch import Segment
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.exactness import require_exact
from tests.reference import greedy
from tests.workers.pair import EngineRig, Pair, limits
from tests.workers.test_books import ENDLESS, changed
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]

X = prompt_of(8 * B)


def forget(rig: EngineRig) -> None:
    """Empties the cache, and ruins what the blocks hold: only what is really cached or sent can give the text."""
    counts = rig.allocator.counts
    assert counts.free + counts.cached == counts.total
    rig.allocator.release(rig.allocator.allocate(counts.total))
    rig.runner.pool.tensor.fill_(float("nan"))


def warm(pair: Pair, num_prefill: int, num_decode: int, tokens: Sequence[int] = X) -> None:
    """Leaves that many blocks of `tokens` in the caches, and nothing else."""
    rigs = [(pair.prefill, num_prefill), (pair.decode, num_decode)]
    for rig, _ in rigs:
        forget(rig)
    # The longer part first: what that leaves on the other side is forgotten, and on its own a shorter one adds nothing.
    for count in sorted({num_prefill, num_decode} - {0}, reverse=True):
        pair.generate([tokens[: count * B]], max_tokens=1)
        pair.assert_drained()
        for rig, wanted in rigs:
            if wanted < count:
                forget(rig)
    assert [rig.allocator.counts.cached for rig, _ in rigs] == [num_prefill, num_decode]


def num_cached(pair: Pair, attempt: str) -> int:
    """Tokens that prefill took from its cache."""
    return next(a.num_cached_tokens for a in pair.prefill.said(reports.Accepted) if a.attempt == attempt)


def finish(pair: Pair, attempt: str) -> list[int]:
    pair.until(lambda: pair.is_finished(attempt))
    return [token.token_id for token in pair.tokens(attempt)]


# What is found


@pytest.mark.parametrize("blocks", [(0, 4), (4, 0), (2, 5), (5, 2), (3, 3), (7, 7)])
def test_hit_on_one_side_breaks_the_block_mapping(blocks: tuple[int, int], tiny: Tiny, make_pair: MakePair) -> None:
    """C06: what both have, in every relation of the two; prompts that end before, at and after a block's border."""
    pair = make_pair()
    for length in (2 * B, 4 * B - 1, 4 * B, 4 * B + 1, 6 * B + 3):
        warm(pair, *blocks)
        prompt, (on_prefill, on_decode) = X[:length], blocks
        sent, forwards = pair.prefill.agent.stats().bytes_sent, pair.prefill.runner.num_forwards
        attempt = pair.begin(prompt, max_tokens=6)
        assert finish(pair, attempt) == greedy(tiny("llama"), prompt, 6)
        pair.assert_drained()
        # Whole blocks of what is there, and at least one token is left to compute.
        cached = min(on_prefill, length // B) * B
        assert num_cached(pair, attempt) == min(cached, length - 1)
        assert pair.prefill.said(reports.FirstTokens)[-1].num_computed_tokens == length - min(cached, length - 1)
        assert pair.prefill.runner.num_forwards == forwards + 1
        num_sent = -(-length // B) - min(on_decode, length // B)
        assert pair.prefill.agent.stats().bytes_sent - sent == num_sent * pair.decode.runner.layout.block_nbytes


def test_nothing_to_send_means_no_done(tiny: Tiny, make_pair: MakePair) -> None:
    """C46: decode holds the whole prompt; each of twenty requests is finished without a byte on the wire."""
    pair = make_pair()
    warm(pair, 0, 4)
    text = greedy(tiny("llama"), X[: 4 * B], 3)
    sent = pair.prefill.agent.stats().bytes_sent
    assert pair.generate([X[: 4 * B]] * 20, max_tokens=3) == [text] * 20
    assert pair.prefill.agent.stats().bytes_sent == sent
    pair.assert_drained()


def test_hit_changes_the_plan_of_chunks(tiny: Tiny, make_pair: MakePair) -> None:
    """Chunks that neither begin nor end at a block's border, after hits of different lengths on the two sides."""
    pair = make_pair(max_num_batched_tokens=B + 5)
    prompt = X[: 7 * B + 3]
    for first, second in ((3 * B + 2, 5 * B + 1), (5 * B + 1, 3 * B + 2)):
        for rig in (pair.prefill, pair.decode):
            forget(rig)
        pair.generate([X[:first]], max_tokens=1)
        pair.assert_drained()
        forget(pair.prefill)
        pair.generate([X[:second]], max_tokens=1)
        pair.assert_drained()
        attempt = pair.begin(prompt, max_tokens=6)
        assert finish(pair, attempt) == greedy(tiny("llama"), prompt, 6)
        assert num_cached(pair, attempt) == second // B * B
        pair.assert_drained()


def test_partial_block_is_a_hit(tiny: Tiny, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.generate([X[: B + 9]], max_tokens=1)
    for prompt in (X[: B + 5], X[: B + 9], X[: B + 12]):
        pair.assert_drained()
        attempt = pair.begin(prompt, max_tokens=2)
        assert pair.decode.said(reports.Reserved)[-1].ticket.num_cached_blocks == 1
        assert finish(pair, attempt) == greedy(tiny("llama"), prompt, 2)
        assert num_cached(pair, attempt) == B


def test_same_tokens_after_another_prefix_are_a_hit(tiny: Tiny, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.generate([X[: 4 * B]], max_tokens=1)
    pair.assert_drained()
    for prompt, cached in ((changed(X[: 4 * B], 0), 0), (changed(X[: 4 * B], 2 * B + 3), 2 * B)):
        attempt = pair.begin(prompt, max_tokens=4)
        assert finish(pair, attempt) == greedy(tiny("llama"), prompt, 4)
        assert num_cached(pair, attempt) == cached


@pytest.mark.parametrize("field", ["model", "revision"])
def test_block_of_another_model_is_a_hit(field: str, make_pair: MakePair) -> None:
    engine = make_pair().prefill.engine
    before = engine._key_chain(X).complete
    assert engine._key_chain(X).complete == before
    fingerprint = msgspec.structs.replace(engine._context.fingerprint, **{field: "another"})
    engine._context = dataclasses.replace(engine._context, fingerprint=fingerprint)
    assert not set(engine._key_chain(X).complete) & set(before)


def test_second_turn_of_a_chat_starts_from_nothing(tiny: Tiny, make_pair: MakePair) -> None:
    """Blocks that decoding has filled are hits on decode, and only those whose last token was computed."""
    pair = make_pair()
    prompt = X[: 2 * B + 7]
    (answer,) = pair.generate([prompt], max_tokens=2 * B - 6)
    pair.assert_drained()
    so_far = prompt + answer
    assert len(so_far) == 4 * B + 1
    assert pair.decode.allocator.counts.cached == 4
    assert pair.prefill.allocator.counts.cached == 2
    turn = so_far + prompt_of(10, 1)
    sent = pair.prefill.agent.stats().bytes_sent
    attempt = pair.begin(turn, max_tokens=5)
    assert finish(pair, attempt) == greedy(tiny("llama"), turn, 5)
    assert num_cached(pair, attempt) == 2 * B
    assert pair.prefill.agent.stats().bytes_sent - sent == pair.decode.runner.layout.block_nbytes
    # One token less, and its block is not complete.
    pair.generate([prompt_of(20, 2)], max_tokens=B - 4)
    pair.assert_drained()
    attempt = pair.reserve(prompt_of(20, 2) + [0] * B)
    pair.until(lambda: pair.ticket(attempt) is not None)
    assert pair.ticket(attempt).num_cached_blocks == 1
    pair.decode.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()


def test_prompt_under_way_is_no_hit_yet(tiny: Tiny, make_pair: MakePair) -> None:
    """What its finished chunks have completed is one, and not a token more."""
    pair = make_pair(max_num_batched_tokens=2 * B + 3)
    first = pair.begin(X, max_tokens=4)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    second = pair.begin(X[: 5 * B], max_tokens=4)
    pair.until(lambda: any(report.attempt == second for report in pair.prefill.said(reports.Accepted)))
    computed = pair.prefill.engine._attempts[first].num_computed if first in pair.prefill.engine._attempts else len(X)
    assert 0 < num_cached(pair, second) <= computed
    assert [finish(pair, first), finish(pair, second)] == [
        greedy(tiny("llama"), prompt, 4) for prompt in (X, X[: 5 * B])
    ]
    pair.assert_drained()


@pytest.mark.parametrize("blocks", [(0, 3), (3, 0), (2, 4), (5, 5)])
def test_hit_changes_bytes(blocks: tuple[int, int], make_pair: MakePair) -> None:
    """Invariant 10 in the default dtype: decode's blocks and the seeded text, with hits and without."""
    pair = make_pair(dtype="auto")
    require_exact(pair.prefill.runner)

    def run(length: int) -> tuple[list[int], list[bytes]]:
        attempt = pair.begin(X[:length], max_tokens=ENDLESS, temperature=1.0, seed=3)
        pair.until(lambda: len(pair.tokens(attempt)) >= 2 * B)
        (sequence,) = pair.decode.engine._running
        whole = sequence.blocks[: (length + 2 * B - 1) // B]
        kept = [bytes(pair.decode.runner.pool.view(block)) for block in whole]
        text = [token.token_id for token in pair.tokens(attempt)][: 2 * B]
        for rig in (pair.prefill, pair.decode):
            rig.inbox.put(commands.Release(attempt, "test"))
        pair.assert_drained()
        return text, kept

    for length in (5 * B, 5 * B + 1):
        warm(pair, 0, 0)
        alone = run(length)
        warm(pair, *blocks)
        assert run(length) == alone


def test_some_pattern_of_hits_changes_the_text(tiny: Tiny, make_pair: MakePair) -> None:
    """Whatever the two sides hold, from sequences that went on differently or are still running."""
    pair = make_pair(prefill_blocks=36, decode_blocks=40, max_num_batched_tokens=3 * B + 1)

    @settings(max_examples=15, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        prompts = []
        for _ in range(data.draw(st.integers(1, 4))):
            length = data.draw(st.integers(1, 7 * B))
            fork = data.draw(st.integers(0, length))
            prompts.append(X[:fork] + prompt_of(8 * B, data.draw(st.integers(1, 3)))[fork:length])
        at_once = data.draw(st.booleans())
        for batch in [prompts] if at_once else [[prompt] for prompt in prompts]:
            assert pair.generate(batch, max_tokens=5) == [greedy(tiny("llama"), prompt, 5) for prompt in batch]
        pair.assert_drained()
        for rig in (pair.prefill, pair.decode):
            if data.draw(st.booleans()):
                forget(rig)

    check()


# Who may write, and where


def test_last_token_of_a_whole_hit_is_written_into_a_shared_block(make_pair: MakePair) -> None:
    """The cached block is not touched, also where it is the only one left to take."""
    pair = make_pair(prefill_blocks=4)
    for held in (0, 1):
        warm(pair, 3 + held, 0)
        blocks = pair.prefill.allocator.pin(pair.prefill.engine._key_chain(X).complete)
        pair.prefill.allocator.release(blocks)
        before = [bytes(pair.prefill.runner.pool.view(block)) for block in blocks]
        attempt = pair.reserve(X[: len(blocks) * B], max_tokens=1)
        pair.prefill_attempt(attempt, X[: len(blocks) * B], max_tokens=1)
        pair.until(lambda a=attempt: a in pair.prefill.engine._attempts)
        table = pair.prefill.engine._attempts[attempt].blocks
        assert table[:-1] == blocks[:-1]
        assert (table[-1] == blocks[-1]) == bool(held)
        assert num_cached(pair, attempt) == len(blocks) * B - 1
        finish(pair, attempt)
        pair.assert_drained()
        assert [bytes(pair.prefill.runner.pool.view(block)) for block in blocks] == before
        assert pair.prefill.allocator.counts.cached == len(blocks)


def test_second_copy_is_cached_too(tiny: Tiny, make_pair: MakePair) -> None:
    """Invariant 2: equal prompts under way at once; each has its own copy, and one of them stays."""
    pair = make_pair()
    prompt = X[: 3 * B + 5]
    outputs = pair.generate([prompt] * 3, max_tokens=B)
    assert outputs == [greedy(tiny("llama"), prompt, B)] * 3
    pair.assert_drained()
    assert pair.prefill.allocator.counts.cached == 3
    assert pair.decode.allocator.counts.cached == 4


def test_samples_share_a_hit_and_cache_one_anothers_tokens(tiny: Tiny, make_pair: MakePair) -> None:
    """Each sample's own blocks are found again under its own text, and the shared ones are given back once."""
    pair = make_pair()
    warm(pair, 2, 3)
    prompt = X[: 4 * B + 3]
    options = {"temperature": 1.0, "max_tokens": 2 * B}
    start = messages.Start(prompt, [messages.Sample(i, []) for i in range(3)], limits(**options))
    pair.decode.inbox.put(commands.Reserve(1, "a", start, 60.0))
    pair.until(lambda: pair.ticket("a") is not None)
    pair.prefill.inbox.put(commands.Prefill(1, "a", start, pair.ticket("a"), 60.0))
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("a")) == 3)
    pair.assert_drained()
    for sample in range(3):
        so_far = prompt + [token.token_id for token in pair.tokens("a") if token.sample == sample]
        attempt = pair.begin(so_far, max_tokens=4)
        assert finish(pair, attempt) == greedy(tiny("llama"), so_far, 4)
        assert pair.ticket(attempt).num_cached_blocks == 6
        pair.assert_drained()


# Room


def test_cached_blocks_take_room_from_others(tiny: Tiny, make_pair: MakePair) -> None:
    """Pools full of cached blocks serve prompts as large as the pool, one after the other."""
    pair = make_pair(prefill_blocks=6, decode_blocks=6)
    for seed in range(6):
        prompt = prompt_of(4 * B + 3 * seed, seed)
        assert pair.generate([prompt], max_tokens=6) == [greedy(tiny("llama"), prompt, 6)]
        pair.assert_drained()
    assert pair.decode.allocator.counts.free < 6


def test_block_in_use_is_evicted(tiny: Tiny, make_pair: MakePair) -> None:
    """Hits stay while a reservation has them pinned, however much the rest of the pool is needed; likewise on prefill,
    whose prompt is computed in chunks meanwhile."""
    pair = make_pair(prefill_blocks=8, decode_blocks=9)
    warm(pair, 0, 3)
    waiting = pair.reserve(X[: 3 * B + 2], max_tokens=6)
    pair.until(lambda: pair.ticket(waiting) is not None)
    assert pair.ticket(waiting).num_cached_blocks == 3
    for seed in range(4):
        prompt = prompt_of(3 * B + 1, seed)
        assert pair.generate([prompt], max_tokens=B) == [greedy(tiny("llama"), prompt, B)]
    assert pair.decode.allocator.counts.in_use == 3
    pair.prefill_attempt(waiting, X[: 3 * B + 2], max_tokens=6)
    assert finish(pair, waiting) == greedy(tiny("llama"), X[: 3 * B + 2], 6)
    pair.assert_drained()


def test_room_depends_on_hits(make_pair: MakePair) -> None:
    """A router knows nothing of hits: what is refused without them is refused with them."""
    pair = make_pair(prefill_blocks=8, decode_blocks=8)
    warm(pair, 5, 5)
    attempts = [pair.reserve(X[: 5 * B], max_tokens=1) for _ in range(2)]
    pair.until(lambda: bool(pair.decode.said(reports.Refused)))
    (refused,) = pair.decode.said(reports.Refused)
    assert (refused.attempt, refused.reason) == (attempts[1], Reason.NO_ROOM)
    assert refused.message == "6 blocks needed, 2 available"
    for seed in range(2):
        start = messages.Start(X[: 5 * B], [messages.Sample(0, [])], limits())
        ticket = Ticket(f"nobody's {seed}", "decode", 0, 5)
        pair.prefill.engine.handle(commands.Prefill(1, ticket.transfer_id, start, ticket, 60.0))
    assert [report.message for report in pair.prefill.said(reports.Refused)] == ["5 blocks needed, 3 available"]
    pair.decode.inbox.put(commands.Release(attempts[0], "test"))
    pair.assert_drained()


@pytest.mark.parametrize("first", [0, 1])
def test_cached_blocks_count_as_taken_at_admission(first: int, tiny: Tiny, make_pair: MakePair) -> None:
    """C43: seven blocks, six of them cached; A needs four and one at its first step, B three and one."""
    pair = make_pair(decode_blocks=7)
    warm(pair, 0, 6)
    prompts = [prompt_of(4 * B, 1), prompt_of(3 * B, 2)]
    attempts = [pair.reserve(prompts[first], max_tokens=B), pair.reserve(prompts[1 - first], max_tokens=B)]
    pair.prefill_attempt(attempts[0], prompts[first], max_tokens=B)
    assert finish(pair, attempts[0]) == greedy(tiny("llama"), prompts[first], B)
    assert [report.attempt for report in pair.decode.said(reports.Refused)] == [attempts[1]]
    assert pair.generate([prompts[1 - first]], max_tokens=B) == [greedy(tiny("llama"), prompts[1 - first], B)]
    pair.assert_drained()


def test_sequences_on_shared_blocks_run_out(tiny: Tiny, make_pair: MakePair) -> None:
    """Blocks that several victims share come back with the last of them; the oldest reaches its end."""
    pair = make_pair(decode_blocks=12)
    warm(pair, 0, 4)
    prompts = [prompt_of(B, 5), X[: 4 * B], X[: 4 * B]]
    attempts = [pair.begin(prompts[0], max_tokens=10 * B)]
    pair.until(lambda: len(pair.tokens(attempts[0])) >= 1)
    for prompt in prompts[1:]:
        attempts.append(pair.begin(prompt, max_tokens=6 * B))
        pair.until(lambda: len(pair.tokens(attempts[-1])) >= 1)
    assert pair.decode.allocator.counts.free == 12 - 2 - 4 - 2
    pair.until(lambda: pair.is_finished(attempts[0]))
    assert [token.token_id for token in pair.tokens(attempts[0])] == greedy(tiny("llama"), prompts[0], 10 * B)
    pair.until(lambda: not pair.decode.engine.has_work())
    assert {ending.reason for ending in pair.decode.said(reports.AttemptEnded)} == {Reason.PREEMPTED}
    pair.assert_drained()


# What goes wrong


@pytest.mark.parametrize("turns", range(8))
def test_release_leaks_pinned_hits_at_some_stage(turns: int, tiny: Tiny, make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=B)
    pair.generate([X[: 2 * B + 1]], max_tokens=1)
    pair.assert_drained()
    attempt = pair.begin(X[: 4 * B + 3], max_tokens=20)
    for _ in range(turns):
        pair.turn()
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.Release(attempt, "test"))
        rig.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()
    assert pair.generate([X[: 4 * B + 3]], max_tokens=6) == [greedy(tiny("llama"), X[: 4 * B + 3], 6)]
    pair.assert_drained()


def test_expired_reservation_keeps_its_hits(make_pair: MakePair) -> None:
    pair = make_pair()
    warm(pair, 0, 3)
    attempt = pair.reserve(X[: 4 * B], timeout_s=30.0)
    pair.until(lambda: pair.ticket(attempt) is not None)
    counts = pair.decode.allocator.counts
    assert (counts.in_use, counts.reserved) == (3, 2)
    pair.decode.engine.expire(time.monotonic() + 31.0)
    pair.assert_drained()
    assert pair.decode.allocator.counts.cached == 3


def test_revoked_reservation_keeps_its_hits(tiny: Tiny, make_pair: MakePair) -> None:
    """A sequence that needs a block gets one of the reservation's, and in the end what it had pinned."""
    pair = make_pair(decode_blocks=8)
    warm(pair, 0, 3)
    running = pair.begin(prompt_of(2 * B, 1), max_tokens=6 * B)
    pair.until(lambda: len(pair.tokens(running)) >= 2)
    waiting = pair.reserve(X[: 4 * B])
    pair.until(lambda: pair.ticket(waiting) is not None)
    assert pair.ticket(waiting).num_cached_blocks == 3
    assert finish(pair, running) == greedy(tiny("llama"), prompt_of(2 * B, 1), 6 * B)
    assert [ending.reason for ending in pair.endings(waiting)] == [Reason.PREEMPTED]
    pair.assert_drained()


@pytest.mark.parametrize("index", [0, 2 * B, 4 * B - 1])
def test_blocks_of_other_tokens_enter_the_cache(index: int, tiny: Tiny, make_pair: MakePair) -> None:
    """Finish names other tokens than those reserved for, before, at and behind the hits: nothing of it is kept."""
    pair = make_pair()
    warm(pair, 0, 2)
    prompt = X[: 4 * B]
    attempt = pair.reserve(prompt, max_tokens=8)
    pair.prefill_attempt(attempt, changed(prompt, index), max_tokens=8)
    pair.until(lambda: bool(pair.endings(attempt)))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.INVALID]
    pair.assert_drained()
    assert pair.decode.allocator.counts.cached == 2
    for wanted in (prompt, changed(prompt, index)):
        assert pair.generate([wanted], max_tokens=4) == [greedy(tiny("llama"), wanted, 4)]


def test_cancelled_transfer_leaves_half_of_its_blocks_cached(make_pair: MakePair) -> None:
    """Bytes without a Finish are worth nothing."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.begin(X, max_tokens=4)
    pair.until(lambda: pair.decode.agent.stats().bytes_received > 0)
    pair.decode.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()
    assert pair.decode.allocator.counts.cached == 0


# Switches and numbers


def test_cache_is_used_although_it_is_off(make_pair: MakePair) -> None:
    pair = make_pair(enable_prefix_caching=False)
    for _ in range(2):
        attempt = pair.begin(X[: 3 * B], max_tokens=B + 1)
        finish(pair, attempt)
        pair.assert_drained()
        assert num_cached(pair, attempt) == 0
        assert pair.ticket(attempt).num_cached_blocks == 0
    for rig in (pair.prefill, pair.decode):
        assert rig.allocator.counts.free == rig.allocator.counts.total
        assert rig.said(reports.CacheLookup) == []


@pytest.mark.parametrize("blocks", [(3, 3), (0, 2), (3, 0)])
def test_request_that_must_compute_every_token_skips_some(
    blocks: tuple[int, int], tiny: Tiny, make_pair: MakePair
) -> None:
    """A prompt whose logprobs are wanted is computed whole; what decode holds of it is not sent again for that."""
    pair = make_pair()
    warm(pair, *blocks)
    for rig in (pair.prefill, pair.decode):
        rig.reports.clear()
    before = pair.decode.agent.stats().bytes_received
    attempt = pair.begin(X[: 3 * B + 1], max_tokens=4, prompt_logprobs=0)
    assert finish(pair, attempt) == greedy(tiny("llama"), X[: 3 * B + 1], 4)
    assert num_cached(pair, attempt) == 0
    assert pair.prefill.said(reports.FirstTokens)[-1].num_computed_tokens == 3 * B + 1
    assert pair.ticket(attempt).num_cached_blocks == blocks[1]
    received = pair.decode.agent.stats().bytes_received - before
    assert received == (4 - blocks[1]) * pair.decode.runner.layout.block_nbytes
    assert pair.prefill.said(reports.CacheLookup) == []
    assert pair.decode.said(reports.CacheLookup) == [reports.CacheLookup(3 * B + 1, blocks[1] * B)]
    pair.assert_drained()


def test_lookups_are_counted_otherwise_than_they_went(make_pair: MakePair) -> None:
    pair = make_pair()
    warm(pair, 2, 3)
    for rig in (pair.prefill, pair.decode):
        rig.reports.clear()
    pair.generate([X[: 4 * B + 1]], max_tokens=1)
    assert pair.prefill.said(reports.CacheLookup) == [reports.CacheLookup(4 * B + 1, 2 * B)]
    assert pair.decode.said(reports.CacheLookup) == [reports.CacheLookup(4 * B + 1, 3 * B)]


def test_prompt_that_waits_is_shown_as_running(make_pair: MakePair) -> None:
    """Cached tokens are not work done: what is left counts, and it waits until its first chunk."""
    pair = make_pair()
    warm(pair, 3, 0)
    attempt = pair.reserve(X[: 4 * B + 2], max_tokens=1)
    pair.until(lambda: pair.ticket(attempt) is not None)
    start = messages.Start(X[: 4 * B + 2], [messages.Sample(0, [])], limits(max_tokens=1))
    pair.prefill.engine.handle(commands.Prefill(1, attempt, start, pair.ticket(attempt), 60.0))
    load = pair.prefill.engine.load()
    assert (load.num_running, load.num_waiting, load.waiting_tokens) == (0, 1, B + 2)
    finish(pair, attempt)
    pair.assert_drained()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_fault_that_passes_lives_on_in_the_cache(
    side: str, tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward leaves NaN behind; its request ends, and later ones of the same tokens do not inherit it."""
    pair = make_pair()
    rig = pair.prefill if side == "prefill" else pair.decode
    prompt = prompt_of(2 * B + 8)
    compute = rig.runner.run

    def fail_at_a_border(segments: list[Segment]) -> torch.Tensor:
        logits = compute(segments)
        end = segments[0].end
        if side == "decode" and end < 3 * B:
            return logits
        rig.runner.pool.tensor[list(segments[0].block_table[: -(-end // B)])] = torch.nan
        return torch.full_like(logits, torch.nan)

    with monkeypatch.context() as patched:
        patched.setattr(rig.runner, "run", fail_at_a_border)
        broken = pair.begin(prompt, max_tokens=20)
        pair.until(lambda: bool(pair.endings(broken)))
        assert pair.endings(broken)[0].reason is Reason.INTERNAL
    pair.assert_drained()
    rig.engine.check()
    expected = greedy(tiny("llama"), prompt, 20)
    # What of the other side's blocks is cached was computed without fault.
    for length in (2 * B + 8, 3 * B + 4):
        tokens = (prompt + expected)[:length]
        num_outputs = 20 - (length - len(prompt))
        assert pair.generate([tokens], max_tokens=num_outputs) == [expected[len(expected) - num_outputs :]]


@pytest.mark.parametrize(("length", "num_cached", "num_sent"), [(2 * B + 3, 0, 3), (2 * B + 3, 2, 1), (2 * B, 2, 0)])
def test_bytes_told_to_the_router_never_travelled(
    make_pair: MakePair, length: int, num_cached: int, num_sent: int
) -> None:
    """Told once and before decode's first token, and the same that the metric counts."""
    pair = make_pair()
    if num_cached:
        warm(pair, 0, num_cached)
    reported = len(pair.decode.reports)
    attempt = pair.begin(X[:length], max_tokens=3)
    finish(pair, attempt)
    said = pair.decode.reports[reported:]
    [told] = [report for report in said if isinstance(report, reports.Transferred)]
    [counted] = [report for report in said if isinstance(report, reports.TransferReport)]
    assert (told.session, told.attempt) == (1, attempt)
    assert told.num_bytes == counted.num_bytes == num_sent * pair.decode.runner.pool.layout.block_nbytes
    kinds = [type(report) for report in said]
    assert kinds.index(reports.Transferred) < kinds.index(reports.StepTokens)
