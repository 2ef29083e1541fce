"""What operators size by: an engine that looks idle while it computes, and blocks that look full while they are not."""

import queue
from collections.abc import Callable
from typing import Any, cast, get_args

import pytest
from msgspec.structs import replace

from kvtransfer import events
from splitserve.service.metrics import render
from splitserve.worker import commands, messages, reports
from splitserve.worker.clock import Signs, StepClock
from splitserve.worker.engine_process import EngineLoop, RoleEngine
from splitserve.worker.engine_setup import ready_report
from splitserve.worker.http import WorkerHttp
from splitserve.worker.load import StepSize
from tests.workers.pair import RATES, EngineRig, NoClock, Pair, limits
from tests.workers.test_hand_off import B, prompt_of

MakePair = Callable[..., Pair]

ENDLESS = 900

# Of the tiny Llama: two layers' matrices and the head's, and one token's K and V.
WEIGHTS_NBYTES = 4 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 384)
TOKEN_NBYTES = 4 * 2 * 2 * 2 * 16


class TimedEngine:
    """Each step takes as long as it is told to, and each look at deadlines half a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps: list[tuple[float, StepSize | None]] = []

    def handle(self, item: Any) -> None: ...

    def expire(self, now: float) -> None:
        self.now += 0.5

    def has_work(self) -> bool:
        return bool(self.steps)

    def step(self) -> StepSize | None:
        seconds, size = self.steps.pop(0)
        self.now += seconds
        return size

    def report_load(self) -> None: ...

    def check(self) -> None: ...


def test_waiting_counts_as_busy_or_a_step_does_not() -> None:
    engine = TimedEngine()
    said: list[reports.Report] = []
    clock = cast(StepClock, NoClock())
    loop = EngineLoop(cast(RoleEngine, engine), said.append, queue.SimpleQueue(), clock, lambda: engine.now)
    loop.turn(wait_s=0.0)
    engine.steps = [(2.0, StepSize(3, 40, 1.5)), (9.0, None), (0.25, StepSize(1, 0, 0.2))]
    for _ in range(4):
        loop.turn(wait_s=0.0)
    assert said == [reports.Step(2.0, 3, 40, 1.5), reports.Step(0.25, 1, 0, 0.2)]


def test_speed_of_a_link_stays_in_the_engine() -> None:
    said: list[reports.Report] = []
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = EngineLoop(cast(RoleEngine, TimedEngine()), said.append, inbox, cast(StepClock, NoClock()))
    inbox.put(events.LinkMeasured("d0", "ipc", 2.5e9))
    loop.turn(wait_s=0.0)
    assert said == [reports.LinkReport("d0", True, "ipc", 2.5e9)]


def test_transport_that_was_not_asked_for_stays_in_the_engine() -> None:
    said: list[reports.Report] = []
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = EngineLoop(cast(RoleEngine, TimedEngine()), said.append, inbox, cast(StepClock, NoClock()))
    inbox.put(events.LinkUp("d0", "gloo", "gloo"))
    inbox.put(events.LinkUp("d1", "tcp", "zmq", "gloo: out of order"))
    inbox.put(events.LinkMeasured("d1", "tcp", 2.5e9, "gloo: out of order"))
    loop.turn(wait_s=0.0)
    assert said == [
        reports.LinkReport("d0", True, "gloo"),
        reports.LinkReport("d1", True, "tcp", fallback="gloo: out of order"),
        reports.TransportFallback("zmq"),
        reports.LinkReport("d1", True, "tcp", 2.5e9, "gloo: out of order"),
    ]


def test_blocks_are_counted_under_a_transport_that_they_did_not_take(make_pair: MakePair) -> None:
    """What counts is the link's own, not what the worker was told to prefer."""
    ready = replace(ready_report(make_pair().prefill.engine._context), transport="nccl,zmq")
    http = WorkerHttp(ready, list, lambda: False, lambda: Signs(0, 0.0, 0.0), 10.0)
    http.count(reports.TransferReport("source", "zmq", "", 1000, 0.5))
    http.count(reports.TransferReport("source", "", "unreachable"))
    http.count(reports.TransportFallback("zmq"))
    page = render(http._registry).decode()
    model = ready.fingerprint.model
    for line in (
        f'kv_transfer_bytes_total{{model="{model}",side="source",transport="zmq"}} 1000.0',
        f'kv_transfer_failures_total{{model="{model}",reason="unreachable",side="source",transport="none"}} 1.0',
        f'kv_transport_fallbacks_total{{model="{model}",used="zmq",wanted="nccl"}} 1.0',
    ):
        assert f"splitserve_{line}" in page


def test_step_is_larger_or_smaller_than_what_it_computed(make_pair: MakePair) -> None:
    """Chunks on prefill; on decode two sequences, then a third prompt beside them."""
    pair = make_pair(max_num_batched_tokens=24)
    running = [pair.begin(prompt_of(40, seed), max_tokens=ENDLESS) for seed in range(2)]
    pair.until(lambda: all(len(pair.tokens(attempt)) > 3 for attempt in running))
    prefill = [(step.num_sequences, step.num_prompt_tokens) for step in pair.prefill.said(reports.Step)]
    assert {num_sequences for num_sequences, _ in prefill} == {0}
    assert sum(num for _, num in prefill) == 80
    assert max(num for _, num in prefill) == 24
    num_keys = sum(40 + len(pair.tokens(attempt)) for attempt in running)
    pair.decode.reports.clear()
    pair.turn()
    (step,) = pair.decode.said(reports.Step)
    assert (step.num_sequences, step.num_prompt_tokens) == (2, 0)
    assert step.floor_s == pytest.approx((WEIGHTS_NBYTES + num_keys * TOKEN_NBYTES) / RATES.bytes_per_s)
    pair.begin(prompt_of(30), is_local=True, max_tokens=2)
    pair.until(lambda: sum(step.num_prompt_tokens for step in pair.decode.said(reports.Step)) == 30)
    both = [(step.num_sequences, step.num_prompt_tokens) for step in pair.decode.said(reports.Step)[1:]]
    assert both == [(2, 22), (2, 8)]
    assert pair.decode.said(reports.Step)[1].floor_s > step.floor_s + 22 * TOKEN_NBYTES / RATES.bytes_per_s


