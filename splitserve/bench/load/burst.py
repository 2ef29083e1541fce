"""`splitserve bench burst`: does a burst of long prompts stall the tokens of streams that are running?

One client, any server with OpenAI's API. First the streams run alone; then bursts of long prompts come, one after the
other, until enough gaps between tokens have been seen; the streams' gaps then and before are compared.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitserve.bench.load.control import matmul_loop
from splitserve.bench.load.gaps import Gap, Spread, Window, gaps_of, spread, stalled_share, touching, within
from splitserve.bench.load.metronome import client_jitter
from splitserve.bench.load.openai_client import Answer, Api, OpenAIClient, connect
from splitserve.bench.load.prompts import Prompts
from splitserve.bench.progress import Say
from splitserve.service.errors import Internal, SplitserveError, Unavailable

# A stream's first gaps still belong to its prompt.
_WARM_UP_TOKENS = 10
_STREAM_PROMPT_TOKENS = 24
# Between two bursts the streams run alone for so many tokens.
_PAUSE_TOKENS = 25
_METRONOME_S, _METRONOME_TICKS = 0.01, 300
# A running stream that says nothing for so long is dead. A burst's prompt may have to wait for all others.
_SILENCE_S, _PATIENCE_S = 120.0, 600.0
_POLL_S = 0.01
_MAX_BURSTS = 200


@dataclass(frozen=True, kw_only=True)
class BurstSettings:
    """As the command line has them. `control_cores` are those for the matmul loop; none: no control."""

    url: str
    model: str | None
    api: Api
    streams: int
    burst: int
    prompt_tokens: int
    output_tokens: int
    stream_tokens: int
    quiet_gaps: int
    burst_gaps: int
    control_cores: Sequence[int]
    extra_body: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Burst:
    """One burst: from its requests' leaving to the last token of the last one; seconds since the run began."""

    window: Window
    ttft_s: Sequence[float]
    num_prompt_tokens: Sequence[int | None]
    num_tokens: int


@dataclass(frozen=True)
class Measured:
    """What was seen. All times are seconds since `began`, which is the streams' first request."""

    arrivals: Sequence[Sequence[float]]
    "Of each answer of a running stream, when its tokens came."
    quiet: Window
    bursts: Sequence[Burst]
    control: Window | None
    jitter: Spread
    tokens_per_piece: float


@dataclass(frozen=True)
class BurstResult:
    """The figures; `ratio_p99` is that of the gaps under bursts to those before."""

    quiet: Spread
    burst: Spread
    control: Spread | None
    ttft_median_s: float
    ttft_max_s: float
    stalled_share: float
    stream_tokens_per_s: float
    burst_tokens_per_s: float
    prompt_tokens_per_s: float | None
    jitter: Spread
    tokens_per_piece: float

    @property
    def ratio_p99(self) -> float:
        return self.burst.p99_ms / self.quiet.p99_ms

    @property
    def ratio_p99_control(self) -> float | None:
        return None if self.control is None else self.control.p99_ms / self.quiet.p99_ms

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "quiet": asdict(self.quiet),
            "burst": asdict(self.burst),
            "ttft": {"median_s": self.ttft_median_s, "max_s": self.ttft_max_s},
            "ratio_p99": self.ratio_p99,
            "stalled_share": self.stalled_share,
            "throughput": {
                "stream_tokens_per_s": self.stream_tokens_per_s,
                "burst_tokens_per_s": self.burst_tokens_per_s,
                "prompt_tokens_per_s": self.prompt_tokens_per_s,
            },
            "client_jitter": asdict(self.jitter),
            "tokens_per_piece": self.tokens_per_piece,
        }
        if self.control is not None:
            shown |= {"control": asdict(self.control), "ratio_p99_control": self.ratio_p99_control}
        return shown


