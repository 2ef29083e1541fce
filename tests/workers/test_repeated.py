"""C30: commands and events that come late, twice or out of order change nothing and cost nobody a block."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvtransfer import events
from kvtransfer.ticket import Ticket
from splitserve.service.errors import Internal
from splitserve.service.metrics import WorkerMetrics, render
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.ended import NUM_REMEMBERED, EndedAttempts
from tests.reference import greedy
from tests.workers.pair import EngineRig, Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]


def reserve(prompt: list[int], attempt: str = "a") -> commands.Reserve:
    start = messages.Start(prompt, [messages.Sample(0, [])], limits(max_tokens=4))
    return commands.Reserve(1, attempt, start, 60.0, keep_s=60.0)


def prefill(prompt: list[int], ticket: Ticket, attempt: str = "a") -> commands.Prefill:
    return commands.Prefill(1, attempt, reserve(prompt).start, ticket, 60.0)


def ticket_of(pair: Pair) -> Ticket:
    pair.until(lambda: pair.ticket("a") is not None)
    ticket = pair.ticket("a")
    assert ticket is not None
    return ticket


def ignored(rig: EngineRig) -> list[str]:
    return [report.kind for report in rig.said(reports.Ignored)]


def said_about(rig: EngineRig, attempt: str) -> list[str]:
    return [type(report).__name__ for report in rig.reports if getattr(report, "attempt", None) == attempt]


def handle_all(rig: EngineRig) -> None:
    while not rig.inbox.empty():
        rig.loop.turn(wait_s=0.0)


def test_repeated_command_starts_an_attempt_twice(tiny: Tiny, make_pair: MakePair) -> None:
    pair = make_pair()
    prompt = prompt_of(2 * B + 3)
    for _ in range(2):
        pair.decode.inbox.put(reserve(prompt))
    ticket = ticket_of(pair)
    for _ in range(2):
        pair.prefill.inbox.put(prefill(prompt, ticket))
    pair.until(lambda: pair.is_finished("a"))
    assert [token.token_id for token in pair.tokens("a")] == greedy(tiny("llama"), prompt, 4)
    assert (ignored(pair.decode), ignored(pair.prefill)) == (["reserve"], ["prefill"])
    assert said_about(pair.decode, "a") == ["Reserved", "Transferred"]
    assert said_about(pair.prefill, "a") == ["Accepted", "FirstTokens"]
    pair.assert_drained()


@pytest.mark.parametrize("ending", ["finished", "released", "session", "expired"])
def test_replayed_command_revives_an_attempt_that_has_ended(ending: str, make_pair: MakePair) -> None:
    """A reservation for nobody would keep its blocks for as long as the request might have lived."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(2 * B + 3)
    pair.decode.inbox.put(reserve(prompt))
    ticket = ticket_of(pair)
    pair.prefill.inbox.put(prefill(prompt, ticket))
    pair.turn()
    if ending == "expired":
        pair.decode.engine.expire(float("inf"))
    elif ending != "finished":
        word = commands.EndSession(1) if ending == "session" else commands.Release("a", "test")
        pair.decode.inbox.put(word)
        pair.prefill.inbox.put(word)
    else:
        pair.until(lambda: pair.is_finished("a"))
    pair.assert_drained()
    before = [said_about(rig, "a") for rig in (pair.decode, pair.prefill)]
    pair.decode.inbox.put(reserve(prompt))
    pair.prefill.inbox.put(prefill(prompt, ticket))
    handle_all(pair.decode)
    handle_all(pair.prefill)
    assert (ignored(pair.decode), ignored(pair.prefill)) == (["reserve"], ["prefill"])
    assert [said_about(rig, "a") for rig in (pair.decode, pair.prefill)] == before
    pair.assert_drained()


def test_command_behind_its_release_takes_blocks(make_pair: MakePair) -> None:
    """What is released before it has come is dead on arrival."""
    pair = make_pair()
    for rig in (pair.decode, pair.prefill):
        rig.inbox.put(commands.Release("a", "the client left"))
    pair.decode.inbox.put(reserve(prompt_of(5)))
    pair.prefill.inbox.put(prefill(prompt_of(5), Ticket("t", "decode", 0, 1)))
    handle_all(pair.decode)
    handle_all(pair.prefill)
    assert (ignored(pair.decode), ignored(pair.prefill)) == (["reserve"], ["prefill"])
    pair.assert_drained()


