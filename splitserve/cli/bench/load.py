"""`splitserve bench burst` and `serve`: load for a server that is running, this one or another."""

import asyncio
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from splitserve.cli.bench.output import MESSAGES, require_writable, show, tell
from splitserve.cli.up import require_serving
from splitserve.service.config import Cores, Duration, Positive
from splitserve.service.errors import InvalidRequest


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Load:
    """Whom to ask and how, and where the results go: the same for every benchmark of a running server."""

    url: str = "http://127.0.0.1:8000"
    """The server's HTTP address."""
    model: str | None = None
    """Default: the first one that the server names."""
    api: Literal["completions", "chat"] = "completions"
    """Which of OpenAI's two ways to ask."""
    tokenizer: str | None = None
    """Whose tokens the prompts are counted in, as --model elsewhere; default: SmolLM2-135M-Instruct."""
    extra_body: str = '{"ignore_eos": true}'
    """JSON that goes into every request. Without ignore_eos an answer may end early."""
    seed: int | None = None
    """Draws the same prompts again, and what else is drawn; the server may have them cached. Default: others each
    time."""
    output: Path | None = None
    """Write the report to this file, as JSON."""
    plot: Path | None = None
    """Write a picture to this file, as PNG; docs/benchmarks.md says of what."""


_DEFAULT_LOAD = Load()


def burst(
    *,
    load: Load = _DEFAULT_LOAD,
    streams: Positive = 1,
    burst: Positive = 8,
    prompt_tokens: Positive = 1500,
    output_tokens: Positive = 16,
    stream_tokens: Positive = 4000,
    quiet_gaps: Positive = 600,
    gaps: Positive = 2000,
    control: bool = False,
    control_cores: Cores = (),
) -> int:
    """Does a burst of long prompts stall the tokens of streams that are running? Of any server with OpenAI's API.

    Streams run alone for a while; then bursts of long prompts come, one after the other. Compared are the gaps between
    tokens, as this client sees them. Leave the machine alone meanwhile; docs/benchmarks.md explains the figures.

    Parameters
    ----------
    streams
        How many streams run all the time.
    burst
        Prompts that come at once.
    prompt_tokens
        Length of each of them. No two are alike, so no cache helps.
    output_tokens
        Tokens of each of their answers.
    stream_tokens
        Length of a running stream's answer, after which it asks again. It has to fit the model's context.
    quiet_gaps
        Gaps between tokens to see before the first burst.
    gaps
        Gaps to see under bursts; they are repeated until then.
    control
        Afterwards measure the same streams while a plain matmul loop computes where prefill does: what the machine
        itself costs, with no hand-off.
    control_cores
        Cores of that loop, such as 0 or 0,2-3. Default: those of the server's prefill workers, if it is on this
        machine and one of ours.
    """
    require_serving()
    prepare(load.output, load.plot)
    extra = json_object(load.extra_body)
    from splitserve.bench.load import tables
    from splitserve.bench.load.burst import BurstSettings, measure_burst, rows_of, summarize
    from splitserve.bench.load.control import prefill_cores
    from splitserve.bench.load.plot import plot_burst
    from splitserve.bench.load.prompts import Prompts
    from splitserve.bench.report import make_load_report

    settings = BurstSettings(
        url=load.url,
        model=load.model,
        api=load.api,
        streams=streams,
        burst=burst,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        stream_tokens=stream_tokens,
        quiet_gaps=quiet_gaps,
        burst_gaps=gaps,
        control_cores=(control_cores or prefill_cores(load.url)) if control else (),
        extra_body=extra,
        seed=time.time_ns() if load.seed is None else load.seed,
    )
    measured = asyncio.run(measure_burst(settings, Prompts.of_model(load.tokenizer, settings.seed), MESSAGES.print))
    result = summarize(measured)
    report = make_load_report("burst", settings, rows_of(measured), result.as_json())
    show(report, tables.burst_tables(result), load.output)
    if load.plot is not None:
        plot_burst(measured, result, load.url, load.plot)
        tell(load.plot)
    return 0


def serve(
    *,
    load: Load = _DEFAULT_LOAD,
    rates: str = "0.5,1,2,4",
    duration: Duration = 60.0,
    prompt_tokens: Positive = 512,
    output_tokens: Positive = 64,
    spread: Annotated[float, Parameter(validator=Number(gte=0, lt=1))] = 0.5,
    ttft_goal: Duration = 2.0,
    itl_goal: Duration = 0.1,
    price_per_hour: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
) -> int:
    """How many requests per second does a server answer in time, and what does a token cost? Any with OpenAI's API.

    Requests arrive at random (Poisson) whether or not earlier ones are answered, at one rate after another. The goodput
    is the highest rate at which 9 of 10 requests meet both goals. docs/benchmarks.md explains the figures.

    Parameters
    ----------
    rates
        Requests per second, such as 0.5,1,2; each is a row.
    duration
        How long requests arrive at each rate, such as 60s.
    prompt_tokens
        Mean length of prompts. No two are alike, so no cache helps.
    output_tokens
        Mean length of answers.
    spread
        Lengths are drawn evenly from 1 - spread to 1 + spread times the mean.
    ttft_goal
        A good answer's first token comes within this time, such as 2s.
    itl_goal
        Of a good answer's gaps between tokens 99 of 100 are at most this long, such as 100ms.
    price_per_hour
        What the server costs in an hour; then the report says what a million output tokens cost.
    """
    require_serving()
    prepare(load.output, load.plot)
    extra, numbers = json_object(load.extra_body), numbers_above_0(rates, "rates")
    from splitserve.bench.load import arrivals, tables
    from splitserve.bench.load.plot import plot_rates
    from splitserve.bench.load.prompts import Prompts
    from splitserve.bench.report import make_load_report

    settings = arrivals.ArrivalSettings(
        url=load.url,
        model=load.model,
        api=load.api,
        rates=numbers,
        seconds=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        spread=spread,
        ttft_goal_s=ttft_goal,
        itl_goal_s=itl_goal,
        price_per_hour=price_per_hour,
        extra_body=extra,
        seed=time.time_ns() if load.seed is None else load.seed,
    )
    prompts = Prompts.of_model(load.tokenizer, settings.seed)
    rows = asyncio.run(arrivals.measure_arrivals(settings, prompts, MESSAGES.print))
    report = make_load_report("serve", settings, arrivals.rows_of(rows), arrivals.summary_of(rows))
    show(report, tables.rate_tables(rows, settings), load.output)
    if load.plot is not None:
        plot_rates(rows, load.url, load.plot)
        tell(load.plot)
    return 0


def prepare(output: Path | None, plot: Path | None) -> None:
    """Before minutes of measuring. Raises InvalidRequest where a result could not be kept."""
    require_writable(output)
    require_writable(plot, "--plot")
    if plot is not None:
        from splitserve.bench.load.plot import require_matplotlib

        require_matplotlib()


def numbers_above_0(text: str, name: str) -> list[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise InvalidRequest(f"--{name} {text}: numbers above 0 are needed, such as 0.5,2", field=name)
    return numbers


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--extra-body is no JSON: {error}", field="extra_body") from None
    if not isinstance(value, dict):
        raise InvalidRequest("--extra-body: a JSON object is needed", field="extra_body")
    return value
