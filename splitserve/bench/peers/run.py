"""`splitserve bench peers`: this server and others, one after the other, with the same work on the same cores.

Each is started, measured and ended before the next one begins. The work: one stream, eight at once, and what a burst of
long prompts does to a running stream (`bench.load.burst`).
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from splitserve.bench.load.burst import BurstResult, BurstSettings, measure_burst, summarize
from splitserve.bench.load.openai_client import Answer, OpenAIClient, connect
from splitserve.bench.load.prompts import Prompts
from splitserve.bench.peers.catalog import PEERS, Peer, Setup, Site
from splitserve.bench.peers.servers import running
from splitserve.bench.progress import Say
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import InvalidRequest, SplitserveError, Unavailable
from splitserve.service.ports import claim

SEQUENTIAL = {
    "generate": ("transformers.generate, one after the other", "cache"),
    "generate-no-cache": ("transformers.generate, without KV cache", "no-cache"),
}
NAMES = (*(peer.name for peer in PEERS), *SEQUENTIAL)

_READY_S = 300.0
_SEQUENTIAL_S = 900.0
_ROUNDS = 3
_MANY = 8
_SHORT_PROMPT = 24


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """As the command line has them. `root` has the environments, `cores` are everybody's."""

    names: Sequence[str]
    root: str
    cores: Sequence[int]
    burst: int
    prompt_tokens: int
    output_tokens: int
    rate_tokens: int
    quiet_gaps: int
    gaps: int
    seed: int


@dataclass(frozen=True)
class PeerRow:
    """One peer; `skipped` says why there are no figures, or fewer. `b1` is one stream, `b8` eight at once, in tokens/s
    after the first token."""

    name: str
    title: str
    skipped: str | None = None
    start_s: float | None = None
    b1_tokens_per_s: float | None = None
    b8_tokens_per_s: float | None = None
    ttft_median_s: float | None = None
    ttft_max_s: float | None = None
    burst: BurstResult | None = None

    def as_json(self) -> dict[str, Any]:
        shown = asdict(self)
        return shown | {"burst": None if self.burst is None else self.burst.as_json()}


def run_peers(settings: PeerSettings, say: Say, on_row: Callable[[Sequence[PeerRow]], None]) -> list[PeerRow]:
    """`on_row` is told after each, so that a long run leaves something even if it is ended."""
    located = locate_model(None)
    site = Site(Path(settings.root), located.directory, settings.cores, lambda: claim({"port": 0})["port"])
    tokenizer = Tokenizer.load(located.directory)
    peers = {peer.name: peer for peer in PEERS}
    rows: list[PeerRow] = []
    for name in settings.names:
        say(f"-- {name}")
        if name in SEQUENTIAL:
            rows.append(_sequential(name, site, settings))
        else:
            rows.append(_peer(peers[name], site, settings, Prompts(tokenizer, settings.seed), say))
        if (why := rows[-1].skipped) is not None:
            say(f"{name}: {why}")
        on_row(rows)
    return rows


def chosen(names: str) -> list[str]:
    """Raises InvalidRequest for a name that is none."""
    wanted = list(NAMES if names == "all" else dict.fromkeys(names.split(",")))
    if unknown := [name for name in wanted if name not in NAMES]:
        raise InvalidRequest(f"--peers {unknown[0]}: there are {', '.join(NAMES)}", field="peers")
    return wanted


def _peer(peer: Peer, site: Site, settings: PeerSettings, prompts: Prompts, say: Say) -> PeerRow:
    """What could be measured stays, whatever fails after it."""
    row = PeerRow(peer.name, peer.title)
    logs = site.root / "logs" / peer.name
    try:
        setup = peer.set_up(site)
        logs.mkdir(parents=True, exist_ok=True)
        with running(setup.processes, logs, _READY_S) as start_s:
            row = replace(row, start_s=start_s)
            b1, b8 = asyncio.run(_rates(setup, settings, prompts))
            row = replace(row, b1_tokens_per_s=b1, b8_tokens_per_s=b8)
            burst = summarize(asyncio.run(measure_burst(_burst_settings(setup, settings), prompts, say)))
    except SplitserveError as error:
        return replace(row, skipped=error.message)
    return replace(row, burst=burst, ttft_median_s=burst.ttft_median_s, ttft_max_s=burst.ttft_max_s)


def _burst_settings(setup: Setup, settings: PeerSettings) -> BurstSettings:
    return BurstSettings(
        url=setup.url,
        model=setup.model,
        api=setup.api,
        streams=1,
        burst=settings.burst,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        stream_tokens=setup.stream_tokens,
        quiet_gaps=settings.quiet_gaps,
        burst_gaps=settings.gaps,
        control_cores=(),
        extra_body=setup.extra_body,
        seed=settings.seed,
    )


async def _rates(setup: Setup, settings: PeerSettings, prompts: Prompts) -> tuple[float, float]:
    async with connect(setup.url, model=setup.model, api=setup.api, extra=setup.extra_body) as client:
        await _streams(client, prompts, 1, settings.rate_tokens)  # warms up
        one = [rate(await _streams(client, prompts, 1, settings.rate_tokens)) for _ in range(_ROUNDS)]
        many = [rate(await _streams(client, prompts, _MANY, settings.rate_tokens)) for _ in range(_ROUNDS)]
    return statistics.median(one), statistics.median(many)


async def _streams(client: OpenAIClient, prompts: Prompts, count: int, num_tokens: int) -> list[Answer]:
    asked = (client.complete(prompts.draw(_SHORT_PROMPT), num_tokens) for _ in range(count))
    return list(await asyncio.gather(*asked))


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all together, each one's first not counted: it is the prompt's.

    Raises Unavailable where all came at once.
    """
    tokens = sum(answer.counted_tokens - 1 for answer in answers)
    seconds = max(answer.arrivals[-1] for answer in answers) - min(answer.arrivals[0] for answer in answers)
    if seconds <= 0:
        raise Unavailable("the whole answer came in one piece: it has no rate")
    return tokens / seconds


def _sequential(name: str, site: Site, settings: PeerSettings) -> PeerRow:
    title, cache = SEQUENTIAL[name]
    work = (settings.rate_tokens, settings.prompt_tokens, settings.output_tokens, settings.burst)
    command = [sys.executable, "-P", "-m", "splitserve.bench.peers.sequential", str(site.model), cache]
    command += [",".join(map(str, site.cores)), *map(str, work)]
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SEQUENTIAL_S
        )
    except subprocess.TimeoutExpired:
        return PeerRow(name, title, skipped=f"it took longer than {_SEQUENTIAL_S:g} s")
    if done.returncode != 0:
        return PeerRow(name, title, skipped=(done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return PeerRow(name, title, **json.loads(done.stdout.splitlines()[-1]))
