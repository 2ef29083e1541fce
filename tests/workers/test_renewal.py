"""A reservation that outlives its transfer: the second ticket, in every order in which words and blocks can meet."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtransfer.carrier import Carrier
from kvtransfer.fault_plan import FaultPlan, FaultRule
from kvtransfer.faults import FaultyCarrier
from splitserve.engine.pool import KVPool
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from tests.reference import greedy
from tests.workers.pair import Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]
Tiny = Callable[[str], Path]

KEEP_S = 60.0


def renew(pair: Pair, attempt: str, outputs: Sequence[int] = (), transfer_id: str = "", samples: int = 1) -> None:
    """The router asks for another ticket in the place of this one, or of the last one given out."""
    if not transfer_id:
        ticket = pair.ticket(attempt)
        assert ticket is not None
        transfer_id = ticket.transfer_id
    grown = [messages.Sample(index, list(outputs)) for index in range(samples)]
    pair.decode.inbox.put(commands.Renew(1, attempt, transfer_id, grown, 60.0))


def begin_kept(pair: Pair, prompt: Sequence[int], **changes: object) -> str:
    """An attempt that is kept, handed to prefill as the leg "1"."""
    attempt = pair.reserve(prompt, keep_s=KEEP_S, **changes)
    pair.prefill_attempt(attempt, prompt, leg="1", **changes)
    return attempt


def lose(pair: Pair, attempt: str, leg: str = "1") -> reports.TransferLost:
    """The leg's prefill worker gives up, and decode says so."""
    before = len(pair.decode.said(reports.TransferLost))
    pair.prefill.inbox.put(commands.Release(leg, "prefill failed"))
    pair.until(lambda: len(pair.decode.said(reports.TransferLost)) > before)
    lost: reports.TransferLost = pair.decode.said(reports.TransferLost)[-1]
    assert lost.attempt == attempt
    return lost


def shown_by(pair: Pair, leg: str) -> list[int]:
    """What prefill has told the router of this leg."""
    return [
        token.token_id
        for said in pair.prefill.said(reports.FirstTokens)
        if said.attempt == leg
        for token in said.tokens
    ]


def second_leg(pair: Pair, attempt: str, prompt: Sequence[int], outputs: Sequence[int] = (), **changes: object) -> None:
    """Hands the renewed ticket to prefill and waits for the attempt's last token."""
    pair.until(lambda: len(pair.tickets(attempt)) == 2)
    first, second = pair.tickets(attempt)
    assert first.transfer_id != second.transfer_id
    pair.prefill_attempt(attempt, prompt, outputs, leg="2", **changes)
    pair.until(lambda: pair.is_finished(attempt))


def text(pair: Pair, attempt: str) -> list[int]:
    return [token.token_id for token in pair.tokens(attempt)]


def answers(pair: Pair, attempt: str, kind: type) -> int:
    return sum(said.attempt == attempt for said in pair.decode.said(kind))


def hold_cancel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the decode worker's KV thread does not hear that a transfer is given up."""
    monkeypatch.setattr(pair.decode.agent, "cancel", lambda transfer_id, reason: None)


