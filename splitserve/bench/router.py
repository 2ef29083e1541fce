"""`splitserve bench router`: how many tokens per second one router process carries, and what that costs.

A real router, between fake workers (`fake_workers`) and many streams (`streams`); a router of its own for each row.
"""

import asyncio
import contextlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
import torch
import uvloop

from splitserve.bench.fake_workers import FakeDecode, FakePrefill
from splitserve.bench.progress import Say
from splitserve.bench.report import Report, make_report
from splitserve.bench.streams import GrpcStreams, SseStreams, Streams
from splitserve.bench.words import Meter, Words
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import Internal
from splitserve.service.ports import LOOPBACK, claim

EDGES = ("grpc", "sse")

_SEQS_PER_WORKER = 256
_PROMPT_TOKENS = 16
_OPENING_AT_ONCE = 128
# So many that what one of them costs can be told from what the process did besides.
_MANY = 256
# Tokens that may be on their way when the router is to have enough to do, and of each stream.
_LEAST_WINDOW, _WINDOW = 64, 2
_READY_S = 60.0
_SPARE_FILES = 1000
_CONTEXT = 100_000_000
# Neither the fake workers nor the clients answer in time when there is one core for both.
_PATIENCE = {
    "--suspect-timeout": "600s",
    "--heartbeat-timeout": "600s",
    "--stall-timeout": "600s",
    "--reserve-timeout": "600s",
    "--token-timeout": "600s",
    "--request-timeout": "3600s",
}
_BOUNDS = {
    "--max-queue-requests": 100_000,
    "--max-queue-tokens": 100_000_000,
    "--max-tokenizing-requests": 100_000,
    "--log-level": "warning",
}


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """As the command line has them; `edges` of EDGES."""

    edges: Sequence[str]
    streams: Sequence[int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RouterRow:
    """Times in the router's own processor seconds where they say cpu. `tokens_per_chunk` is above 1 where several
    tokens shared one; `core_share` is how much of one core the router took."""

    edge: str
    streams: int
    tokens_per_s: float
    core_share: float
    cpu_us_per_token: float
    tokens_per_chunk: float
    half_load_tokens_per_s: float
    half_load_cpu_us_per_token: float
    half_load_tokens_per_chunk: float
    latency_ms_p50: float
    latency_ms_p99: float
    opening_cpu_ms_per_stream: float | None
    memory_mib: float
    memory_kib_per_stream: float | None
    "Beyond the first stream; None where there are too few to tell."


def run_router_bench(settings: RouterSettings, say: Say) -> tuple[Report, list[RouterRow]]:
    """Raises Internal where a stream breaks."""
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as scratch:
        model = _model_of_endless_context(Path(scratch))
        rows = uvloop.run(_measure_all(model, settings, say))
    args = asdict(settings)
    return make_report("router", args, [asdict(row) for row in rows], device=torch.device("cpu")), rows


def _model_of_endless_context(directory: Path) -> Path:
    """The default model's settings and tokenizer, whose streams are never done."""
    source = locate_model(None, loads_weights=False).directory
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".jinja"):
            shutil.copy(path, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = _CONTEXT
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


async def _measure_all(model: Path, settings: RouterSettings, say: Say) -> list[RouterRow]:
    rows = []
    for edge, streams in itertools.product(settings.edges, settings.streams):
        say(f"{edge}, {streams} streams")
        rows.append(await _measure(model, edge, streams, settings.seconds))
    return rows


async def _measure(model: Path, edge: str, num_streams: int, seconds: float) -> RouterRow:
    description = locate_model(str(model), loads_weights=False)
    words = Words(Tokenizer.load(model), description.vocab_size)
    with _router(model, num_connections=num_streams if edge == "sse" else 0) as router:
        meter = Meter(words)
        async with _workers(router, num_streams, words) as decodes:
            streams: Streams
            if edge == "grpc":
                streams = GrpcStreams(f"{LOOPBACK}:{router.grpc_port}", meter)
            else:
                streams = SseStreams(LOOPBACK, router.http_port, meter)
            try:
                await _open(streams, range(1), words)
                one_memory, one_cpu = router.memory_mib(), router.cpu_s()
                await _open(streams, range(1, num_streams), words)
                opened_cpu = router.cpu_s()
                full = await _saturate(router, decodes, meter, num_streams, seconds)
                memory = router.memory_mib()
                await _settle(decodes, meter, num_streams)
                half = await _pace(router, decodes, meter, num_streams, full.tokens_per_s / 2, seconds)
            finally:
                await streams.close()
    ordered = sorted(meter.latencies)
    has_many = num_streams >= _MANY
    return RouterRow(
        edge=edge,
        streams=num_streams,
        tokens_per_s=full.tokens_per_s,
        core_share=full.cpu_s / full.seconds,
        cpu_us_per_token=full.cpu_us_per_token,
        tokens_per_chunk=full.tokens_per_chunk,
        half_load_tokens_per_s=half.tokens_per_s,
        half_load_cpu_us_per_token=half.cpu_us_per_token,
        half_load_tokens_per_chunk=half.tokens_per_chunk,
        latency_ms_p50=1e3 * statistics.median(ordered),
        latency_ms_p99=1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        opening_cpu_ms_per_stream=1e3 * (opened_cpu - one_cpu) / num_streams if has_many else None,
        memory_mib=memory,
        memory_kib_per_stream=1024 * (memory - one_memory) / num_streams if has_many else None,
    )


# The router


@dataclass(frozen=True)
class _Router:
    process: psutil.Process
    grpc_port: int
    http_port: int
    internal_port: int
    model: str
    revision: str

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / 2**20


@contextmanager
def _router(model: Path, num_connections: int) -> Iterator[_Router]:
    """On a core of its own, where there are two."""
    _allow_files(num_connections + _SPARE_FILES)
    ports = claim({"--grpc-port": 0, "--http-port": 0, "--internal-port": 0})
    command = [sys.executable, "-P", "-m", "router", "--model", str(model)]
    for flag, value in {**ports, **_PATIENCE, **_BOUNDS}.items():
        command += [flag, str(value)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    cores = sorted(os.sched_getaffinity(0))
    try:
        process = psutil.Process(child.pid)
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[1:])
        state = _await_state(f"http://{LOOPBACK}:{ports['--http-port']}/cluster", child)
        if len(cores) > 1:
            _pin(process, cores[0])
        yield _Router(
            process,
            ports["--grpc-port"],
            ports["--http-port"],
            ports["--internal-port"],
            state["model"],
            state["revision"],
        )
    finally:
        os.sched_setaffinity(0, cores)
        child.kill()
        child.wait()


def _pin(process: psutil.Process, core: int) -> None:
    """All threads that it has; later ones inherit it."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def _await_state(url: str, child: subprocess.Popen[bytes]) -> dict[str, str]:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            state: dict[str, str] = httpx.get(url, trust_env=False).raise_for_status().json()
        except httpx.HTTPError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise Internal(f"the router did not start within {_READY_S:g} s") from None
            time.sleep(0.1)
        else:
            return state


def _allow_files(count: int) -> None:
    """Of this process and of those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))
    except (ValueError, OSError) as error:
        raise Internal(f"{count} open files are needed, {hard} are allowed: {error}") from error


