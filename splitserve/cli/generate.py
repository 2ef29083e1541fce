"""`splitserve generate`: one prompt in, its text to stdout as it arrives."""

import sys
import time
from typing import Annotated

from cyclopts import Parameter

from splitserve.cli.logprobs import LogprobTables
from splitserve.cli.options import Connection, Sampling
from splitserve.client.sync import Client, Stream
from splitserve.client.types import Generation, Message, Timings
from splitserve.service.config import NonNegative, Positive
from splitserve.service.errors import InvalidRequest

DEFAULT_SAMPLING = Sampling()
DEFAULT_CONNECTION = Connection()


def generate(
    text: str | None = None,
    /,
    *,
    max_tokens: NonNegative = 256,
    n: Positive = 1,
    raw: bool = False,
    echo: bool = False,
    timings: bool = False,
    quiet: Annotated[bool, Parameter(alias="-q")] = False,
    request_id: str = "",
    sampling: Annotated[Sampling, Parameter(name="*")] = DEFAULT_SAMPLING,
    connection: Annotated[Connection, Parameter(name="*")] = DEFAULT_CONNECTION,
) -> None:
    """Generate an answer to a prompt.

    The text streams to stdout as it arrives; logprobs and statistics follow on stderr. Of several samples the first
    streams, the others follow when all have ended, each below its number. Ctrl-C cancels the request. A
    model that has a chat template is asked with it; others, and every model with --raw, continue the text as it stands.

    Parameters
    ----------
    text
        The prompt. Without it, the prompt is read from stdin.
    max_tokens
        End each sample after this many tokens; 0, with --echo or --prompt-logprobs, shows the prompt alone.
    n
        So many samples of the prompt's answer.
    raw
        Continue the text as it stands, without the model's chat template.
    echo
        Show the text before what continues it.
    timings
        Say on stderr where the time went.
    quiet
        No statistics.
    request_id
        Your own name for the request; the cluster's logs show it.
    """
    options = sampling.options(max_tokens, connection)
    options["request_id"] = request_id
    options["timings"] = timings
    options["echo"] = echo
    if n > 1:
        options["n"] = n
    prompt = text if text is not None else _read_prompt()
    with Client(connection.target) as client:
        is_question = not raw and client.model_info(timeout=options["timeout"]).has_chat_template
        if is_question and echo:
            raise InvalidRequest(
                "this model has a chat template, and an answer continues no text: add --raw", field="echo"
            )
        turn: Message = {"role": "user", "content": prompt}
        with client.stream([turn] if is_question else prompt, **options) as stream:
            statistics = print_stream(stream, n)
            told = stream.result().timings
    if not quiet:
        print(statistics, file=sys.stderr)  # noqa: T201
    if told is not None:
        print(_timings(told), file=sys.stderr)  # noqa: T201


def print_stream(stream: Stream, num_samples: int = 1) -> str:
    """Writes the answer to stdout as it arrives, a line end after it even when it fails, and then to stderr the
    logprobs that were asked for; returns its statistics. Samples after the first are written when all have ended."""
    started = time.monotonic()
    first: float | None = None
    has_begun = False
    logprobs = LogprobTables()
    try:
        for chunk in stream:
            logprobs.add(chunk)
            if chunk.token_ids and first is None:
                first = time.monotonic()
            if chunk.index == 0 and (chunk.token_ids or chunk.prompt_token_ids):
                heading = _heading(0) if num_samples > 1 and not has_begun else ""
                has_begun = True  # before it is seen: an interrupt may come at once
                sys.stdout.write(heading + chunk.prompt_text + chunk.text)
                sys.stdout.flush()
    finally:
        if has_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
    ended = time.monotonic()
    result = stream.result()
    for index, sample in enumerate(result.samples[1:], start=1):
        sys.stdout.write(f"{_heading(index)}{result.prompt_text}{sample.text}\n")
    sys.stdout.flush()
    for line in logprobs.lines():
        print(line, file=sys.stderr)  # noqa: T201
    return _statistics(stream.result(), (first or ended) - started, ended - started)


def _heading(index: int) -> str:
    return f"[{index}]\n"


def _statistics(result: Generation, first_s: float, total_s: float) -> str:
    num_after_first = result.completion_tokens - len(result.samples)
    speed = f", {num_after_first / (total_s - first_s):.1f} tokens/s" if total_s > first_s else ""
    ends = ", ".join(sample.finish_reason for sample in result.samples)
    attempts = f", {result.attempts} attempts" if result.attempts > 1 else ""
    return (
        f"[{result.prompt_tokens} prompt tokens ({result.cached_tokens} cached), {result.completion_tokens} tokens in "
        f"{total_s:.2f} s, first after {first_s:.2f} s{speed}; "
        f"end: {ends}{attempts}; seed {result.seed}]"
    )


def _timings(timings: Timings) -> str:
    return (
        f"[tokenize {timings.tokenize_s:.3f} s, queue {timings.queue_s:.3f} s, prefill {timings.prefill_s:.3f} s, "
        f"hand-off {timings.handoff_s:.3f} s, decode {timings.decode_s:.3f} s; {timings.transfer_bytes:,} bytes sent]"
    )


def _read_prompt() -> str:
    if sys.stdin.isatty():
        raise InvalidRequest('there is no prompt: splitserve generate "text", or pipe it in', field="prompt")
    return sys.stdin.read()