def slots(rig: EngineRig) -> tuple[int, int]:
    """Taken and empty ones, by the last report."""
    last = rig.said(reports.Slots)[-1]
    return last.num_taken, last.num_empty


def room(num_blocks: int, num_tokens: int) -> tuple[int, int]:
    return num_blocks * B, num_blocks * B - num_tokens


def test_unfilled_last_block_looks_full(make_pair: MakePair) -> None:
    """Token by token, past the end of a block; and it is gone with its sequence, though no step follows."""
    pair = make_pair()
    attempt = pair.begin(prompt_of(20), max_tokens=ENDLESS)
    for num_tokens in range(2, 20):
        pair.until(lambda num=num_tokens: len(pair.tokens(attempt)) == num)  # type: ignore[misc]
        num_in_pool = 20 + num_tokens - 1
        assert slots(pair.decode) == room(-(-num_in_pool // B), num_in_pool)
    pair.decode.inbox.put(commands.Release(attempt, "test"))
    pair.assert_drained()
    assert slots(pair.decode) == slots(pair.prefill) == (0, 0)


@pytest.mark.parametrize("length", [2 * B, 2 * B + 5])
def test_block_on_its_way_looks_empty(length: int, make_pair: MakePair) -> None:
    """A reservation's blocks, and those of the prompt that fills them, are counted by what they are held for."""
    pair = make_pair(max_num_batched_tokens=B)
    attempt = pair.reserve(prompt_of(length), max_tokens=ENDLESS)
    pair.until(lambda: pair.ticket(attempt) is not None)
    assert slots(pair.decode) == room(3, length)
    pair.prefill_attempt(attempt, prompt_of(length), max_tokens=ENDLESS)
    pair.turn()
    assert pair.prefill.engine.load().num_running == 1
    assert slots(pair.prefill) == room(-(-length // B), length)


@pytest.mark.parametrize("is_local", [False, True])
def test_shared_blocks_are_counted_for_each_sample(is_local: bool, make_pair: MakePair) -> None:
    """Three samples share two whole blocks, and each has a block of its own for the rest."""
    pair = make_pair(max_num_batched_tokens=B)
    start = messages.Start(prompt_of(2 * B + 5), [messages.Sample(i, []) for i in range(3)], limits(max_tokens=ENDLESS))
    pair.decode.inbox.put(commands.Reserve(1, "a", start, 60.0, is_local=is_local))
    pair.until(lambda: pair.decode.engine.load().num_waiting == 3)
    assert slots(pair.decode) == ((2 + 3) * B, 3 * (B - 5))
    if not is_local:
        pair.prefill.inbox.put(commands.Prefill(1, "a", start, pair.ticket("a"), 60.0))
    pair.until(lambda: len(pair.tokens("a")) >= 3 * 4)
    num_in_own = 5 + len(pair.tokens("a")) // 3 - 1
    assert slots(pair.decode) == ((2 + 3) * B, 3 * (B - num_in_own))


def test_metrics_page_lacks_what_the_engine_says(make_pair: MakePair) -> None:
    pair = make_pair()
    attempt = pair.begin(prompt_of(20), max_tokens=3)
    pair.until(lambda: pair.is_finished(attempt))
    http = WorkerHttp(ready_report(pair.decode.engine._context), list, lambda: False, lambda: Signs(0, 0.0, 0.0), 10.0)
    http.count(reports.Slots(64, 16))
    for report in (*pair.prefill.reports, *pair.decode.reports, reports.Step(1000.0, 5, 0, 500.0)):
        if isinstance(report, get_args(reports.Countable)) and not isinstance(report, reports.Slots):
            http.count(report)
    page = render(http._registry).decode()
    assert 'splitserve_kv_cache_fragmentation_perc{model="tiny"} 0.25' in page
    assert 'splitserve_step_num_sequences_count{model="tiny"} 3.0' in page
    assert 'splitserve_step_num_sequences_sum{model="tiny"} 7.0' in page
    assert 'splitserve_step_num_sequences_bucket{le="1.0",model="tiny"} 2.0' in page
    assert 'splitserve_step_num_prompt_tokens_count{model="tiny"} 1.0' in page
    assert 'splitserve_step_num_prompt_tokens_sum{model="tiny"} 20.0' in page
    steps = [step for rig in (pair.prefill, pair.decode) for step in rig.said(reports.Step)]
    for name, seconds in {
        "busy": 1000.0 + sum(step.seconds for step in steps),
        "floor": 500.0 + sum(step.floor_s for step in steps),
    }.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"splitserve_worker_{name}_seconds_total")]
        assert float(line.rpartition(" ")[2]) == pytest.approx(seconds, rel=1e-9)
    http.count(reports.Slots(0, 0))
    assert 'splitserve_kv_cache_fragmentation_perc{model="tiny"} 0.0' in render(http._registry).decode()
