"""A Finish that is not what decode was asked for: another prefill worker may do better, but not for ever."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from splitserve.service.reasons import Reason
from splitserve.worker import commands, reports
from tests.reference import greedy
from tests.workers.pair import Pair
from tests.workers.test_hand_off import B, prompt_of
from tests.workers.test_renewal import answers, begin_kept, hold_cancel, renew, second_leg, shown_by, text

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]
Wrong = Callable[[list[bytes], bytes], tuple[list[bytes], bytes]]

PROMPT = prompt_of(2 * B + 5)


def spoil(pair: Pair, monkeypatch: pytest.MonkeyPatch, wrong: Wrong, times: int = 1) -> None:
    """The next Finishes of the prefill worker are `wrong`."""
    finish, spoilt = pair.prefill.agent.finish, list[str]()

    def send(transfer_id: str, keys: Sequence[bytes], payload: bytes) -> None:
        if len(spoilt) < times:
            spoilt.append(transfer_id)
            keys, payload = wrong(list(keys), payload)
        finish(transfer_id, keys, payload)

    monkeypatch.setattr(pair.prefill.agent, "finish", send)


def other_tokens(keys: list[bytes], payload: bytes) -> tuple[list[bytes], bytes]:
    return [*keys[:-1], bytes(32)], payload


def mismatches(pair: Pair) -> int:
    return sum(report.reason == "mismatch" for report in pair.decode.said(reports.TransferReport))


def on_its_way_to_a_wrong_finish(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, str]:
    """The pair, and an attempt that its prefill worker has accepted."""
    pair = make_pair(max_num_batched_tokens=B)
    spoil(pair, monkeypatch, other_tokens)
    attempt = begin_kept(pair, PROMPT, max_tokens=4)
    pair.until(lambda: any(said.attempt == "1" for said in pair.prefill.said(reports.Accepted)))
    return pair, attempt


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (other_tokens, Reason.INVALID),
        (lambda keys, payload: (keys, b"nonsense"), Reason.INVALID),
        (lambda keys, payload: (keys[:-1], payload), Reason.TRANSFER_FAILED),
    ],
    ids=["keys", "tokens", "count"],
)
def test_wrong_finish_costs_the_reservation(
    wrong: Wrong, reason: Reason, tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    spoil(pair, monkeypatch, wrong)
    attempt = begin_kept(pair, PROMPT, max_tokens=8)
    pair.until(lambda: answers(pair, attempt, reports.TransferLost) == 1)
    (lost,) = pair.decode.said(reports.TransferLost)
    assert (lost.reason, lost.transfer_id) == (reason, pair.tickets(attempt)[0].transfer_id)
    counts = pair.decode.allocator.counts
    assert (counts.reserved, counts.in_use, counts.cached) == (3, 0, 0)
    assert mismatches(pair) == (reason is Reason.INVALID)
    outputs = shown_by(pair, "1")
    renew(pair, attempt, outputs)
    second_leg(pair, attempt, PROMPT, outputs, max_tokens=8)
    assert outputs + text(pair, attempt) == greedy(tiny("llama"), PROMPT, 8)
    assert pair.endings(attempt) == []
    pair.assert_drained()


def test_decode_that_finds_every_finish_wrong_is_asked_for_ever(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it may be its own fault: the attempt ends, so that the next one goes elsewhere."""
    pair = make_pair()
    spoil(pair, monkeypatch, other_tokens, times=2)
    attempt = begin_kept(pair, PROMPT, max_tokens=8)
    pair.until(lambda: answers(pair, attempt, reports.TransferLost) == 1)
    renew(pair, attempt)
    pair.until(lambda: len(pair.tickets(attempt)) == 2)
    pair.prefill_attempt(attempt, PROMPT, leg="2", max_tokens=8)
    pair.until(lambda: bool(pair.endings(attempt)))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.INVALID]
    assert answers(pair, attempt, reports.TransferLost) == 1
    assert mismatches(pair) == 2
    assert pair.tokens(attempt) == []
    pair.assert_drained()


def test_wrong_finish_that_meets_a_renewal_ends_the_attempt(
    tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router has asked for another ticket before it arrives: that is given out, and nothing else is said."""
    pair, attempt = on_its_way_to_a_wrong_finish(make_pair, monkeypatch)
    with monkeypatch.context() as patched:
        hold_cancel(pair, patched)
        renew(pair, attempt)
        pair.until(lambda: len(pair.tickets(attempt)) == 2)
    second_leg(pair, attempt, PROMPT, max_tokens=4)
    assert text(pair, attempt) == greedy(tiny("llama"), PROMPT, 4)
    assert answers(pair, attempt, reports.TransferLost) == 0
    assert mismatches(pair) == 1
    pair.assert_drained()


def test_wrong_finish_of_a_released_attempt_is_kept_or_told(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, attempt = on_its_way_to_a_wrong_finish(make_pair, monkeypatch)
    with monkeypatch.context() as patched:
        hold_cancel(pair, patched)
        pair.decode.inbox.put(commands.Release(attempt, "test"))
        pair.until(lambda: mismatches(pair) == 1)
    pair.assert_drained()
    assert pair.endings(attempt) == []
    assert answers(pair, attempt, reports.TransferLost) == 0