@asynccontextmanager
async def _workers(router: _Router, num_streams: int, words: Words) -> AsyncIterator[list[FakeDecode]]:
    """One prefill worker, and decode workers for all streams."""
    target, first_id = f"{LOOPBACK}:{router.internal_port}", words.ids[0]
    num_decodes = -(-num_streams // _SEQS_PER_WORKER)
    decodes = [
        FakeDecode(f"decode-{index}", router.model, router.revision, _SEQS_PER_WORKER, first_id)
        for index in range(num_decodes)
    ]
    prefill = FakePrefill(router.model, router.revision, decodes, first_id)
    running = [asyncio.create_task(worker.run(target)) for worker in (*decodes, prefill)]
    try:
        async with asyncio.timeout(_READY_S):
            await asyncio.gather(*(worker.is_welcome.wait() for worker in (*decodes, prefill)))
            prefill.link()
            await asyncio.sleep(1.0)
        yield decodes
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


# The load


@dataclass(frozen=True)
class _Interval:
    seconds: float
    cpu_s: float
    num_tokens: int
    num_chunks: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.num_tokens

    @property
    def tokens_per_chunk(self) -> float:
        return self.num_tokens / self.num_chunks


@asynccontextmanager
async def _observed(router: _Router, meter: Meter) -> AsyncIterator[list[_Interval]]:
    """What the body does is one interval, which is in the list afterwards."""
    intervals: list[_Interval] = []
    began, cpu, tokens, chunks = time.perf_counter(), router.cpu_s(), meter.num_tokens, meter.num_chunks
    yield intervals
    seconds, cpu_s = time.perf_counter() - began, router.cpu_s() - cpu
    if meter.error is not None:
        raise Internal(f"a stream broke: {meter.error}")
    intervals.append(_Interval(seconds, cpu_s, meter.num_tokens - tokens, meter.num_chunks - chunks))


async def _open(streams: Streams, numbers: Sequence[int], words: Words) -> None:
    limit = asyncio.Semaphore(_OPENING_AT_ONCE)

    async def open_one(number: int) -> None:
        prompt = [words.ids[(number + index) % len(words.ids)] for index in range(_PROMPT_TOKENS)]
        async with limit:
            await streams.open(prompt)

    await asyncio.gather(*(open_one(number) for number in numbers))


async def _saturate(
    router: _Router, decodes: Sequence[FakeDecode], meter: Meter, num_streams: int, seconds: float
) -> _Interval:
    """Steps as fast as their tokens arrive, with so many on their way that the router never waits; however slow it is,
    for a token of each stream."""
    window = max(_LEAST_WINDOW, _WINDOW * num_streams)
    offset = _num_sent(decodes) - meter.num_tokens
    turns = itertools.cycle(decodes)

    async def feed(until: float) -> None:
        enough = meter.num_tokens + num_streams
        while (time.perf_counter() < until or meter.num_tokens < enough) and meter.error is None:
            while _num_sent(decodes) - meter.num_tokens - offset < window:
                next(turns).step(meter.next_word())
            await asyncio.sleep(0)

    async with asyncio.timeout(_READY_S + 2 * seconds):
        await feed(time.perf_counter() + seconds / 4)
        async with _observed(router, meter) as intervals:
            await feed(time.perf_counter() + seconds)
    return intervals[0]


async def _settle(decodes: Sequence[FakeDecode], meter: Meter, num_streams: int) -> None:
    """Until everything that was sent has arrived; every stream's first token was prefill's."""
    async with asyncio.timeout(_READY_S):
        while meter.num_tokens < _num_sent(decodes) + num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _pace(
    router: _Router,
    decodes: Sequence[FakeDecode],
    meter: Meter,
    num_streams: int,
    tokens_per_s: float,
    seconds: float,
) -> _Interval:
    """Every worker's steps at the same distance, one worker after another, and each at least once."""
    meter.is_noting = True
    interval = sum(decode.num_running for decode in decodes) / tokens_per_s / len(decodes)
    async with _observed(router, meter) as intervals:
        began = time.perf_counter()
        for number, decode in enumerate(itertools.cycle(decodes)):
            due = began + number * interval
            if (due > began + seconds and number >= len(decodes)) or meter.error is not None:
                break
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            decode.step(meter.next_word())
        await _settle(decodes, meter, num_streams)
    return intervals[0]


def _num_sent(decodes: Sequence[FakeDecode]) -> int:
    return sum(decode.num_sent for decode in decodes)
