"""`splitserve bench serve`: how many requests per second a server answers in time, and what a token costs then.

Requests arrive at random (Poisson), whether or not earlier ones are answered, at one rate after another. Any server
with OpenAI's API.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitserve.bench.load.gaps import Spread, gaps_of, spread
from splitserve.bench.load.openai_client import Answer, Api, OpenAIClient, connect
from splitserve.bench.load.prompts import Prompts
from splitserve.bench.progress import Say
from splitserve.service.errors import SplitserveError

# Of the gaps in an answer so many may miss the goal: a single one that nobody notices does not make it a bad answer.
MISSES_ALLOWED = 0.01
# Whoever waits longer for a word of the server has no answer.
SILENCE_S = 600.0
# A rate is carried when so many of its requests are good.
CARRIED = 0.9
_FEWEST_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class ArrivalSettings:
    """As the command line has them. Lengths are drawn evenly from `1 - spread` to `1 + spread` times the mean."""

    url: str
    model: str | None
    api: Api
    rates: Sequence[float]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    spread: float
    ttft_goal_s: float
    itl_goal_s: float
    price_per_hour: float | None
    extra_body: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Request:
    """Due `at_s` after the first moment of its rate."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Seen:
    """What came of one rate: answers, why others failed, and the time from the beginning to the last token."""

    rate: float
    answers: Sequence[Answer]
    failures: Sequence[str]
    seconds: float
    max_late_s: float
    "How late this client sent a request, at most: the load was what it says only if that is little."


@dataclass(frozen=True)
class RateRow:
    """One rate. Times in milliseconds; `itl` is of all gaps of all answers. `good` are answers within both goals."""

    rate: float
    requests: int
    failed: int
    good: int
    seconds: float
    requests_per_s: float
    good_per_s: float
    good_share: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float | None
    ttft: Spread | None
    itl: Spread | None
    max_late_ms: float
    cost_per_million_output_tokens: float | None


def plan(settings: ArrivalSettings, rate: float) -> Iterator[Request]:
    """The requests of one rate; equal seeds give equal ones."""
    chance = random.Random(f"{settings.seed} {rate}")  # noqa: S311  # no secrets

    def length(mean: int, least: int) -> int:
        return max(least, round(mean * chance.uniform(1 - settings.spread, 1 + settings.spread)))

    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < settings.seconds:
        yield Request(at_s, length(settings.prompt_tokens, 1), length(settings.output_tokens, _FEWEST_TOKENS))


async def measure_arrivals(settings: ArrivalSettings, prompts: Prompts, say: Say) -> list[RateRow]:
    """Raises Unavailable when the server does not answer at all; requests that fail are counted."""
    async with connect(
        settings.url, model=settings.model, api=settings.api, extra=settings.extra_body, silence_s=SILENCE_S
    ) as client:
        say(f"{client.model}: warming up")
        await client.complete(prompts.draw(settings.prompt_tokens), settings.output_tokens)
        rows = []
        for rate in settings.rates:
            say(f"{rate:g} requests/s for {settings.seconds:g} s")
            rows.append(rate_row(await _one_rate(client, prompts, rate, list(plan(settings, rate))), settings))
        return rows


async def _one_rate(client: OpenAIClient, prompts: Prompts, rate: float, requests: Sequence[Request]) -> Seen:
    # Drawn before: it takes time.
    texts = [prompts.draw(request.prompt_tokens) for request in requests]
    answers: list[Answer] = []
    failures: list[str] = []

    async def ask(text: str, request: Request) -> None:
        try:
            answers.append(await client.complete(text, request.output_tokens))
        except SplitserveError as error:
            failures.append(error.message)

    began, max_late_s = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as tasks:
        for text, request in zip(texts, requests, strict=True):
            await asyncio.sleep(max(began + request.at_s - time.perf_counter(), 0.0))
            max_late_s = max(max_late_s, time.perf_counter() - began - request.at_s)
            tasks.create_task(ask(text, request))
    return Seen(rate, answers, failures, time.perf_counter() - began, max_late_s)


def rate_row(seen: Seen, settings: ArrivalSettings) -> RateRow:
    gaps = [gap.seconds for answer in seen.answers for gap in gaps_of(answer.arrivals)]
    good = sum(is_good(answer, settings.ttft_goal_s, settings.itl_goal_s) for answer in seen.answers)
    num_requests = len(seen.answers) + len(seen.failures)
    tokens_per_s = sum(answer.counted_tokens for answer in seen.answers) / seen.seconds
    prompts = [answer.num_prompt_tokens for answer in seen.answers]
    known = [count for count in prompts if count is not None]
    price = settings.price_per_hour
    return RateRow(
        rate=seen.rate,
        requests=num_requests,
        failed=len(seen.failures),
        good=good,
        seconds=seen.seconds,
        requests_per_s=len(seen.answers) / seen.seconds,
        good_per_s=good / seen.seconds,
        good_share=good / num_requests if num_requests else 0.0,
        output_tokens_per_s=tokens_per_s,
        prompt_tokens_per_s=sum(known) / seen.seconds if len(known) == len(prompts) else None,
        ttft=spread([answer.ttft_s for answer in seen.answers]) if seen.answers else None,
        itl=spread(gaps) if gaps else None,
        max_late_ms=1e3 * seen.max_late_s,
        cost_per_million_output_tokens=1e6 * price / (3600 * tokens_per_s) if price and tokens_per_s else None,
    )


def is_good(answer: Answer, ttft_goal_s: float, itl_goal_s: float) -> bool:
    """Its first token came in time, and of its gaps no more than MISSES_ALLOWED are too long; one may be."""
    gaps = list(gaps_of(answer.arrivals))
    missed = sum(gap.seconds > itl_goal_s for gap in gaps)
    return answer.ttft_s <= ttft_goal_s and missed <= max(1.0, MISSES_ALLOWED * len(gaps))


def best_rate(rows: Sequence[RateRow]) -> RateRow | None:
    """The highest rate that is carried, below which all are, too; None where not even the lowest is."""
    ordered = sorted((row for row in rows if row.requests), key=lambda row: row.rate)
    carried = list(itertools.takewhile(lambda row: row.good_share >= CARRIED, ordered))
    return carried[-1] if carried else None


def summary_of(rows: Sequence[RateRow]) -> dict[str, Any]:
    """For the report: the goodput, with what it costs."""
    best = best_rate(rows)
    return {
        "goodput": None
        if best is None
        else {
            "rate": best.rate,
            "good_per_s": best.good_per_s,
            "output_tokens_per_s": best.output_tokens_per_s,
            "cost_per_million_output_tokens": best.cost_per_million_output_tokens,
        }
    }


def rows_of(rows: Sequence[RateRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
