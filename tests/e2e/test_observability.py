"""Prometheus does not find a replica, or a panel of the dashboard stays empty."""

import contextlib
import itertools
import math
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitserve import Client
from splitserve.service.errors import DeadlineExceeded
from tests.deploy.test_observability import FOLDER, queries_of_alerts, queries_of_panels
from tests.e2e.project import OBSERVABILITY, Project, eventually
from tests.e2e.prometheus import ask, find_prometheus
from tests.e2e.streams import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PATIENCES = itertools.cycle((0.2, 0.4, 0.8, 1.6))
TARGETS = {("router", "up"): 1, ("prefill", "up"): 1, ("decode", "up"): 2}


@pytest.fixture
def observed(cluster: Project) -> Iterator[Project]:
    """The cluster beside a Prometheus that has found every process of it."""
    if reason := find_prometheus(cluster.prometheus):
        pytest.skip(reason)
    cluster.compose("build", "prometheus", also=OBSERVABILITY)
    cluster.compose("up", "--detach", "--no-build", "--no-deps", "prometheus", also=OBSERVABILITY)
    try:
        eventually("Prometheus has found every process", lambda: targets(cluster) == TARGETS)
        yield cluster
    finally:
        cluster.compose("rm", "--stop", "--force", "prometheus", also=OBSERVABILITY)


def targets(project: Project) -> dict[tuple[str, str], int]:
    """Number of targets by job and health."""
    try:
        found = ask(project, "/api/v1/targets")["activeTargets"]
    except AssertionError:  # it does not listen yet
        return {}
    return Counter((target["labels"]["job"], target["health"]) for target in found)


def say(client: Client) -> str:
    return client.generate("The weather in the mountains", max_tokens=24, temperature=0, ignore_eos=True).text


def give_up(client: Client) -> str:
    """Its deadline passes while blocks travel, or about then."""
    prompt = f"{uuid.uuid4()} " + "and then the ships came back to the harbour " * 50
    with contextlib.suppress(DeadlineExceeded):
        client.generate(prompt, max_tokens=1, timeout=next(PATIENCES))
    return ""


def empty(project: Project) -> list[str]:
    """Queries of panels that have no value. What stands in for values that are not there yet is none."""
    queries = {query.removesuffix(" or vector(0)") for queries in queries_of_panels().values() for query in queries}
    return [query for query in sorted(queries) if not has_value(project, query.replace("$__rate_interval", "1m"))]


def has_value(project: Project, query: str) -> bool:
    """Prometheus divides by 0, and has quantiles of nothing: the result is no number then."""
    return any(math.isfinite(float(sample["value"][1])) for sample in ask(project, "/api/v1/query", query)["result"])


def test_replica_is_not_found_or_a_panel_is_empty(observed: Project) -> None:
    with Load(observed, say), Load(observed, give_up, 1):
        eventually("every panel has data", lambda: empty(observed) == [])
    groups: list[dict[str, Any]] = ask(observed, "/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    eventually("every alert was looked at", lambda: all(health != "unknown" for health in healths(observed)))
    assert {rule["name"] for rule in rules} == queries_of_alerts().keys()
    assert set(healths(observed)) == {"ok"}


def healths(project: Project) -> list[str]:
    return [rule["health"] for group in ask(project, "/api/v1/rules")["groups"] for rule in group["rules"]]


def test_process_that_is_gone_raises_no_alert(programs: Path, tmp_path: Path) -> None:
    """No target is left that could be silent. A replica that goes at minute 20, and then the whole role."""
    if reason := find_prometheus(programs):
        pytest.skip(reason)
    hour, third = "1+0x720", "1+0x240 stale"
    lives = {("router", "r"): hour, ("prefill", "p"): third, ("decode", "d1"): hour, ("decode", "d2"): third}
    expected = {"15m": [], "22m": ["prefill", "decode"], "45m": ["prefill"]}
    case = {
        "interval": "5s",
        "input_series": [
            {"series": f'up{{job="{job}", instance="{instance}"}}', "values": values}
            for (job, instance), values in lives.items()
        ],
        "alert_rule_test": [
            {"eval_time": time, "alertname": "SplitserveProcessGone", "exp_alerts": [alert(job) for job in jobs]}
            for time, jobs in expected.items()
        ],
    }
    path = tmp_path / "alerts.test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [case]}))
    done = subprocess.run([programs / "promtool", "test", "rules", path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def alert(job: str) -> dict[str, Any]:
    summary = f"{job}: fewer processes than ten minutes ago, or none"
    return {"exp_labels": {"job": job}, "exp_annotations": {"summary": summary}}
