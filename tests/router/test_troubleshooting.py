"""Names in docs/troubleshooting.md that a reader would look for in vain."""

import dataclasses
import re
from pathlib import Path

from router.config import RouterConfig
from router.stages import Stage
from splitserve.worker.config import WorkerConfig
from tests.known_metrics import families

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "troubleshooting.md").read_text()


def test_flag_does_not_exist() -> None:
    fields = {field.name for config in (RouterConfig, WorkerConfig) for field in dataclasses.fields(config)}
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", TEXT)}
    assert len(named) > 10
    assert named <= fields


def test_metric_does_not_exist() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"`(splitserve_[a-z_]+)", TEXT)}
    assert len(named) > 15
    assert named <= families().keys()


def test_stage_is_not_explained() -> None:
    for stage in Stage:
        assert f"`{stage}_s`" in TEXT
        assert f"`{stage}_s`" in (DOCS / "api.md").read_text()