def test_second_attempt_with_a_live_ticket_kills_the_worker(tiny: Tiny, make_pair: MakePair) -> None:
    """C39: it is refused; the first goes on to its exact end, and so does the next prompt."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(3 * B)
    pair.decode.inbox.put(reserve(prompt))
    ticket = ticket_of(pair)
    for attempt in ("a", "b"):
        pair.prefill.inbox.put(prefill(prompt, ticket, attempt))
    pair.until(lambda: pair.is_finished("a"))
    assert [(r.attempt, r.reason) for r in pair.prefill.said(reports.Refused)] == [("b", Reason.INVALID)]
    assert [token.token_id for token in pair.tokens("a")] == greedy(tiny("llama"), prompt, 4)
    assert len(pair.generate([prompt_of(9)], max_tokens=2)[0]) == 2
    pair.assert_drained()


def test_ticket_that_the_kv_thread_refuses_kills_the_worker(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    pair.decode.inbox.put(reserve(prompt_of(5)))
    ticket = ticket_of(pair)

    def refuse(ticket: Ticket) -> None:
        raise Internal("transfer t is already open", reason="TRANSFER_EXISTS")

    with monkeypatch.context() as patched:
        patched.setattr(pair.prefill.agent, "open", refuse)
        pair.prefill.inbox.put(prefill(prompt_of(5), ticket))
        pair.until(lambda: bool(pair.prefill.said(reports.Refused)))
    assert [r.reason for r in pair.prefill.said(reports.Refused)] == [Reason.TRANSFER_FAILED]
    assert pair.prefill.allocator.counts.in_use == 0
    pair.prefill.inbox.put(prefill(prompt_of(5), ticket, "b"))
    pair.until(lambda: pair.is_finished("a"))
    pair.assert_drained()


@pytest.mark.parametrize("is_released_first", [True, False], ids=["release first", "event first"])
@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "failed"])
def test_release_beside_the_transfers_end_frees_a_block_twice(
    is_complete: bool, is_released_first: bool, make_pair: MakePair
) -> None:
    """C25: on both sides, the terminal event and the release in either order, and each of them twice."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(2 * B + 3)
    pair.decode.inbox.put(reserve(prompt))
    pair.prefill.inbox.put(prefill(prompt, ticket_of(pair)))
    if not is_complete:
        pair.turn()
        pair.prefill.agent.cancel(pair.tickets("a")[0].transfer_id, "test")
        wait_for(pair, lambda rig: not rig.inbox.empty())
    else:
        while not pair.prefill.said(reports.FirstTokens):
            pair.prefill.loop.turn(wait_s=0.0)
        wait_for(pair, lambda rig: not rig.inbox.empty())
    release = commands.Release("a", "the client left")
    for rig in (pair.decode, pair.prefill):
        waiting = [rig.inbox.get() for _ in range(rig.inbox.qsize())]
        assert [type(item) for item in waiting] in (
            [[events.TransferComplete], [events.TransferAcked]] if is_complete else [[events.TransferFailed]]
        )
        for item in [release, *waiting] if is_released_first else [*waiting, release]:
            rig.inbox.put(item)
            rig.inbox.put(item)
        handle_all(rig)
    pair.assert_drained()
    assert pair.endings("a") == [] or not is_complete
    assert not pair.prefill.engine._attempts
    assert len(pair.decode.engine._reservations) + len(pair.decode.engine._running) == 0


def wait_for(pair: Pair, condition: Callable[[EngineRig], bool]) -> None:
    """Only the KV threads move."""
    give_up = time.monotonic() + 60.0
    while not all(condition(rig) for rig in (pair.prefill, pair.decode)):
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_reason_of_a_release_is_lost_on_its_way(make_pair: MakePair) -> None:
    """Invariant 3: when one side gives up, the other is told why."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(4 * B)
    pair.decode.inbox.put(reserve(prompt))
    pair.prefill.inbox.put(prefill(prompt, ticket_of(pair)))
    pair.turn()
    pair.decode.inbox.put(commands.Release("a", "the client is gone"))
    pair.until(lambda: bool(pair.endings("a")))
    assert ["the client is gone" in ending.message for ending in pair.endings("a")] == [True]
    pair.assert_drained()


def test_memory_of_what_has_ended_grows_for_ever() -> None:
    ended = EndedAttempts()
    for number in range(NUM_REMEMBERED + 10):
        ended.add(str(number))
        ended.add("again")
    assert len(ended) == NUM_REMEMBERED
    assert "again" in ended
    assert str(NUM_REMEMBERED + 9) in ended
    assert "0" not in ended


def test_what_is_dropped_and_ignored_cannot_be_seen() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "tiny")
    for total in (0, 3, 3, 5):
        metrics.set_kv_messages_dropped(total)
    metrics.count_ignored("reserve")
    page = render(registry).decode()
    assert 'splitserve_kv_messages_dropped_total{model="tiny"} 5.0' in page
    assert 'splitserve_messages_ignored_total{kind="reserve",model="tiny"} 1.0' in page
