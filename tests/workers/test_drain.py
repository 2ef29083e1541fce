"""An engine that drains: it takes nothing new, finishes what it has, ends what takes too long, and says when it is
empty."""

from collections.abc import Callable

import pytest

from kvtransfer.settings import KVSettings
from kvtransfer.ticket import Ticket
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.workers.pair import EngineRig, Pair, limits
from tests.workers.test_hand_off import prompt_of

MakePair = Callable[..., Pair]


def rig_of(pair: Pair, side: str) -> EngineRig:
    return pair.prefill if side == "prefill" else pair.decode


def drain(rig: EngineRig, timeout_s: float = 60.0) -> None:
    rig.inbox.put(commands.Drain(timeout_s))


def is_drained(rig: EngineRig) -> bool:
    return bool(rig.said(reports.Drained))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_draining_worker_takes_new_work(side: str, make_pair: MakePair) -> None:
    """Refused for a reason that is no failure, by a worker that is empty and by one that is not."""
    pair = make_pair()
    rig = rig_of(pair, side)
    running = pair.begin(prompt_of(20), max_tokens=8)
    pair.until(lambda: rig.allocator.available < rig.allocator.counts.total)
    drain(rig)
    start = messages.Start(prompt_of(60), [messages.Sample(0, [])], limits())
    if side == "prefill":
        rig.inbox.put(commands.Prefill(1, "late", start, Ticket("late", "decode", 0, 4), 60.0))
    else:
        rig.inbox.put(commands.Reserve(1, "late", start, 60.0))
    pair.until(lambda: bool(rig.said(reports.Refused)))
    (refused,) = rig.said(reports.Refused)
    assert (refused.attempt, refused.reason) == ("late", Reason.DRAINING)
    pair.until(lambda: pair.is_finished(running) and is_drained(rig))
    assert len(pair.tokens(running)) == 8
    pair.assert_drained()


@pytest.mark.parametrize("num_turns", range(7))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_drain_ends_what_runs(side: str, num_turns: int, make_pair: MakePair) -> None:
    """Asked at any moment of a request: it ends whole, and only then the worker says that it is empty, once."""
    pair = make_pair(max_num_batched_tokens=16)
    rig = rig_of(pair, side)
    attempt = pair.reserve(prompt_of(40), max_tokens=8)
    pair.prefill_attempt(attempt, prompt_of(40), max_tokens=8)
    if side == "prefill":
        pair.until(lambda: bool(pair.prefill.said(reports.Accepted)))
    for _ in range(num_turns):
        pair.turn()
    drain(rig)
    pair.until(lambda: pair.is_finished(attempt) and is_drained(rig))
    pair.turn()
    assert not pair.endings(attempt)
    assert len(rig.said(reports.Drained)) == 1
    kinds = [type(report) for report in rig.reports]
    last_word = reports.FirstTokens if side == "prefill" else reports.StepTokens
    assert kinds.index(reports.Drained) > max(i for i, kind in enumerate(kinds) if kind is last_word)
    pair.assert_drained()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_idle_worker_never_ends_its_drain(side: str, make_pair: MakePair) -> None:
    pair = make_pair()
    drain(rig_of(pair, side))
    pair.until(lambda: is_drained(rig_of(pair, side)))


@pytest.mark.parametrize("stage", ["receiving", "running"])
def test_drain_of_decode_lasts_for_ever(stage: str, make_pair: MakePair) -> None:
    """What is left at its end is ended with the reason, and its blocks come back before the worker is empty."""
    pair = make_pair()
    attempt = pair.reserve(prompt_of(20), max_tokens=400)
    pair.until(lambda: pair.ticket(attempt) is not None)
    if stage == "running":
        pair.prefill_attempt(attempt, prompt_of(20), max_tokens=400)
        pair.until(lambda: len(pair.tokens(attempt)) > 2)
    drain(pair.decode, timeout_s=0.0)
    pair.until(lambda: is_drained(pair.decode))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.DRAINING]
    assert pair.decode.allocator.available == pair.decode.allocator.counts.total
    pair.assert_drained()


def test_drain_of_prefill_lasts_for_ever(make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=16, settings=KVSettings(ping_timeout_s=1.0, closing_timeout_s=1.0))
    attempt = pair.begin(prompt_of(200), max_tokens=8)
    pair.until(lambda: bool(pair.prefill.said(reports.Accepted)))
    drain(pair.prefill, timeout_s=0.0)
    pair.until(lambda: is_drained(pair.prefill))
    (said,) = [ending for ending in pair.prefill.said(reports.AttemptEnded) if ending.attempt == attempt]
    assert said.reason is Reason.DRAINING
    assert pair.prefill.allocator.available == pair.prefill.allocator.counts.total
    pair.decode.inbox.put(commands.Release(attempt, "the test is over"))
    pair.assert_drained()


def test_draining_decode_worker_refuses_another_ticket(make_pair: MakePair) -> None:
    """Its prefill worker fails during the drain: the reservation is no new work."""
    pair = make_pair()
    prompt = prompt_of(40)
    attempt = pair.reserve(prompt, max_tokens=8, keep_s=60.0)
    pair.until(lambda: pair.ticket(attempt) is not None)
    first = pair.ticket(attempt)
    assert first is not None
    drain(pair.decode)
    pair.decode.inbox.put(commands.Renew(1, attempt, first.transfer_id, [messages.Sample(0, [])], 60.0))
    pair.until(lambda: len(pair.decode.said(reports.Reserved)) == 2)
    ticket = pair.decode.said(reports.Reserved)[-1].ticket
    start = messages.Start(prompt, [messages.Sample(0, [])], limits(max_tokens=8))
    pair.prefill.inbox.put(commands.Prefill(1, "leg", start, ticket, 60.0))
    pair.until(lambda: pair.is_finished(attempt) and is_drained(pair.decode))
    assert len(pair.tokens(attempt)) == 8
    pair.assert_drained()
