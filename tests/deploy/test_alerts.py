"""The alerts, read: each metric, label and value that they name is exported, and each has its words in the docs. That
each fires over a running service is in ``test_alerts_fire.py``.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from kvxfer.errors import KvxferError
from kvxfer.policy.place import PlaceReason
from kvxfer.router.fleet.facts import EngineLoad, read_metrics
from kvxfer.router.metrics import RequestOutcome
from tests.support.alerts import RULES, alerts
from tests.support.helm.chart import MISSING, PYTHON

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALERTS = alerts()
OF_PROMETHEUS = {"namespace", "job", "instance"}
OF_ENGINES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "queued",
    "sglang:num_running_reqs": "running",
}
"""Metrics that are the engines' own: what the router reads of them."""


def codes(kind: type[KvxferError]) -> set[str]:
    return {kind.code, *(code for one in kind.__subclasses__() for code in codes(one))}


OUTCOMES = {"committed", *codes(KvxferError)}
VALUES: dict[tuple[str, str], set[str]] = {
    ("kvxfer_router_placements_total", "reason"): {str(one) for one in PlaceReason},
    ("kvxfer_router_requests_total", "outcome"): set(RequestOutcome),
    ("kvxfer_transfers_total", "outcome"): OUTCOMES,
    ("vllm:kvxfer_loads_total", "outcome"): OUTCOMES,
    ("sglang:kvxfer_loads_total", "outcome"): OUTCOMES,
}
"""Values that a label may have; of the others docs/metrics.md lists them."""
every_alert = pytest.mark.parametrize("name", ALERTS)


def told() -> dict[str, tuple[set[str], str]]:
    """Labels and text of each metric in docs/metrics.md, which tests/tidy compares with what is exported."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([a-z:_]+)` \| \w+ \|([^|]*)\| (.+) \|$", page, re.MULTILINE)
    return {name: (set(re.findall(r"`(\w+)`", labels)), text) for name, labels, text in rows}


TOLD = told()


def named(expr: str) -> list[tuple[str, str]]:
    """Metrics of a query, each with what stands in its braces."""
    return re.findall(r"\b((?:vllm:|sglang:)?[a-z]+_[a-z_]+)\b(?:\{([^}]*)\})?(?=[\[\s)]|$|\{)", expr)


@every_alert
def test_what_an_alert_names_is_exported(name: str) -> None:
    expr = ALERTS[name]["expr"]
    metrics = [(metric, braces) for metric, braces in named(expr) if metric not in OF_PROMETHEUS]
    assert metrics
    for metric, braces in metrics:
        if metric in OF_ENGINES:
            assert read_metrics(f"{metric} 3\n{_running(metric)} 3\n".encode()) == EngineLoad(
                **{"running": 3, OF_ENGINES[metric]: 3}
            )
            continue
        labels, text = TOLD[metric]
        for label, value in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', braces):
            assert label in labels
            values = VALUES.get((metric, label))
            for one in value.split("|"):
                assert f"`{one}`" in text if values is None else one in values


def _running(metric: str) -> str:
    """Without it a page is not that of an engine."""
    return "vllm:num_requests_running" if metric == "vllm:num_requests_waiting" else f"# {metric}"


@every_alert
def test_an_alert_says_what_is_wrong_and_the_docs_what_to_do(name: str) -> None:
    rule: dict[str, Any] = ALERTS[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".")
    assert f"| `{name}` |" in (ROOT / "docs" / "kubernetes.md").read_text()


def test_prometheus_of_the_compose_file_reads_them() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert [(ROOT / "deploy" / path).resolve() for path in config["rule_files"]] == [RULES]


@pytest.mark.deep
@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
def test_the_queries_are_promql() -> None:
    code = "import promql_parser, sys; [promql_parser.parse(one) for one in sys.argv[1:]]"
    queries = [alert["expr"] for alert in ALERTS.values()]
    done = subprocess.run([str(PYTHON), "-c", code, *queries], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
