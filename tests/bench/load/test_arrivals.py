"""`bench serve`: arrivals that are Poisson's, figures of answers that are known, and the whole of it in small."""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitserve.bench.load.arrivals import ArrivalSettings, Seen, best_rate, is_good, plan, rate_row, summary_of
from splitserve.bench.load.openai_client import Answer
from splitserve.bench.load.tables import rate_tables
from tests.bench.load.scripted import scripted
from tests.bench.load.test_openai_client import DONE, event, text_event

SETTINGS = ArrivalSettings(
    url="",
    model=None,
    api="completions",
    rates=[1.0],
    seconds=10.0,
    prompt_tokens=100,
    output_tokens=20,
    spread=0.5,
    ttft_goal_s=1.0,
    itl_goal_s=0.1,
    price_per_hour=3.6,
    extra_body={},
    seed=1,
)


def answer(ttft_s: float, gaps_s: list[float], num_prompt_tokens: int | None = 100) -> Answer:
    arrivals = [50.0 + ttft_s]
    for gap in gaps_s:
        arrivals.append(arrivals[-1] + gap)
    return Answer(50.0, arrivals, len(arrivals), num_prompt_tokens)


def test_arrivals_are_evenly_spaced_or_of_another_rate() -> None:
    requests = list(plan(replace(SETTINGS, seconds=2000.0), 4.0))
    times = [request.at_s for request in requests]
    assert len(requests) == pytest.approx(8000, rel=0.05)
    gaps = [end - start for start, end in itertools.pairwise(times)]
    # Of exponential gaps the deviation is the mean, and one in e is longer than it.
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)
    assert max(times) < 2000
    assert requests == list(plan(replace(SETTINGS, seconds=2000.0), 4.0))
    assert requests != list(plan(replace(SETTINGS, seconds=2000.0, seed=2), 4.0))


def test_lengths_leave_their_range_or_fill_only_a_part_of_it() -> None:
    requests = list(plan(replace(SETTINGS, seconds=1000.0), 4.0))
    prompts, outputs = [r.prompt_tokens for r in requests], [r.output_tokens for r in requests]
    assert (min(prompts), max(prompts)) == pytest.approx((50, 150), abs=1)
    assert (min(outputs), max(outputs)) == (10, 30)
    assert statistics.fmean(prompts) == pytest.approx(100, rel=0.05)
    fixed = list(plan(replace(SETTINGS, spread=0.0), 4.0))
    assert {(r.prompt_tokens, r.output_tokens) for r in fixed} == {(100, 20)}


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "good"),
    [
        (1.0, [0.1] * 50, True),
        (1.01, [0.01] * 50, False),
        (0.1, [0.01] * 99 + [5.0], True),
        (0.1, [0.01] * 98 + [5.0] * 2, False),
        (0.1, [0.01] * 197 + [5.0] * 2, False),
        (0.1, [0.01] * 198 + [5.0] * 2, True),
        (0.1, [0.01] * 5 + [5.0], True),
        (0.1, [], True),
    ],
)
def test_answer_too_late_counts_as_good(ttft_s: float, gaps_s: list[float], good: bool) -> None:
    assert is_good(answer(ttft_s, gaps_s), 1.0, 0.1001) is good


def test_figures_of_a_rate_are_not_those_of_its_answers() -> None:
    answers = [answer(0.5, [0.05] * 9), answer(3.0, [0.05] * 9), answer(0.25, [0.05] * 3 + [0.45] * 2)]
    row = rate_row(Seen(2.0, answers, ["refused"], 10.0, 0.004), SETTINGS)
    assert (row.requests, row.failed, row.good) == (4, 1, 1)
    assert (row.requests_per_s, row.good_per_s, row.good_share) == pytest.approx((0.3, 0.1, 0.25))
    assert row.output_tokens_per_s == pytest.approx(2.6)
    assert row.prompt_tokens_per_s == pytest.approx(30.0)
    assert row.ttft is not None
    assert (row.ttft.p50_ms, row.ttft.max_ms) == pytest.approx((500, 3000))
    assert row.itl is not None
    assert (row.itl.count, row.itl.p50_ms, row.itl.max_ms) == (23, pytest.approx(50), pytest.approx(450))
    # 3.6 an hour are 0.001 a second, for 2.6 tokens.
    assert row.cost_per_million_output_tokens == pytest.approx(1e6 * 0.001 / 2.6)
    assert row.max_late_ms == pytest.approx(4)
    silent = rate_row(Seen(2.0, [answer(0.5, [0.05], None)], [], 10.0, 0.0), replace(SETTINGS, price_per_hour=None))
    assert (silent.prompt_tokens_per_s, silent.cost_per_million_output_tokens) == (None, None)


def test_rate_beyond_one_that_is_not_carried_is_the_goodput() -> None:
    def row(rate: float, num_good: int) -> Any:
        answers = [answer(0.1, [0.01])] * num_good + [answer(9.0, [0.01])] * (10 - num_good)
        return rate_row(Seen(rate, answers, [], 10.0, 0.0), SETTINGS)

    assert best_rate([row(4, 9), row(1, 10), row(2, 9)]).rate == 4  # type: ignore[union-attr]
    assert best_rate([row(4, 10), row(1, 10), row(2, 8)]).rate == 1  # type: ignore[union-attr]
    assert best_rate([row(1, 8), row(2, 10)]) is None
    assert summary_of([row(1, 8)]) == {"goodput": None}
    assert summary_of([row(1, 10), row(2, 2)])["goodput"]["rate"] == 1
    assert "none of these rates" in str(rate_tables([row(1, 8)], SETTINGS)[1])
    assert "cost" in str(rate_tables([row(1, 10)], SETTINGS)[1])


async def test_small_run_loses_requests_or_its_report(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> list[bytes]:
        if len(bodies) % 4 == 3:
            bodies.append(body)
            return [event(error={"message": "no room"})]
        bodies.append(body)
        usage = event(choices=[], usage={"completion_tokens": body["max_tokens"], "prompt_tokens": 30})
        return [*[text_event("x ")] * body["max_tokens"], usage, DONE]

    bodies: list[dict[str, Any]] = []
    report, plot = tmp_path / "serve.json", tmp_path / "serve.png"
    async with scripted(reply) as url:
        command = [sys.executable, "-P", "-m", "splitserve", "bench", "serve", "--url", url, "--rates", "20,40"]
        command += ["--duration", "1s", "--prompt-tokens", "30", "--output-tokens", "8", "--price-per-hour", "1"]
        command += ["--output", str(report), "--plot", str(plot)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    body = json.loads(report.read_text())
    rows = body["rows"]
    assert [row["rate"] for row in rows] == [20, 40]
    assert sum(row["requests"] for row in rows) == len(bodies) - 1, "and one to warm up"
    assert sum(row["failed"] for row in rows) == len(bodies) // 4
    assert len({bodied["prompt"] for bodied in bodies}) == len(bodies)
    assert "goodput" in body
    assert "goodput" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rates", ["", "1,x", "0", "-1", "inf"])
def test_rate_that_is_none_starts(rates: str) -> None:
    command = [sys.executable, "-P", "-m", "splitserve", "bench", "serve", f"--rates={rates}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "numbers above 0" in done.stderr
