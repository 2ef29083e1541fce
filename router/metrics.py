"""What the router measures: one record per request, stage times and attempts, load read at the moment of the scrape.

`serving` opens a `RequestRecord` per request and ends it exactly once; `flow` and `attempt` tell its stages. All of it
belongs to the event loop's thread.
"""

import time
from collections.abc import Callable
from enum import StrEnum

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.stages import Stage, StageClock
from splitserve.service.metrics import (
    INTER_TOKEN_LATENCY_BUCKETS,
    REQUEST_TIME_BUCKETS,
    STAGE_TIME_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
)

_log = structlog.get_logger(__name__)


class Outcome(StrEnum):
    """How a request ended. Each request has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REJECTED = "rejected"  # refused before it cost a worker anything, or together with another prompt that was
    FAILED = "failed"


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self._registry = registry
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one sample.", INTER_TOKEN_LATENCY_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the outcome.", REQUEST_TIME_BUCKETS
        )
        self._stages = {
            stage: self._histogram(
                f"request_{stage}_time_seconds", f"One stay of a request in the {stage} stage.", STAGE_TIME_BUCKETS
            )
            for stage in Stage
        }
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens of all requests.")
        requests = Counter("splitserve_requests", "Ended requests.", ["outcome", "model"], registry=registry)
        # Every outcome exists from the start, so that a rate over a rare one has a first point.
        self._requests = {outcome: requests.labels(outcome, model) for outcome in Outcome}
        self._ignored = Counter(
            "splitserve_messages_ignored",
            "Words of workers about no attempt of this router: late ones, or said again.",
            ["kind", "model"],
            registry=registry,
        )
        self._attempts = Counter(
            "splitserve_attempts",
            "Attempts started, by what made them necessary.",
            ["reason", "model"],
            registry=registry,
        )

        self._local_prefills = self._counter(
            "local_prefills", "Prompts that decode workers took to compute themselves."
        )
        self._renewals = Counter(
            "splitserve_ticket_renewals",
            "Reservations that were kept for another prefill worker, by how the one before was lost.",
            ["reason", "model"],
            registry=registry,
        )

    def begin(self, request_id: str = "") -> "RequestRecord":
        """`request_id` is the client's own name for the request, for the log."""
        return RequestRecord(self, request_id)

    def count_request(self, outcome: Outcome) -> None:
        self._requests[outcome].inc()

    def count_attempt(self, reason: str) -> None:
        """`reason` is a word of a small fixed set: "first", or why the attempt before it ended."""
        self._attempts.labels(reason, self._model).inc()

    def count_ignored(self, kind: str) -> None:
        """`kind` names a message of `Join` that was about no attempt of this router."""
        self._ignored.labels(kind, self._model).inc()

    def count_local_prefill(self) -> None:
        self._local_prefills.inc()

    def count_renewal(self, reason: str) -> None:
        """`reason` is a word of the same set as those of attempts."""
        self._renewals.labels(reason, self._model).inc()

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        self._stages[stage].observe(seconds)

    def watch_load(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        kv_cache_usage: Callable[[], float],
        token_pause: Callable[[], float],
    ) -> None:
        """Reads these at every scrape: a gauge that is never written cannot drift from the truth."""
        self._gauge(
            "num_requests_running", "Requests that have workers; one whose samples go on apart counts for each part."
        ).set_function(running)
        self._gauge("num_requests_waiting", "Requests, or parts of them, in the router's queue.").set_function(waiting)
        self._gauge(
            "token_pause_seconds", "How long tokens wait for others to share a chunk; above 0 under overload."
        ).set_function(token_pause)
        self._gauge(
            "kv_cache_usage_perc", "Share of all workers' KV blocks in use or reserved; 1 is full."
        ).set_function(kv_cache_usage)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"splitserve_{name}", text, ["model"], buckets=buckets, registry=self._registry)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"splitserve_{name}", text, ["model"], registry=self._registry).labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"splitserve_{name}", text, ["model"], registry=self._registry).labels(self._model)


class RequestRecord:
    """One request's times, `stages` among them. `end` counts and logs its outcome; a second call is our mistake."""

    def __init__(self, metrics: RouterMetrics, request_id: str) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._arrival = time.perf_counter()
        self.stages = StageClock(metrics.observe_stage, time.perf_counter)
        self._last_token: dict[int, float] = {}
        self._outcome: Outcome | None = None
        self.is_refused = False

    def refuse(self) -> None:
        """The cluster had no room or no workers for the request: it cost no attempt, so it did not fail."""
        self.is_refused = True

    def admit(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def token(self, sample: int) -> None:
        now = time.perf_counter()
        before = self._last_token.get(sample)
        if before is not None:
            self._metrics.inter_token_latency.observe(now - before)
        elif not self._last_token:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last_token[sample] = now
        self._num_tokens += 1
        self._metrics.generation_tokens.inc()

    def end(self, outcome: Outcome) -> None:
        assert self._outcome is None, f"a request ended as {self._outcome} and again as {outcome}"
        self._outcome = outcome
        self.stages.end()
        seconds = time.perf_counter() - self._arrival
        self._metrics.count_request(outcome)
        self._metrics.e2e_request_latency.observe(seconds)
        _log.info(
            "request ended",
            request_id=self._request_id,
            outcome=outcome.value,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            seconds=round(seconds, 3),
        )
