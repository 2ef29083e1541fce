"""`splitserve bench burst`: load for a server that is running, this one or another."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Literal

from splitserve.cli.bench.output import MESSAGES, RESULTS, require_writable, save, tell
from splitserve.cli.up import require_serving
from splitserve.service.config import Cores, Positive
from splitserve.service.errors import InvalidRequest


def burst(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api: Literal["completions", "chat"] = "completions",
    streams: Positive = 1,
    burst: Positive = 8,
    prompt_tokens: Positive = 1500,
    output_tokens: Positive = 16,
    stream_tokens: Positive = 4000,
    quiet_gaps: Positive = 600,
    gaps: Positive = 2000,
    control: bool = False,
    control_cores: Cores = (),
    tokenizer: str | None = None,
    extra_body: str = '{"ignore_eos": true}',
    seed: int | None = None,
    output: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Does a burst of long prompts stall the tokens of streams that are running? Of any server with OpenAI's API.

    Streams run alone for a while; then bursts of long prompts come, one after the other. Compared are the gaps between
    tokens, as this client sees them. Leave the machine alone meanwhile; docs/benchmarks.md explains the figures.

    Parameters
    ----------
    url
        The server's HTTP address.
    model
        Default: the first one that the server names.
    api
        Which of OpenAI's two ways to ask.
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
    tokenizer
        Whose tokens the prompts are counted in, as --model elsewhere; default: SmolLM2-135M-Instruct.
    extra_body
        JSON that goes into every request. Without ignore_eos an answer may end early.
    seed
        Draws the same prompts again, which the server then may have cached. Default: others each time.
    output
        Write the report to this file, as JSON.
    plot
        Write a picture to this file, as PNG: every token a dot, bursts shaded.
    """
    require_serving()
    require_writable(output)
    require_writable(plot, "--plot")
    extra = json_object(extra_body)
    from splitserve.bench.load import tables
    from splitserve.bench.load.burst import BurstSettings, measure_burst, rows_of, summarize
    from splitserve.bench.load.control import prefill_cores
    from splitserve.bench.load.plot import plot_burst, require_matplotlib
    from splitserve.bench.load.prompts import Prompts
    from splitserve.bench.report import make_load_report
    from splitserve.bench.tables import machine_line

    if plot is not None:
        require_matplotlib()
    settings = BurstSettings(
        url=url,
        model=model,
        api=api,
        streams=streams,
        burst=burst,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        stream_tokens=stream_tokens,
        quiet_gaps=quiet_gaps,
        burst_gaps=gaps,
        control_cores=(control_cores or prefill_cores(url)) if control else (),
        extra_body=extra,
        seed=time.time_ns() if seed is None else seed,
    )
    measured = asyncio.run(measure_burst(settings, Prompts.of_model(tokenizer, settings.seed), MESSAGES.print))
    result = summarize(measured)
    report = make_load_report("burst", settings, rows_of(measured), result.as_json())
    RESULTS.print(machine_line(report.machine), soft_wrap=True)
    for shown in tables.burst_tables(result):
        RESULTS.print(shown, soft_wrap=isinstance(shown, str))
    save(report, output)
    tell(output)
    if plot is not None:
        plot_burst(measured, result, url, plot)
        tell(plot)
    return 0


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--extra-body is no JSON: {error}", field="extra_body") from None
    if not isinstance(value, dict):
        raise InvalidRequest("--extra-body: a JSON object is needed", field="extra_body")
    return value
