"""Several samples of one attempt: one prefill, one transfer, shared blocks, and a text for each as if it were alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from kvtransfer import events
from kvtransfer.ticket import Ticket
from splitserve.engine.sampling_params import SamplingParams
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.reference import greedy, sampled
from tests.workers.pair import Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]


def begin(
    pair: Pair, prompt: list[int], samples: Sequence[messages.Sample], attempt: str = "a", **changes: object
) -> str:
    """Asks both sides for these samples, as a router would."""
    start = messages.Start(prompt, list(samples), limits(**changes))
    pair.decode.inbox.put(commands.Reserve(1, attempt, start, 60.0))
    pair.until(lambda: pair.ticket(attempt) is not None or bool(pair.decode.said(reports.Refused)))
    if pair.ticket(attempt) is not None:
        pair.prefill.inbox.put(commands.Prefill(1, attempt, start, pair.ticket(attempt), 60.0))
    return attempt


def texts(pair: Pair, count: int) -> dict[int, list[int]]:
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("a")) == count)
    return {i: [t.token_id for t in pair.tokens("a") if t.sample == i] for i in range(count)}


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 3 * B + 5])
def test_samples_disturb_one_another(length: int, make_pair: MakePair) -> None:
    """C65: each sample's text is what it would be alone; the prompt's KV was computed and sent once."""
    pair = make_pair()
    prompt = prompt_of(length)
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    forwards = pair.prefill.runner.num_forwards
    begin(pair, prompt, [messages.Sample(index, []) for index in range(3)], **options)
    together = texts(pair, 3)
    assert pair.prefill.runner.num_forwards == forwards + 1
    assert pair.prefill.agent.stats().bytes_sent == -(-length // B) * pair.decode.runner.layout.block_nbytes
    pair.assert_drained()
    assert len({tuple(text) for text in together.values()}) == 3
    for index, text in together.items():
        alone = make_pair()
        begin(alone, prompt, [messages.Sample(index, [])], **options)
        alone.until(lambda p=alone: p.is_finished("a"))
        assert [token.token_id for token in alone.tokens("a")] == text


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5}]
)
def test_sample_set_differs_from_one_process(options: dict[str, float], tiny: Tiny, make_pair: MakePair) -> None:
    """C65: the set is that of single runs of the reference, one per index; greedy samples are all equal."""
    pair, prompt = make_pair(), prompt_of(2 * B + 3)
    begin(pair, prompt, [messages.Sample(index, []) for index in range(3)], max_tokens=12, seed=9, **options)
    together = texts(pair, 3)
    params = SamplingParams(max_tokens=12, seed=9, ignore_eos=True, **options)
    for index, text in together.items():
        assert text == sampled(tiny("llama"), prompt, params, sample_index=index)
    if options["temperature"] == 0.0:
        assert together[0] == together[1] == together[2] == greedy(tiny("llama"), prompt, 12)


@pytest.mark.parametrize("length", [B - 1, 3 * B, 3 * B + 5])
def test_each_sample_holds_the_prompt_for_itself(length: int, make_pair: MakePair) -> None:
    """Whole blocks of the prompt are held once, however many samples read them; the rest once per sample."""
    pair = make_pair()
    begin(pair, prompt_of(length), [messages.Sample(index, []) for index in range(5)], max_tokens=500)
    pair.until(lambda: len(pair.decode.engine._running) == 5)
    counts = pair.decode.allocator.counts
    assert counts.in_use == length // B + 5
    first, *others = [sequence.blocks for sequence in pair.decode.engine._running]
    for blocks in others:
        assert blocks[: length // B] == first[: length // B]
        assert not set(blocks[length // B :]) & set(first)
    pair.decode.inbox.put(commands.Release("a", "test"))
    pair.assert_drained()


def test_cached_prompt_is_sent_again_or_changes_the_samples(make_pair: MakePair) -> None:
    """The second set of samples finds the prompt's whole blocks in decode's cache: they are pinned once, not sent, and
    read by every sample."""
    pair, prompt = make_pair(), prompt_of(3 * B + 5)
    options = {"max_tokens": 9, "temperature": 1.0, "seed": 5}
    begin(pair, prompt, [messages.Sample(index, []) for index in range(3)], **options)
    cold = texts(pair, 3)
    sent = pair.prefill.agent.stats().bytes_sent
    pair.assert_drained()
    begin(pair, prompt, [messages.Sample(index, []) for index in range(3)], attempt="b", **options)
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("b")) == 3)
    warm = {i: [t.token_id for t in pair.tokens("b") if t.sample == i] for i in range(3)}
    assert warm == cold
    assert pair.prefill.agent.stats().bytes_sent - sent == pair.decode.runner.layout.block_nbytes
    pair.assert_drained()


def test_released_samples_leave_shared_blocks_behind(make_pair: MakePair) -> None:
    pair = make_pair()
    begin(pair, prompt_of(3 * B + 5), [messages.Sample(index, []) for index in range(4)], max_tokens=500)
    pair.until(lambda: len(pair.tokens("a")) > 12)
    assert len(pair.decode.engine._running) == 4
    pair.decode.inbox.put(commands.Release("a", "test"))
    pair.assert_drained()


def test_preempted_sample_takes_its_siblings_along(make_pair: MakePair, tiny: Tiny) -> None:
    """Out of blocks the last sample goes, then the next one; the oldest goes on and has its whole text."""
    pair, prompt = make_pair(decode_blocks=9), prompt_of(3 * B)
    begin(pair, prompt, [messages.Sample(index, []) for index in range(3)], max_tokens=5 * B)
    pair.until(lambda: any(token.finish_reason for token in pair.tokens("a")))
    assert [(ending.reason, ending.samples) for ending in pair.endings("a")] == [
        (Reason.PREEMPTED, (2,)),
        (Reason.PREEMPTED, (1,)),
    ]
    by_sample = [[token.token_id for token in pair.tokens("a") if token.sample == index] for index in range(3)]
    expected = greedy(tiny("llama"), prompt, 5 * B)
    assert by_sample[0] == expected
    assert len(by_sample[2]) < len(by_sample[1]) < 5 * B
    assert by_sample[1] == expected[: len(by_sample[1])]
    pair.assert_drained()


def test_released_sample_goes_on_or_takes_its_siblings_along(make_pair: MakePair) -> None:
    pair = make_pair()
    begin(pair, prompt_of(B + 3), [messages.Sample(index, []) for index in range(3)], max_tokens=40)
    pair.until(lambda: len(pair.tokens("a")) > 12)
    pair.decode.inbox.put(commands.Release("a", "test", (1,)))
    pair.decode.inbox.put(commands.Release("a", "test", (1, 7)))
    pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("a")) == 2)
    assert {token.sample for token in pair.tokens("a") if token.finish_reason} == {0, 2}
    assert len([token for token in pair.tokens("a") if token.sample == 1]) < 40
    pair.assert_drained()
    assert "a" in pair.decode.engine._ended


def test_release_of_the_last_sample_keeps_the_attempt(make_pair: MakePair) -> None:
    pair = make_pair()
    begin(pair, prompt_of(B + 3), [messages.Sample(index, []) for index in range(2)], max_tokens=400)
    pair.until(lambda: len(pair.tokens("a")) > 6)
    for sample in (1, 0):
        pair.decode.inbox.put(commands.Release("a", "test", (sample,)))
    pair.assert_drained()
    assert pair.endings("a") == []
    assert "a" in pair.decode.engine._ended


@pytest.mark.parametrize(
    "samples",
    [[], [messages.Sample(0, []), messages.Sample(0, [])], [messages.Sample(0, [7]), messages.Sample(1, [])]],
    ids=["none", "twice", "begun"],
)
def test_impossible_samples_are_taken(samples: list[messages.Sample], make_pair: MakePair) -> None:
    pair = make_pair()
    begin(pair, prompt_of(5), samples)
    assert [refused.reason for refused in pair.decode.said(reports.Refused)] == [Reason.INVALID]
    pair.assert_drained()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode({"tokens": []}),
        msgspec.msgpack.encode({"tokens": [{"sample": 0, "position": 0, "token_id": 10**9}]}),
        msgspec.msgpack.encode({"tokens": [{"sample": 0, "position": 0, "token_id": -7}]}),
        msgspec.msgpack.encode({"tokens": [{"sample": 0, "position": 1, "token_id": 7}]}),
        msgspec.msgpack.encode({"tokens": [{"sample": 1, "position": 0, "token_id": 7}]}),
        msgspec.msgpack.encode({"tokens": [{"sample": 0, "position": 0, "token_id": 7, "finish_reason": "weird"}]}),
    ],
    ids=["empty", "garbage", "no token", "huge id", "negative id", "later position", "other sample", "odd finish"],
)
def test_finish_of_a_faulty_peer_kills_the_worker(
    payload: bytes, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: what a peer sends ends an attempt at most."""
    pair = make_pair()
    finish = pair.prefill.agent.finish
    monkeypatch.setattr(pair.prefill.agent, "finish", lambda transfer, keys, _: finish(transfer, keys, payload))
    attempt = pair.begin(prompt_of(20), max_tokens=4)
    pair.until(lambda: bool(pair.endings(attempt)))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.INVALID]
    assert pair.tokens(attempt) == []
    pair.assert_drained()
    monkeypatch.undo()
    assert len(pair.generate([prompt_of(20)], max_tokens=4)[0]) == 4


