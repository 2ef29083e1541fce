"""A dashboard or an alert that asks for something that nobody measures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.known_metrics import series

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"


def load(name: str) -> Any:
    text = (FOLDER / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def queries_of_panels() -> dict[str, list[str]]:
    """By the panel's title, which is its only one."""
    panels = [panel for panel in load("dashboard.json")["panels"] if panel["type"] != "row"]
    queries = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}
    assert len(queries) == len(panels)
    return queries


def queries_of_alerts() -> dict[str, list[str]]:
    return {rule["alert"]: [rule["expr"]] for group in load("alerts.yaml")["groups"] for rule in group["rules"]}


QUERIES = queries_of_panels() | queries_of_alerts()


@pytest.mark.parametrize("title", QUERIES)
def test_query_asks_for_what_nobody_measures(title: str) -> None:
    for query in QUERIES[title]:
        assert query.count("(") == query.count(")")
        asked = set(re.findall(r"\bsplitserve_\w+", query))
        assert asked <= series(), query
        assert asked or re.search(r"\bup\b", query), query


def test_query_asks_a_job_that_does_not_exist() -> None:
    """The router and the workers have metrics of the same names and other meanings, told apart by the job."""
    jobs = {job["job_name"] for job in load("prometheus.yaml")["scrape_configs"]}
    assert jobs == {"router", "prefill", "decode"}
    text = "\n".join(query for queries in QUERIES.values() for query in queries)
    asked = {job for jobs in re.findall(r'job!?=~?"([^"]*)"', text) for job in jobs.split("|")}
    assert asked == jobs


def test_panel_misses_its_data_source() -> None:
    (source,) = load("datasource.yaml")["datasources"]
    dashboard = load("dashboard.json")
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"}
    assert used == {source["uid"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_file_is_not_mounted_or_does_not_exist() -> None:
    services = yaml.safe_load((ROOT / "compose.observability.yaml").read_text(encoding="utf-8"))["services"]
    mounted = {
        volume.partition(":")[0]
        for service in services.values()
        for volume in service["volumes"]
        if volume.startswith("./")
    }
    assert {ROOT / path for path in mounted} == set(FOLDER.iterdir())
