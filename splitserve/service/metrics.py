"""What router and workers measure alike: buckets, the worker's own metrics, and how a registry becomes a page.

Names and units follow vLLM's with our prefix. Each process makes one registry in its composition root and hands it
down; nothing is registered globally, so tests and several services in one process do not meet.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST

TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
INTER_TOKEN_LATENCY_BUCKETS = (
    0.0025,
    0.005,
    0.01,
    0.015,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
REQUEST_TIME_BUCKETS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
STAGE_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TRANSFER_TIME_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

STEP_SEQUENCES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEP_PROMPT_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own memory, processor time and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The page of `/metrics`, of type `CONTENT_TYPE`."""
    return generate_latest(registry)


class WorkerMetrics:
    """One worker's metrics. Not locked by us: prometheus-client's own values are safe from any thread."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        running = Gauge(
            "splitserve_num_requests_running", "Sequences in the running batch.", ["model"], registry=registry
        )
        waiting = Gauge(
            "splitserve_num_requests_waiting", "Sequences accepted and not yet running.", ["model"], registry=registry
        )
        usage = Gauge(
            "splitserve_kv_cache_usage_perc",
            "Share of KV blocks in use or reserved; 1 is full.",
            ["model"],
            registry=registry,
        )
        prompt_tokens = Counter(
            "splitserve_prompt_tokens", "Prompt tokens computed by this worker.", ["model"], registry=registry
        )
        generation_tokens = Counter(
            "splitserve_generation_tokens", "Output tokens sampled by this worker.", ["model"], registry=registry
        )
        queries = Counter(
            "splitserve_prefix_cache_queries",
            "Tokens looked up in this worker's prefix cache.",
            ["model"],
            registry=registry,
        )
        hits = Counter("splitserve_prefix_cache_hits", "Tokens found there.", ["model"], registry=registry)
        self._running, self._waiting, self._usage = running.labels(model), waiting.labels(model), usage.labels(model)
        self._prompt_tokens, self._generation_tokens = prompt_tokens.labels(model), generation_tokens.labels(model)
        self._cache_queries, self._cache_hits = queries.labels(model), hits.labels(model)
        self._transfer_bytes = Counter(
            "splitserve_kv_transfer_bytes",
            "Bytes of KV blocks in completed transfers.",
            ["model", "transport", "side"],
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            "splitserve_kv_transfer_seconds",
            "From the first block handed over to the last one acknowledged or verified.",
            ["model", "transport", "side"],
            buckets=TRANSFER_TIME_BUCKETS,
            registry=registry,
        )
        self._transfer_failures = Counter(
            "splitserve_kv_transfer_failures",
            "Transfers that ended without success.",
            ["model", "transport", "side", "reason"],
            registry=registry,
        )
        self._transport_fallbacks = Counter(
            "splitserve_kv_transport_fallbacks",
            "Links that use another transport than the first one asked for.",
            ["model", "wanted", "used"],
            registry=registry,
        )
        self._kv_messages_dropped = Counter(
            "splitserve_kv_messages_dropped",
            "Late, repeated and unknown messages of KV transfers.",
            ["model"],
            registry=registry,
        ).labels(model)
        self._num_kv_messages_dropped = 0
        self._ignored = Counter(
            "splitserve_messages_ignored",
            "Commands that came late or again and changed nothing.",
            ["model", "kind"],
            registry=registry,
        )
        self._startup_seconds = Gauge(
            "splitserve_startup_seconds", "Time that a part of the start took.", ["model", "part"], registry=registry
        )
        self._memory_bytes = Gauge(
            "splitserve_memory_bytes",
            "Size of the weights as in the files, of the linear layers' packed weights, and of the KV pool.",
            ["model", "kind"],
            registry=registry,
        )

    def set_start(self, part_seconds: Mapping[str, float], memory_nbytes: Mapping[str, int]) -> None:
        """The parts of the start and what is in memory since."""
        for part, seconds in part_seconds.items():
            self._startup_seconds.labels(self._model, part).set(seconds)
        for kind, nbytes in memory_nbytes.items():
            self._memory_bytes.labels(self._model, kind).set(nbytes)

    def set_load(self, *, running: int, waiting: int, blocks_taken: int, blocks_total: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(blocks_taken / blocks_total if blocks_total else 0.0)

    def count_prompt_tokens(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_generation_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def count_cache_lookup(self, *, num_tokens: int, num_cached_tokens: int) -> None:
        self._cache_queries.inc(num_tokens)
        self._cache_hits.inc(num_cached_tokens)

    def set_kv_messages_dropped(self, total: int) -> None:
        """Since the start of the worker."""
        self._kv_messages_dropped.inc(total - self._num_kv_messages_dropped)
        self._num_kv_messages_dropped = total

    def count_ignored(self, kind: str) -> None:
        """`kind` is the command's name."""
        self._ignored.labels(self._model, kind).inc()

    def count_transfer(self, *, transport: str, side: str, num_bytes: int, seconds: float) -> None:
        """One completed transfer; `side` is "source" or "sink", `transport` what its blocks travelled by."""
        self._transfer_bytes.labels(self._model, transport, side).inc(num_bytes)
        self._transfer_seconds.labels(self._model, transport, side).observe(seconds)

    def count_transfer_failure(self, *, transport: str, side: str, reason: str) -> None:
        self._transfer_failures.labels(self._model, transport, side, reason).inc()

    def count_transport_fallback(self, *, wanted: str, used: str) -> None:
        """One link was made."""
        self._transport_fallbacks.labels(self._model, wanted, used).inc()


class StepMetrics:
    """How busy a worker's engine is, how large its steps are, and how full its blocks. Thread-safe, as above."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        busy = Counter(
            "splitserve_worker_busy_seconds",
            "Time that the engine was computing steps; its rate is the share of time that it is busy.",
            ["model"],
            registry=registry,
        )
        floor = Counter(
            "splitserve_worker_floor_seconds",
            "The least time that those steps could take on this machine: rate(splitserve_worker_busy_seconds_total) / "
            "rate(splitserve_worker_floor_seconds_total) says how many times that they took.",
            ["model"],
            registry=registry,
        )
        sequences = Histogram(
            "splitserve_step_num_sequences",
            "Sequences that got their next token in one step, of the steps that had any.",
            ["model"],
            buckets=STEP_SEQUENCES_BUCKETS,
            registry=registry,
        )
        prompt_tokens = Histogram(
            "splitserve_step_num_prompt_tokens",
            "Tokens of prompts computed in one step, of the steps that had any.",
            ["model"],
            buckets=STEP_PROMPT_TOKENS_BUCKETS,
            registry=registry,
        )
        fragmentation = Gauge(
            "splitserve_kv_cache_fragmentation_perc",
            "Share of the room in blocks in use or reserved that is no token's; 0 is none.",
            ["model"],
            registry=registry,
        )
        self._busy, self._floor = busy.labels(model), floor.labels(model)
        self._fragmentation = fragmentation.labels(model)
        self._sequences, self._prompt_tokens = sequences.labels(model), prompt_tokens.labels(model)

    def count_step(self, seconds: float, floor_s: float, num_sequences: int, num_prompt_tokens: int) -> None:
        self._busy.inc(seconds)
        self._floor.inc(floor_s)
        if num_sequences:
            self._sequences.observe(num_sequences)
        if num_prompt_tokens:
            self._prompt_tokens.observe(num_prompt_tokens)

    def set_slots(self, *, taken: int, empty: int) -> None:
        """Tokens that the blocks in use or reserved have room for, and how much of that is no token's."""
        self._fragmentation.set(empty / taken if taken else 0.0)
