"""The metrics that a router and a worker have, as a page of theirs names them."""

from prometheus_client import CollectorRegistry

from router.metrics import RouterMetrics
from splitserve.service.metrics import StepMetrics, WorkerMetrics, new_registry

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def families() -> dict[str, str]:
    """From the names without suffixes to "counter", "gauge" or "histogram"."""
    router, worker = CollectorRegistry(), new_registry()
    metrics = RouterMetrics(router, "tiny")
    metrics.watch_load(running=lambda: 0.0, waiting=lambda: 0.0, kv_cache_usage=lambda: 0.0, token_pause=lambda: 0.0)
    WorkerMetrics(worker, "tiny")
    StepMetrics(worker, "tiny")
    return {metric.name: metric.type for registry in (router, worker) for metric in registry.collect()}


def series() -> set[str]:
    """The names that a query can ask for."""
    return {name + suffix for name, kind in families().items() for suffix in _SUFFIXES.get(kind, ("",))}
