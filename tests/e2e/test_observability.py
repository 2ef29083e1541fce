"""Prometheus does not find a replica, or a panel of the dashboard stays empty."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from splitserve import Client
from tests.deploy.test_observability import queries_of_alerts, queries_of_panels
from tests.e2e.project import OBSERVABILITY, Project, eventually
from tests.e2e.prometheus import ask, find_prometheus
from tests.e2e.streams import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

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


def empty(project: Project) -> list[str]:
    """Queries of panels that have no data."""
    queries = {query.replace("$__rate_interval", "1m") for queries in queries_of_panels().values() for query in queries}
    return [query for query in sorted(queries) if not ask(project, "/api/v1/query", query)["result"]]


def test_replica_is_not_found_or_a_panel_is_empty(observed: Project) -> None:
    with Load(observed, say):
        eventually("every panel has data", lambda: empty(observed) == [])
    groups: list[dict[str, Any]] = ask(observed, "/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    eventually("every alert was looked at", lambda: all(health != "unknown" for health in healths(observed)))
    assert {rule["name"] for rule in rules} == queries_of_alerts().keys()
    assert set(healths(observed)) == {"ok"}


def healths(project: Project) -> list[str]:
    return [rule["health"] for group in ask(project, "/api/v1/rules")["groups"] for rule in group["rules"]]