async def measure_burst(settings: BurstSettings, prompts: Prompts, say: Say) -> Measured:
    """Raises Unavailable when the server does not answer, or breaks a stream off."""
    say(f"the client's own jitter, {_METRONOME_TICKS} ticks")
    jitter = await client_jitter(_METRONOME_S, _METRONOME_TICKS)
    async with connect(
        settings.url, model=settings.model, api=settings.api, extra=settings.extra_body, silence_s=_PATIENCE_S
    ) as client:
        say(f"{client.model}: warming up")
        await client.complete(prompts.draw(settings.prompt_tokens), settings.output_tokens)
        return await _Run(client, prompts, settings, say).measure(jitter)


def summarize(measured: Measured) -> BurstResult:
    """Raises Internal where a window has no gaps."""
    gaps = [gap for arrivals in measured.arrivals for gap in gaps_of(arrivals)]
    windows = [burst.window for burst in measured.bursts]
    quiet, under_burst = within(gaps, measured.quiet), touching(gaps, windows)
    under_control = None if measured.control is None else within(gaps, measured.control)
    if not quiet or not under_burst or under_control == []:
        raise Internal("no stream had two tokens within a window")
    quiet_spread = spread(_seconds(quiet))
    ttfts = [ttft for burst in measured.bursts for ttft in burst.ttft_s]
    prompt_tokens = [count for burst in measured.bursts for count in burst.num_prompt_tokens]
    known = [count for count in prompt_tokens if count is not None]
    seconds = sum(window.end - window.start for window in windows)
    return BurstResult(
        quiet=quiet_spread,
        burst=spread(_seconds(under_burst)),
        control=None if under_control is None else spread(_seconds(under_control)),
        ttft_median_s=statistics.median(ttfts),
        ttft_max_s=max(ttfts),
        stalled_share=stalled_share(under_burst, quiet_spread.p50_ms / 1e3),
        stream_tokens_per_s=len(under_burst) / sum(_seconds(under_burst)) * measured.tokens_per_piece,
        burst_tokens_per_s=sum(burst.num_tokens for burst in measured.bursts) / seconds,
        prompt_tokens_per_s=sum(known) / seconds if len(known) == len(prompt_tokens) else None,
        jitter=measured.jitter,
        tokens_per_piece=measured.tokens_per_piece,
    )


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """For the report: the streams' token times and the windows that they were seen in."""
    rows: list[dict[str, Any]] = [{"kind": "quiet", **asdict(measured.quiet)}]
    rows += [
        {
            "kind": "burst",
            **asdict(burst.window),
            "ttft_s": list(burst.ttft_s),
            "prompt_tokens": list(burst.num_prompt_tokens),
            "output_tokens": burst.num_tokens,
        }
        for burst in measured.bursts
    ]
    if measured.control is not None:
        rows.append({"kind": "control", **asdict(measured.control)})
    rows += [{"kind": "stream", "arrivals_s": [round(t, 6) for t in arrivals]} for arrivals in measured.arrivals]
    return rows


# The run


