"""Where the time of a request goes: stages that do not add up, or are told otherwise than counted."""

import asyncio
from dataclasses import dataclass

from prometheus_client import generate_latest

from router.request import FinishReason
from router.stages import Stage, StageClock
from splitserve.service.reasons import Reason
from tests.router.cluster_fakes import Router, collect
from tests.router.driving import hand_off, next_attempt, until


@dataclass
class Clock:
    """Whole seconds, so that sums are exact."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def counted(router: Router) -> dict[str, float]:
    """The sum of each stage's histogram."""
    return {
        stage.value: router.registry.get_sample_value(f"splitserve_request_{stage}_time_seconds_sum", {"model": "tiny"})
        or 0.0
        for stage in Stage
    }


def num_stays(router: Router, stage: Stage) -> float:
    return router.registry.get_sample_value(f"splitserve_request_{stage}_time_seconds_count", {"model": "tiny"}) or 0.0


async def test_time_of_a_lost_attempt_is_lost() -> None:
    """Each stage lasts another power of two, and so does what lies between two attempts."""
    router, clock = Router(), Clock()
    (prefill,), (decode,) = router.pairs()
    stages = router.stage_clock(clock)
    clock.now += 1  # tokenize
    task = asyncio.create_task(collect(router.submit(stages=stages)))
    attempt, _ = await decode.command("reserve")
    clock.now += 2  # queue
    decode.reserved(attempt)
    await prefill.command("prefill")
    prefill.accepted(attempt)
    clock.now += 4  # prefill
    prefill.first(attempt, 0, 100)
    await until(lambda: num_stays(router, Stage.PREFILL) == 1)
    clock.now += 8  # handoff
    decode.transferred(attempt, 4096)
    decode.transferred(attempt, 4096)
    decode.token(attempt, 0, 100)
    await until(lambda: num_stays(router, Stage.HANDOFF) == 1)
    clock.now += 16  # decode
    decode.ended(attempt, Reason.PREEMPTED)
    await until(lambda: num_stays(router, Stage.DECODE) == 1)
    clock.now += 32  # queue
    _, _, second = await next_attempt([prefill], [decode], attempt)
    clock.now += 64  # prefill
    prefill.first(second, 1, 101)
    await until(lambda: num_stays(router, Stage.PREFILL) == 2)
    clock.now += 128  # handoff
    decode.transferred(second, 100)
    decode.token(second, 1, 101)
    await until(lambda: num_stays(router, Stage.HANDOFF) == 2)
    clock.now += 256  # decode
    decode.token(second, 2, 102, FinishReason.LENGTH)
    await task
    stages.end()
    clock.now += 512  # nobody's
    stages.enter(Stage.QUEUE)
    told = stages.timings()
    assert told.seconds == {"tokenize": 1, "queue": 2 + 32, "prefill": 4 + 64, "handoff": 8 + 128, "decode": 16 + 256}
    assert told.total_s == 511
    assert counted(router) == told.seconds
    assert told.transfer_bytes == 4096 + 100
    assert num_stays(router, Stage.QUEUE) == 2


async def test_search_for_another_prefill_worker_is_taken_for_prefill() -> None:
    router, clock = Router(), Clock()
    prefills, (decode,) = router.pairs(num_prefill=2)
    stages = router.stage_clock(clock)
    task = asyncio.create_task(collect(router.submit(stages=stages)))
    _, first, attempt = await next_attempt(prefills, [decode])
    [other] = [prefill for prefill in prefills if prefill is not first]
    clock.now += 1  # prefill
    router.leave(first)
    await decode.command("renew")
    clock.now += 6  # queue
    decode.reserved(attempt, 2)
    await other.command("prefill")
    other.accepted(attempt)
    clock.now += 8  # prefill
    other.first(attempt, 0, 100, FinishReason.LENGTH)
    await task
    stages.end()
    assert stages.timings().seconds == {"tokenize": 0, "queue": 6, "prefill": 9, "handoff": 0, "decode": 0}
    assert counted(router) == stages.timings().seconds


async def test_stay_of_a_running_request_is_left_out() -> None:
    clock = Clock()
    spans: list[tuple[Stage, float]] = []
    stages = StageClock(lambda stage, seconds: spans.append((stage, seconds)), clock)
    clock.now += 1
    stages.enter(Stage.QUEUE)
    clock.now += 2
    stages.enter(Stage.QUEUE)
    clock.now += 4
    assert stages.timings().seconds["queue"] == 6
    assert spans == [("tokenize", 1)]
    stages.end()
    stages.end()
    assert spans == [("tokenize", 1), ("queue", 6)]


async def test_stages_of_a_finished_request_are_not_on_the_page() -> None:
    router = Router()
    (prefill,), (decode,) = router.pairs()
    stages = router.stage_clock()
    task = asyncio.create_task(collect(router.submit(stages=stages)))
    attempt = await hand_off(prefill, decode)
    prefill.first(attempt, 0, 100)
    decode.token(attempt, 0, 100)
    decode.token(attempt, 1, 101, FinishReason.LENGTH)
    await task
    stages.end()
    page = generate_latest(router.registry).decode()
    for stage in ("tokenize", "queue", "prefill", "handoff", "decode"):
        assert f'splitserve_request_{stage}_time_seconds_count{{model="tiny"}} 1.0' in page
