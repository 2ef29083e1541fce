"""What a worker would keep for ever, or serve from the wrong blocks: reservations, prompts and sequences without an
owner, and a hand-off of other tokens than those asked for."""

import queue
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtransfer.ticket import Ticket
from splitserve.service.reasons import Reason
from splitserve.worker import commands, messages, reports
from splitserve.worker.clock import StepClock
from splitserve.worker.engine_process import EngineLoop, RoleEngine
from splitserve.worker.load import StepSize
from tests.tiny_models import VOCAB_SIZE
from tests.workers.pair import PATIENCE_S, EngineRig, Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]

# A sequence this long does not end by itself while a test looks.
ENDLESS = 900
LONG_PROMPT = 800


def has_stood_still(pair: Pair, rig: EngineRig, num_turns: int = 20) -> bool:
    """Whether the engine computes nothing while both are turned on."""
    before = rig.runner.num_forwards
    for _ in range(num_turns):
        pair.turn()
    return rig.runner.num_forwards == before


# Finish (invariant 4)


def changed(prompt: list[int], index: int) -> list[int]:
    """The same prompt but for one token."""
    other = list(prompt)
    other[index] = 3 + (other[index] - 2) % (VOCAB_SIZE - 3)
    assert other[index] != prompt[index]
    return other


@pytest.mark.parametrize(("length", "index"), [(40, 0), (40, B), (40, 39), (2 * B, -1), (5, 2)])
def test_decode_serves_from_blocks_of_other_tokens(length: int, index: int, make_pair: MakePair) -> None:
    """The bytes are whole and as many as expected: only the keys in Finish tell that they are someone else's."""
    pair = make_pair()
    prompt = prompt_of(length)
    attempt = pair.reserve(prompt, max_tokens=8)
    pair.prefill_attempt(attempt, changed(prompt, index), max_tokens=8)
    pair.until(lambda: bool(pair.decode.said(reports.AttemptEnded)))
    (ending,) = pair.decode.said(reports.AttemptEnded)
    assert (ending.attempt, ending.reason) == (attempt, Reason.INVALID)
    assert "other tokens" in ending.message
    pair.assert_drained()
    assert has_stood_still(pair, pair.decode)
    assert pair.tokens(attempt) == []
    assert len(pair.generate([prompt], max_tokens=4)[0]) == 4


def test_first_token_lands_at_the_wrong_position(make_pair: MakePair) -> None:
    """The keys are right, but prefill took outputs of an earlier attempt for prompt."""
    pair = make_pair()
    prompt = prompt_of(20)
    attempt = pair.reserve(prompt[:-2], prompt[-2:], max_tokens=8)
    pair.prefill_attempt(attempt, prompt, max_tokens=8)
    pair.until(lambda: bool(pair.decode.said(reports.AttemptEnded)))
    (ending,) = pair.decode.said(reports.AttemptEnded)
    assert ending.reason is Reason.INVALID
    assert pair.tokens(attempt) == []
    pair.assert_drained()


# The end of a router's session


def test_router_that_vanished_is_decoded_for(make_pair: MakePair) -> None:
    """Its running sequences end at once; those of another router go on."""
    pair = make_pair()
    orphans = [pair.begin(prompt_of(20, seed), max_tokens=ENDLESS) for seed in range(2)]
    other = pair.begin(prompt_of(20, 9), session=2, max_tokens=ENDLESS)
    pair.until(lambda: all(len(pair.tokens(attempt)) >= 3 for attempt in [*orphans, other]))
    pair.decode.inbox.put(commands.EndSession(1))
    pair.turn()
    counts = [len(pair.tokens(attempt)) for attempt in [*orphans, other]]
    for _ in range(5):
        pair.turn()
    now = [len(pair.tokens(attempt)) for attempt in [*orphans, other]]
    assert now == [counts[0], counts[1], counts[2] + 5]
    assert pair.decode.engine.load().num_running == 1
    pair.decode.inbox.put(commands.EndSession(2))
    pair.assert_drained()
    assert has_stood_still(pair, pair.decode)
    assert not any(map(pair.is_finished, [*orphans, other]))


