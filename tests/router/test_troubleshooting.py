"""Names in docs/troubleshooting.md that a reader would look for in vain."""

import dataclasses
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.stages import Stage
from splitserve.service import metrics as worker_metrics
from splitserve.worker.config import WorkerConfig

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "troubleshooting.md").read_text()


def test_flag_does_not_exist() -> None:
    fields = {field.name for config in (RouterConfig, WorkerConfig) for field in dataclasses.fields(config)}
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", TEXT)}
    assert len(named) > 10
    assert named <= fields


def test_metric_does_not_exist() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "tiny")
    metrics.watch_load(running=lambda: 0.0, waiting=lambda: 0.0, kv_cache_usage=lambda: 0.0, token_pause=lambda: 0.0)
    known = {metric.name for metric in registry.collect()}
    known |= set(re.findall(r'"(splitserve_[a-z_]+)"', Path(worker_metrics.__file__).read_text()))
    named = {name.removesuffix("_total") for name in re.findall(r"`(splitserve_[a-z_]+)", TEXT)}
    assert len(named) > 15
    assert named <= known


def test_stage_is_not_explained() -> None:
    for stage in Stage:
        assert f"`{stage}_s`" in TEXT
        assert f"`{stage}_s`" in (DOCS / "api.md").read_text()