def hold_finish(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no transfer is finished: its blocks may arrive, but it stays open."""
    monkeypatch.setattr(pair.prefill.agent, "finish", lambda *_: None)


@pytest.mark.parametrize("is_lost_first", [False, True], ids=["live", "lost"])
@pytest.mark.parametrize("turns", range(9))
def test_renewed_ticket_changes_a_token(turns: int, is_lost_first: bool, tiny: Tiny, make_pair: MakePair) -> None:
    """At any chunk, with the transfer open or already lost: the second prefill begins behind what the client has."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(4 * B - 4)
    attempt = begin_kept(pair, prompt, max_tokens=12)
    for _ in range(turns):
        pair.turn()
    outputs = shown_by(pair, "1")
    pair.prefill.inbox.put(commands.Release("1", "test"))
    if is_lost_first:
        pair.until(lambda: answers(pair, attempt, reports.TransferLost) == 1 or bool(pair.tokens(attempt)))
    renew(pair, attempt, outputs)
    pair.until(lambda: len(pair.tickets(attempt)) == 2 or answers(pair, attempt, reports.AlreadyRunning) == 1)
    if len(pair.tickets(attempt)) == 2:
        second_leg(pair, attempt, prompt, outputs, max_tokens=12)
        assert outputs + text(pair, attempt) == greedy(tiny("llama"), prompt, 12)
    else:
        pair.until(lambda: pair.is_finished(attempt))
        assert text(pair, attempt) == greedy(tiny("llama"), prompt, 12)
    assert pair.endings(attempt) == []
    pair.assert_drained()


@pytest.mark.parametrize("has_hits", [False, True], ids=["cold", "hits"])
@pytest.mark.parametrize("length", [2 * B - 1, 2 * B, 2 * B + 1])
def test_growth_by_the_first_token_misplaces_a_block(
    length: int, has_hits: bool, tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has prefill's first token, decode none of its blocks: the token may fill a block or begin one."""
    pair = make_pair()
    prompt = prompt_of(length)
    if has_hits:
        pair.generate([prompt[: B + 3]], max_tokens=2)
    with monkeypatch.context() as patched:
        hold_finish(pair, patched)
        attempt = begin_kept(pair, prompt, max_tokens=8)
        pair.until(lambda: bool(shown_by(pair, "1")))
        lost = lose(pair, attempt)
    assert lost.transfer_id == pair.tickets(attempt)[0].transfer_id
    assert lost.reason is Reason.TRANSFER_FAILED
    counts = pair.decode.allocator.counts
    assert (counts.reserved, counts.in_use) == (length // B + 1 - has_hits, has_hits), (
        "blocks are kept, hits stay pinned"
    )
    outputs = shown_by(pair, "1")
    renew(pair, attempt, outputs)
    second_leg(pair, attempt, prompt, outputs, max_tokens=8)
    assert pair.tickets(attempt)[1].num_blocks == -(-(length + 1) // B)
    assert pair.tickets(attempt)[1].num_cached_blocks == has_hits
    assert outputs + text(pair, attempt) == greedy(tiny("llama"), prompt, 8)
    assert [token.position for token in pair.tokens(attempt)] == list(range(1, 8))
    pair.assert_drained()


def test_several_samples_lose_their_reservation(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their first tokens they share a prompt, so another ticket serves them all; afterwards none can."""
    pair = make_pair()
    prompt, options = prompt_of(2 * B + 5), {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    start = messages.Start(prompt, [messages.Sample(0, []), messages.Sample(1, [])], limits(**options))
    for name in ("undisturbed", "renewed", "begun"):
        pair.decode.inbox.put(commands.Reserve(1, name, start, 60.0, keep_s=KEEP_S))
        pair.until(lambda name=name: pair.ticket(name) is not None)
        pair.prefill.inbox.put(commands.Prefill(1, f"{name} 1", start, pair.ticket(name), 60.0))
        if name == "undisturbed":
            pair.until(lambda: sum(bool(token.finish_reason) for token in pair.tokens("undisturbed")) == 2)
            hold_finish(pair, monkeypatch)
            continue
        lose(pair, name, f"{name} 1")
        renew(pair, name, [7] if name == "begun" else [], samples=2)
    monkeypatch.undo()
    pair.until(lambda: len(pair.tickets("renewed")) == 2 and answers(pair, "begun", reports.Refused) == 1)
    pair.prefill.inbox.put(commands.Prefill(1, "renewed 2", start, pair.ticket("renewed"), 60.0))

    def texts(name: str) -> list[list[int]]:
        return [[t.token_id for t in pair.tokens(name) if t.sample == sample] for sample in (0, 1)]

    pair.until(lambda: all(len(output) == 6 for name in ("undisturbed", "renewed") for output in texts(name)))
    assert texts("renewed") == texts("undisturbed")
    assert [refused.reason for refused in pair.decode.said(reports.Refused)] == [Reason.NO_ROOM]
    pair.assert_drained()


def test_renewal_that_crosses_the_loss_is_lost_itself(tiny: Tiny, make_pair: MakePair) -> None:
    """The router asks for another ticket while decode's word that the first is lost is still under way."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(4 * B)
    attempt = begin_kept(pair, prompt, max_tokens=4)
    pair.turn()
    pair.prefill.inbox.put(commands.Release("1", "test"))
    pair.until(lambda: not pair.decode.inbox.empty() or answers(pair, attempt, reports.TransferLost) == 1)
    renew(pair, attempt)  # behind TransferFailed in the inbox, or just after it
    second_leg(pair, attempt, prompt, max_tokens=4)
    assert text(pair, attempt) == greedy(tiny("llama"), prompt, 4)
    assert answers(pair, attempt, reports.TransferLost) == 1
    pair.assert_drained()


def test_blocks_that_have_arrived_are_fetched_again(tiny: Tiny, make_pair: MakePair) -> None:
    """Complete before the renewal is read: decode runs, says so, and opens nothing."""
    pair = make_pair()
    prompt = prompt_of(2 * B)
    attempt = begin_kept(pair, prompt, max_tokens=4)
    pair.until(lambda: bool(pair.tokens(attempt)))
    renew(pair, attempt, shown_by(pair, "1"))
    pair.until(lambda: pair.is_finished(attempt))
    assert answers(pair, attempt, reports.AlreadyRunning) == 1
    assert len(pair.tickets(attempt)) == 1
    assert text(pair, attempt) == greedy(tiny("llama"), prompt, 4)
    pair.assert_drained()


def test_transfer_that_completes_while_it_is_renewed_is_dropped(
    tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block and the renewal cross: what is there is used, and the router hears that no ticket comes."""
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(3 * B)
    attempt = begin_kept(pair, prompt, max_tokens=4)
    pair.turn()
    hold_cancel(pair, monkeypatch)
    renew(pair, attempt)
    pair.until(lambda: pair.is_finished(attempt))
    assert answers(pair, attempt, reports.AlreadyRunning) == 1
    assert len(pair.tickets(attempt)) == 1
    assert text(pair, attempt) == greedy(tiny("llama"), prompt, 4)
    pair.assert_drained()


def test_prefill_worker_that_shuts_down_takes_the_reservation_along(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV thread says why it gives up, and decode would take that for its own end."""
    pair = make_pair()
    hold_finish(pair, monkeypatch)
    attempt = begin_kept(pair, prompt_of(2 * B))
    pair.until(lambda: bool(shown_by(pair, "1")))
    pair.prefill.agent.close()
    pair.until_alone(pair.decode, lambda: answers(pair, attempt, reports.TransferLost) == 1)
    assert pair.decode.said(reports.AttemptEnded) == []
    assert pair.decode.allocator.counts.reserved == 3


def test_repeated_renewal_opens_a_third_transfer(tiny: Tiny, make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(4 * B)
    attempt = begin_kept(pair, prompt, max_tokens=4)
    pair.turn()
    renew(pair, attempt)
    renew(pair, attempt)
    pair.until(lambda: len(pair.tickets(attempt)) == 2)
    renew(pair, attempt, transfer_id=pair.tickets(attempt)[0].transfer_id)
    second_leg(pair, attempt, prompt, max_tokens=4)
    assert len(pair.tickets(attempt)) == 2
    assert [ignored.kind for ignored in pair.decode.said(reports.Ignored)] == ["renew", "renew"]
    assert text(pair, attempt) == greedy(tiny("llama"), prompt, 4)
    pair.assert_drained()


def test_parked_reservation_is_kept_for_ever(make_pair: MakePair) -> None:
    """Invariant 3: without another ticket in time it ends, once, and a renewal that comes too late is answered."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.reserve(prompt_of(4 * B), keep_s=0.01)
    pair.prefill_attempt(attempt, prompt_of(4 * B), leg="1")
    pair.turn()
    lose(pair, attempt)
    pair.until(lambda: bool(pair.endings(attempt)))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.TIMEOUT]
    pair.assert_drained()
    renew(pair, attempt)
    pair.until(lambda: bool(pair.decode.said(reports.Refused)))
    assert [refused.reason for refused in pair.decode.said(reports.Refused)] == [Reason.NO_ROOM]
    assert len(pair.endings(attempt)) == 1
    pair.assert_drained()


@pytest.mark.parametrize("phase", ["parked", "renewing"])
def test_reservation_without_a_transfer_takes_blocks_from_a_running_one(
    phase: str, tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is revoked like any other, told so once, and its blocks serve the sequence that needs them."""
    pair = make_pair(decode_blocks=6, max_num_batched_tokens=B)
    oldest = pair.begin(prompt_of(B, seed=1), max_tokens=3 * B)
    pair.until(lambda: bool(pair.tokens(oldest)))
    attempt = begin_kept(pair, prompt_of(2 * B), max_tokens=4)
    pair.until(lambda: any(said.attempt == "1" for said in pair.prefill.said(reports.Accepted)))
    if phase == "parked":
        lose(pair, attempt)
    else:
        cancel = pair.decode.agent.cancel
        hold_cancel(pair, monkeypatch)
        hold_finish(pair, monkeypatch)
        renew(pair, attempt)
        pair.until_alone(pair.decode, lambda: bool(pair.endings(attempt)))
        cancel(pair.tickets(attempt)[0].transfer_id, "test")
    pair.until(lambda: pair.is_finished(oldest))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.PREEMPTED]
    assert len(pair.tickets(attempt)) == 1
    assert text(pair, oldest) == greedy(tiny("llama"), prompt_of(B, seed=1), 3 * B)
    pair.prefill.inbox.put(commands.Release("1", "test"))
    pair.assert_drained()


@pytest.mark.parametrize("phase", ["parked", "renewing"])
@pytest.mark.parametrize("word", [commands.Release("a", "test"), commands.EndSession(1)], ids=["release", "session"])
def test_released_reservation_is_renewed_all_the_same(word: commands.Command, phase: str, make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=B)
    prompt = prompt_of(4 * B)
    pair.reserve(prompt, attempt="a", keep_s=KEEP_S)
    pair.prefill_attempt("a", prompt, leg="1")
    pair.turn()
    if phase == "parked":
        lose(pair, "a")
    else:
        renew(pair, "a")
    pair.decode.inbox.put(word)
    pair.prefill.inbox.put(commands.Release("1", "test"))
    pair.assert_drained()
    assert len(pair.tickets("a")) == 1
    assert pair.endings("a") == []
    assert not pair.decode.engine._reservations


def test_growth_without_a_block_holds_the_others(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the router has begins another block and there is none: the whole reservation goes back."""
    pair = make_pair(decode_blocks=4)
    hold_finish(pair, monkeypatch)
    attempt = begin_kept(pair, prompt_of(2 * B - 1), max_tokens=4)
    lose(pair, attempt)
    other = pair.reserve(prompt_of(B, seed=1))
    pair.until(lambda: pair.ticket(other) is not None)
    renew(pair, attempt, [7])
    pair.until(lambda: bool(pair.decode.said(reports.Refused)))
    refused = pair.decode.said(reports.Refused)[0]
    assert (refused.attempt, refused.reason) == (attempt, Reason.NO_ROOM)
    assert pair.decode.allocator.counts.reserved == 2
    pair.decode.inbox.put(commands.Release(other, "test"))
    pair.assert_drained()


@pytest.mark.parametrize(
    "samples",
    [[], [messages.Sample(1, [])], [messages.Sample(0, [10**6])], [messages.Sample(0, []), messages.Sample(1, [])]],
    ids=["none", "another", "huge id", "one more"],
)
def test_renewal_for_other_samples_is_taken(samples: list[messages.Sample], make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=B)
    attempt = begin_kept(pair, prompt_of(4 * B))
    pair.turn()
    lost = lose(pair, attempt)
    pair.decode.inbox.put(commands.Renew(1, attempt, lost.transfer_id, samples, 60.0))
    pair.until(lambda: bool(pair.decode.said(reports.Refused)))
    pair.assert_drained()


def test_late_blocks_of_the_first_ticket_land_in_the_second(
    tiny: Tiny, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leg's blocks are held on the wire until the second ticket is open for the same places."""
    monkeypatch.setenv("SPLITSERVE_TESTING", "1")
    slow = FaultRule(kind="delay", message="Blocks", count=4, seconds=0.3)

    def wrap(carrier: Carrier) -> Carrier:
        return FaultyCarrier(carrier, FaultPlan([slow], seed=1))

    pair = make_pair(wrap=wrap, max_num_batched_tokens=B)
    prompt = prompt_of(5 * B + 3)
    attempt = begin_kept(pair, prompt, max_tokens=8)
    pair.until(lambda: "1" in pair.prefill.engine._attempts and pair.prefill.engine._attempts["1"].num_sent >= 3)
    renew(pair, attempt)
    second_leg(pair, attempt, prompt, max_tokens=8)
    assert text(pair, attempt) == greedy(tiny("llama"), prompt, 8)
    pair.prefill.inbox.put(commands.Release("1", "test"))
    pair.assert_drained()


def test_reservation_is_kept_on_a_pool_that_cannot_be_written(make_pair: MakePair) -> None:
    """Another prefill worker would be no help, so the attempt ends at once."""

    class BrokenPool:
        def __init__(self, pool: KVPool) -> None:
            self._pool = pool

        def __getattr__(self, name: str) -> object:
            return getattr(self._pool, name)

        def write(self, block_id: int, data: memoryview) -> None:
            raise ValueError("broken")

    pair = make_pair(make_store=BrokenPool)
    attempt = begin_kept(pair, prompt_of(2 * B))
    pair.until(lambda: any(ending.attempt == attempt for ending in pair.endings(attempt)))
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.TRANSFER_FAILED]
    assert pair.decode.said(reports.TransferLost) == []
    pair.assert_drained()
