"""Prometheus' alerts over what the service itself exported: pages before and during a fault become the series of a unit
test of ``promtool``. Decides nothing about what must fire.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Mapping

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
UNPACKED = ROOT / "build" / "promtool" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if os.access(UNPACKED, os.X_OK) else None)
MISSING = "promtool is not there: `make nightly-alerts` fetches it where apt can"
FAULT_AT_M, END_M = 5, 30
"""Minutes of a test: when what was scraped last begins to hold, and how long it does."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, bool]]
"""By name and labels: the value, and whether it is a counter's."""


def samples(page: str, job: str) -> Samples:
    """Of one scrape."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if not one.name.endswith("_created"):
                labels = {**one.labels, "job": job, "instance": f"{job}:8000"}
                is_counter = family.type in ("counter", "histogram")
                found[one.name, tuple(sorted(labels.items()))] = (one.value, is_counter)
    return found


def series(before: Samples, after: Samples) -> list[dict[str, str]]:
    """What was scraped first, for some minutes, then what was scraped last: a counter grows in each minute by what it
    grew between the two, a gauge stays. A series that is gone at the end is left out. The clock of promtool begins at
    0: that is now."""
    lines = []
    scraped_s = time.time()
    for (name, labels), (value, is_counter) in after.items():
        was = before.get((name, labels), (0.0 if is_counter else value, is_counter))[0]
        if name.endswith("_timestamp_seconds"):
            value, was = (one - scraped_s if one else one for one in (value, was))
        shown = ",".join(f"{label}={json.dumps(text)}" for label, text in labels)
        more = f"{value}+{value - was}x{END_M}" if is_counter else f"{value}x{END_M}"
        lines.append({"series": f"{name}{{{shown}}}", "values": f"{was}x{FAULT_AT_M - 1} {more}"})
    return lines


def firing(
    pages: Mapping[str, tuple[str, str]], alerts: set[str], directory: pathlib.Path
) -> tuple[set[str], set[str]]:
    """Which ``alerts`` fire before the fault and which at the end, as promtool says, over pages (before, after) of each
    job."""
    lines = [
        line for job, (before, after) in pages.items() for line in series(samples(before, job), samples(after, job))
    ]
    return (
        {name for name in alerts if is_firing(name, f"{FAULT_AT_M - 1}m", lines, directory)},
        {name for name in alerts if is_firing(name, f"{FAULT_AT_M + END_M - 1}m", lines, directory)},
    )


def is_firing(alert: str, at: str, lines: list[dict[str, str]], directory: pathlib.Path) -> bool:
    """Whether promtool passes a test that says so. It must fail or pass, and nothing else."""
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0'
    asked = {"expr": expr, "eval_time": at, "exp_samples": [{"labels": "{}", "value": 1}]}
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [{"interval": "1m", "input_series": lines, "promql_expr_test": [asked]}],
    }
    path = directory / f"{alert}.yaml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in said, said
    return done.returncode == 0


def alerts() -> dict[str, dict[str, str]]:
    """By name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}