class _Run:
    """One measurement: the running streams, and what happens beside them."""

    def __init__(self, client: OpenAIClient, prompts: Prompts, settings: BurstSettings, say: Say) -> None:
        self._client = client
        self._stream_prompts, self._burst_prompts = prompts.fork("streams"), prompts.fork("bursts")
        self._settings = settings
        self._say = say
        self._began = time.perf_counter()
        self._answers: list[Answer] = []  # of the running streams, and complete ones, too
        self._num_pieces = 0
        self._burst_answers: list[Answer] = []

    async def measure(self, jitter: Spread) -> Measured:
        settings = self._settings
        try:
            async with asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(self._keep_running()) for _ in range(settings.streams)]
                await self._until_more(_WARM_UP_TOKENS * settings.streams)
                prompts = await self._draw_burst()
                self._say(f"{settings.streams} running, quiet")
                quiet = await self._until_more(settings.quiet_gaps + settings.streams)
                bursts = await self._all_bursts(prompts)
                control = await self._control() if settings.control_cores else None
                for stream in streams:
                    stream.cancel()
        except* SplitserveError as failures:
            raise failures.exceptions[0] from None
        return Measured(
            arrivals=[[t - self._began for t in answer.arrivals] for answer in self._answers],
            quiet=quiet,
            bursts=bursts,
            control=control,
            jitter=jitter,
            tokens_per_piece=_tokens_per_piece([a for a in self._answers if a.is_complete] or self._burst_answers),
        )

    async def _keep_running(self) -> None:
        """One stream after the other: an answer ends at its length."""
        while True:
            known: set[int] = set()

            def note(answer: Answer, known: set[int] = known) -> None:
                if not known:
                    known.add(id(answer))
                    self._answers.append(answer)
                self._num_pieces += 1

            prompt = self._stream_prompts.draw(_STREAM_PROMPT_TOKENS)
            await self._client.complete(prompt, self._settings.stream_tokens, note)

    async def _until_more(self, num_pieces: int) -> Window:
        """Waits for so many more pieces of all streams together. Raises Unavailable when they stop coming."""
        start = changed = time.perf_counter()
        seen, enough = self._num_pieces, self._num_pieces + num_pieces
        while self._num_pieces < enough:
            await asyncio.sleep(_POLL_S)
            now = time.perf_counter()
            if self._num_pieces > seen:
                seen, changed = self._num_pieces, now
            elif now - changed > _SILENCE_S:
                raise Unavailable(f"the running streams have been silent for {_SILENCE_S:g} s")
        return self._window(start)

    def _window(self, start: float) -> Window:
        return Window(start - self._began, time.perf_counter() - self._began)

    async def _draw_burst(self) -> list[str]:
        """On a thread, and never within a window: what this client does then would count as the server's stall."""
        settings = self._settings
        draw = self._burst_prompts.draw
        return await asyncio.to_thread(lambda: [draw(settings.prompt_tokens) for _ in range(settings.burst)])

    async def _all_bursts(self, prompts: list[str]) -> list[Burst]:
        bursts: list[Burst] = []
        num_gaps = 0
        while num_gaps < self._settings.burst_gaps:
            if len(bursts) == _MAX_BURSTS:
                raise Internal(f"{_MAX_BURSTS} bursts, and only {num_gaps} gaps: the bursts are too short to see any")
            before = self._num_pieces
            bursts.append(await self._one_burst(prompts))
            num_gaps += self._num_pieces - before
            self._say(f"burst {len(bursts)}: {num_gaps} of {self._settings.burst_gaps} gaps")
            prompts = await self._draw_burst()
            await self._until_more(_PAUSE_TOKENS * self._settings.streams)
        return bursts

    async def _one_burst(self, prompts: list[str]) -> Burst:
        start = time.perf_counter()
        asked = (self._client.complete(prompt, self._settings.output_tokens) for prompt in prompts)
        answers = await asyncio.gather(*asked)
        window = self._window(start)
        self._burst_answers += answers
        return Burst(
            window,
            [answer.ttft_s for answer in answers],
            [answer.num_prompt_tokens for answer in answers],
            sum(answer.counted_tokens for answer in answers),
        )

    async def _control(self) -> Window:
        cores = self._settings.control_cores
        self._say(f"control: a matmul loop on core {', '.join(map(str, cores))}")
        async with matmul_loop(cores):
            await self._until_more(_PAUSE_TOKENS * self._settings.streams)
            return await self._until_more(self._settings.burst_gaps + self._settings.streams)


def _tokens_per_piece(answers: Sequence[Answer]) -> float:
    """By the server's own count; 1 where it tells none."""
    return sum(answer.counted_tokens for answer in answers) / sum(len(answer.arrivals) for answer in answers)


def _seconds(gaps: Sequence[Gap]) -> list[float]:
    return [gap.seconds for gap in gaps]