def test_token_outside_of_the_vocabulary_kills_the_worker(make_pair: MakePair) -> None:
    """C62: the router refuses such ids; a worker that gets one all the same refuses it too."""
    pair = make_pair()
    bad_starts = [
        messages.Start([5, 10**6], [messages.Sample(0, [])], limits()),
        messages.Start([-1, 5], [messages.Sample(0, [])], limits()),
        messages.Start([], [messages.Sample(0, [])], limits()),
        messages.Start([5], [messages.Sample(0, [384])], limits()),
        messages.Start([5], [messages.Sample(0, [])], limits(logit_bias={384: 1.0})),
        messages.Start([5], [messages.Sample(0, [])], limits(repetition_penalty=0.0)),
    ]
    ticket = Ticket("t", "decode", 0, 1)
    for number, start in enumerate(bad_starts):
        pair.decode.inbox.put(commands.Reserve(1, str(number), start, 60.0))
        pair.prefill.inbox.put(commands.Prefill(1, str(number), start, ticket, 60.0))
    for rig in (pair.prefill, pair.decode):
        pair.until(lambda rig=rig: len(rig.said(reports.Refused)) == len(bad_starts))
        assert {refused.reason for refused in rig.said(reports.Refused)} == {Reason.INVALID}
    pair.assert_drained()


def test_unknown_transfer_completes_into_nothing(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.decode.inbox.put(events.TransferComplete("nobody's", [], b"", "prefill", 0, 0.0))
    pair.assert_drained()
