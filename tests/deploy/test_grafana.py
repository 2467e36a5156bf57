"""The dashboard and what is beside it: every metric, label and value that a query names is exported by the router."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from kvxfer.policy.health import HealthEvent
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.metrics import RequestOutcome, RouterMetrics
from kvxfer.router.upstream import UpstreamCounters
from tests.support.fleet import stock

pytestmark = pytest.mark.checkout

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvxfer-router.json").read_text())
FIXED = {"outcome": set(RequestOutcome), "result": set(HealthEvent), "which": {"all", "presumed", "cached"}}
"""Labels whose values a query may name."""
NOT_SHOWN: set[str] = set()
"""Metrics without a panel."""
OF_PROMETHEUS = {"job", "instance", "le"}
WORDS = {
    *("sum", "min", "max", "count", "by", "rate", "increase", "histogram_quantile", "label_values"),
    "__rate_interval",
}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    variables = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return [*(target["expr"] for panel in panels() for target in panel["targets"]), *variables]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of every series, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        return dict(series(patch))


def series(patch: pytest.MonkeyPatch) -> Iterator[tuple[str, set[str]]]:
    workers = Workers()
    workers.is_connected = True
    workers.replace("flags", [stock("d")])
    patch.setattr(workers, "inflight", lambda: {("d", "decode"): 1})
    patch.setattr(workers, "connections", lambda: {"10.0.0.1:8000": UpstreamCounters()})
    for counts in (workers.counters.ejections, workers.counters.probes, workers.counters.pair_ejections):
        workers.counters.add(counts, "d", "lost")
    registry = RouterMetrics(workers).registry
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase) and collector._labelnames and not collector._metrics:
            collector.labels(*collector._labelnames)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    yield from labels.items()


def selectors(query: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Each series that a query selects: its name, and what its labels must be."""
    for name, text in re.findall(r"(kvxfer_\w+)(?:\{([^}]*)\})?", query):
        found = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', text)
        assert len(found) == text.count('"') // 2, text
        yield name, {label: (how, value) for label, how, value in found}


@pytest.mark.parametrize("query", queries())
def test_every_metric_and_label_of_a_query_is_exported(query: str, exported: dict[str, set[str]]) -> None:
    selected = dict(selectors(query))
    assert selected
    for name, wanted in selected.items():
        assert name in exported, name
        assert set(wanted) <= exported[name] | OF_PROMETHEUS
        for label, (_, value) in wanted.items():
            if label not in OF_PROMETHEUS:
                assert set(value.split("|")) <= FIXED[label]
    labels = set.intersection(*(exported[name] for name in selected)) | OF_PROMETHEUS
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        assert {label.strip() for label in grouping.split(",")} <= labels
    rest = re.sub(r'"[^"]*"', "", query)
    known = WORDS | set(selected) | labels | {label for wanted in selected.values() for label in wanted}
    assert set(re.findall(r"[A-Za-z_]\w*", rest)) <= known, query


@pytest.mark.parametrize("query", queries())
def test_a_counter_is_only_read_as_a_rate_and_brackets_are_closed(query: str) -> None:
    for opened, closed in ("()", "{}", "[]"):
        assert query.count(opened) == query.count(closed)
    for name in re.findall(r"kvxfer_\w+(?:_total|_bucket|_sum|_count)", query):
        assert re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", query), query


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_legend_names_labels_that_its_query_keeps(panel: dict[str, Any], exported: dict[str, set[str]]) -> None:
    for target in panel["targets"]:
        kept = {
            label.strip() for grouping in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in grouping.split(",")
        }
        if " by " not in target["expr"] and not re.match(r"(sum|min|max|count)\(", target["expr"]):
            kept = OF_PROMETHEUS | exported[next(selectors(target["expr"]))[0]]
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_it_shows_every_metric_of_the_router(exported: dict[str, set[str]]) -> None:
    shown = {name for query in queries() for name, _ in selectors(query)}
    bases = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in exported if name.startswith("kvxfer_")}
    assert bases - NOT_SHOWN == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}


def test_grafana_can_load_it() -> None:
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert "__inputs" not in DASHBOARD
    names = [one["name"] for one in DASHBOARD["templating"]["list"]]
    assert names[0] == "datasource"
    assert len(set(names)) == len(names)
    everything = DASHBOARD["panels"]
    numbers = [panel["id"] for panel in everything]
    assert len(set(numbers)) == len(numbers)
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        assert all(target["datasource"] == panel["datasource"] and target["expr"] for target in panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == set(names)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        taken |= cells


def test_what_is_provisioned_fits_together() -> None:
    read = {path.name: yaml.safe_load(path.read_text()) for path in (DEPLOY / "grafana").rglob("*.yaml")}
    (provider,) = read["kvxfer.yaml"]["providers"]
    page = (DEPLOY / "grafana" / "README.md").read_text()
    assert f"`{provider['options']['path']}/`" in page
    (source,) = read["prometheus.yaml"]["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] in page
    scraping = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scraping["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    targets = [
        target for job in scraping["scrape_configs"] for one in job["static_configs"] for target in one["targets"]
    ]
    for target in targets:
        host, _, port = target.partition(":")
        assert f"--port={port}" in services[host]["command"]