def test_router_that_vanished_is_computed_for(make_pair: MakePair) -> None:
    """Its prompts are not computed on; the reservation on decode ends with the transfer."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.begin(prompt_of(LONG_PROMPT), max_tokens=4)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    pair.prefill.inbox.put(commands.EndSession(1))
    pair.turn()
    assert has_stood_still(pair, pair.prefill)
    pair.assert_drained()
    assert pair.prefill.said(reports.FirstTokens) == []
    assert pair.tokens(attempt) == []


def test_router_that_vanished_is_received_for(make_pair: MakePair) -> None:
    """Decode alone is told: it lets go of the reservation, and prefill learns so from the transfer."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.begin(prompt_of(LONG_PROMPT), max_tokens=ENDLESS)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    forwards = pair.decode.runner.num_forwards
    pair.decode.inbox.put(commands.EndSession(1))
    pair.assert_drained()
    assert has_stood_still(pair, pair.prefill)
    assert pair.decode.runner.num_forwards == forwards
    assert pair.tokens(attempt) == []


def test_session_that_ended_takes_another_ones_prompt(make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.begin(prompt_of(10 * B), session=2, max_tokens=3)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    for rig in (pair.prefill, pair.decode):
        rig.inbox.put(commands.EndSession(1))
    pair.until(lambda: pair.is_finished(attempt))
    assert len(pair.tokens(attempt)) == 3
    pair.assert_drained()


# Deadlines (invariant 3)


def test_reservation_waits_for_ever(make_pair: MakePair) -> None:
    """No prefill worker ever comes: the room is free again, and the router is told why."""
    pair = make_pair()
    attempt = pair.reserve(prompt_of(40), timeout_s=30.0)
    pair.until(lambda: pair.ticket(attempt) is not None)
    pair.decode.engine.expire(time.monotonic())
    assert pair.endings(attempt) == []
    pair.decode.engine.expire(time.monotonic() + 31.0)
    pair.decode.engine.expire(time.monotonic() + 32.0)
    assert [ending.reason for ending in pair.endings(attempt)] == [Reason.TIMEOUT]
    pair.assert_drained()
    assert len(pair.endings(attempt)) == 1


def test_progress_prolongs_a_reservation(make_pair: MakePair) -> None:
    """The transfer's own limit starts anew with each block; the reservation's does not."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.begin(prompt_of(LONG_PROMPT), timeout_s=30.0, max_tokens=4)
    pair.until(lambda: pair.decode.agent.stats().bytes_received > 0)
    pair.decode.engine.expire(time.monotonic() + 31.0)
    assert [ending.reason for ending in pair.decode.said(reports.AttemptEnded)] == [Reason.TIMEOUT]
    pair.assert_drained()
    assert pair.tokens(attempt) == []


def test_running_sequence_ends_with_its_reservations_deadline(make_pair: MakePair) -> None:
    pair = make_pair()
    attempt = pair.begin(prompt_of(40), max_tokens=20)
    pair.until(lambda: len(pair.tokens(attempt)) >= 2)
    pair.decode.engine.expire(time.monotonic() + 3600.0)
    pair.until(lambda: pair.is_finished(attempt))
    assert len(pair.tokens(attempt)) == 20
    assert pair.endings(attempt) == []


def test_prompt_is_computed_after_its_deadline(make_pair: MakePair) -> None:
    """Nothing more is computed or sent, the router is told, and the reservation on decode ends too."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.reserve(prompt_of(LONG_PROMPT), max_tokens=4)
    pair.prefill_attempt(attempt, prompt_of(LONG_PROMPT), timeout_s=30.0, max_tokens=4)
    pair.until(lambda: pair.prefill.engine.load().num_running == 1)
    pair.prefill.engine.expire(time.monotonic())
    assert pair.endings(attempt) == []
    pair.prefill.engine.expire(time.monotonic() + 31.0)
    assert [ending.reason for ending in pair.prefill.said(reports.AttemptEnded)] == [Reason.TIMEOUT]
    assert has_stood_still(pair, pair.prefill)
    pair.assert_drained()
    assert pair.prefill.said(reports.FirstTokens) == []
    assert pair.tokens(attempt) == []
    assert len(pair.prefill.said(reports.AttemptEnded)) == 1


def test_deadline_passes_and_nobody_looks(make_pair: MakePair) -> None:
    """Through the loop, with a deadline that has passed on arrival."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.reserve(prompt_of(LONG_PROMPT), max_tokens=4)
    pair.prefill_attempt(attempt, prompt_of(LONG_PROMPT), timeout_s=0.0, max_tokens=4)
    pair.until(lambda: bool(pair.prefill.said(reports.AttemptEnded)))
    assert [ending.reason for ending in pair.prefill.said(reports.AttemptEnded)] == [Reason.TIMEOUT]
    pair.assert_drained()
    assert pair.prefill.said(reports.FirstTokens) == []


# The loop


class FakeEngine:
    """Counts what the loop asks of it; `broken` is what `check` finds."""

    def __init__(self) -> None:
        self.work = 0
        self.calls: list[str] = []
        self.broken = ""

    def handle(self, item: Any) -> None:
        self.calls.append("handle")

    def expire(self, now: float) -> None:
        self.calls.append("expire")

    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> StepSize:
        self.calls.append("step")
        self.work -= 1
        return StepSize(1, 0, 0.0)

    def report_load(self) -> None:
        pass

    def check(self) -> None:
        self.calls.append("check")
        if self.broken:
            raise ValueError(self.broken)


class FakeClock:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def beat(self) -> None:
        self._calls.append("beat")

    def begin_step(self) -> None:
        self._calls.append("begin")

    def end_step(self) -> None:
        self._calls.append("end")


def loop_over(engine: FakeEngine, *items: Any, inbox: "queue.SimpleQueue[Any] | None" = None) -> EngineLoop:
    inbox = inbox or queue.SimpleQueue()
    for item in items:
        inbox.put(item)
    clock = cast(StepClock, FakeClock(engine.calls))
    return EngineLoop(cast(RoleEngine, engine), lambda report: None, inbox, clock)


def test_step_is_run_unseen_or_before_deadlines() -> None:
    """What has arrived, then deadlines, then the step between two signs for the watchdog."""
    engine = FakeEngine()
    engine.work = 1
    loop = loop_over(engine, commands.Release("a", "x"), commands.Release("b", "x"))
    assert loop.turn(wait_s=0.001)
    assert engine.calls == ["handle", "handle", "expire", "begin", "step", "end"]


def test_idle_engine_shows_no_sign_of_life_or_lets_deadlines_pass() -> None:
    engine = FakeEngine()
    loop = loop_over(engine)
    assert loop.turn(wait_s=0.001)
    assert engine.calls == ["expire", "beat"]


def test_books_that_do_not_add_up_are_served_from() -> None:
    """Looked through once after each piece of work, when idle; a violation ends the engine."""
    engine = FakeEngine()
    engine.work = 2
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = loop_over(engine, inbox=inbox)
    inbox.put(commands.Release("a", "x"))
    for _ in range(6):
        loop.turn(wait_s=0.001)
    assert engine.calls.count("check") == 1
    assert engine.calls.index("check") > max(i for i, call in enumerate(engine.calls) if call == "step")
    engine.work = 1
    engine.broken = "a block is lost"
    inbox.put(commands.Release("a", "x"))
    loop.turn(wait_s=0.001)
    with pytest.raises(ValueError, match="a block is lost"):
        loop.turn(wait_s=0.001)


def test_large_pool_is_looked_through_between_requests() -> None:
    engine = FakeEngine()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = loop_over(engine, inbox=inbox)
    for _ in range(5):
        inbox.put(commands.Release("a", "x"))
        loop.turn(wait_s=0.001)
    assert "check" not in engine.calls


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_router_hears_of_room_taken_and_not_of_room_given_back(side: str, make_pair: MakePair) -> None:
    """A request, its cancel and its end between two looks at the load: the last word is what holds."""
    pair = make_pair()
    rig = pair.prefill if side == "prefill" else pair.decode
    pair.turn()
    start = messages.Start(prompt_of(60), [messages.Sample(0, [])], limits())
    for number in range(30):
        attempt = f"attempt {number}"
        if side == "prefill":
            ticket = Ticket(f"transfer {number}", "decode", 0, 4)
            rig.engine.handle(commands.Prefill(1, attempt, start, ticket, 60.0))
        else:
            rig.engine.handle(commands.Reserve(1, attempt, start, 60.0))
        rig.engine.handle(commands.Release(attempt, "the client is gone"))
        rig.engine.handle(rig.inbox.get(timeout=PATIENCE_S))  # the transfer's end
        rig.loop.turn(0.0)
        assert rig.said(reports.Load)[-1] == rig.engine.load()
    pair.assert_drained()


@pytest.mark.parametrize("end", [None, commands.Stop()], ids=["front-gone", "stop"])
def test_engine_outlives_its_front(end: commands.Stop | None) -> None:
    engine = FakeEngine()
    engine.work = 1
    assert not loop_over(engine, end).turn(wait_s=0.001)
    assert "step" not in engine.calls


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_block_that_nobody_gave_back_is_not_found(side: str, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.generate([prompt_of(20)], max_tokens=2)
    pair.assert_drained()
    rig = pair.prefill if side == "prefill" else pair.decode
    rig.engine.check()
    rig.allocator.allocate(1)
    with pytest.raises((ValueError, AssertionError)):
        rig.engine.check()
