"""benchmarks/load_driver.py: that it judges by its bars, and runs."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
GOOD = {"failed": 0, "per_core_s": 1200.0, "late_p99_ms": 1.0, "ttft_p50_ms": 20.0, "sent_due": [1.0, 0.997]}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"failed": 1}, ["failed"]),
        ({"per_core_s": 999.0}, ["requests/s a core"]),
        ({"late_p99_ms": 2.1}, ["lateness"]),
        ({"late_p99_ms": 2.1, "ttft_p50_ms": 200.0}, []),
        ({"sent_due": [1.0, 0.994]}, ["sent/due"]),
        ({"sent_due": [1.006]}, ["sent/due"]),
    ],
)
def test_bars(changed: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        assert importlib.import_module("load_driver").misses(GOOD | changed) == expected
    finally:
        for name in ("load_driver", "driver", "driver.others"):
            sys.modules.pop(name, None)


@pytest.mark.nightly
def test_it_runs(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--seconds=2", "--rate=100", f"--json={file}"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "load_driver.py"), *words], capture_output=True, timeout=200
    )
    assert done.returncode in (0, 1), done.stderr.decode()  # a bar may be missed on a busy machine
    rows = json.loads(file.read_text())["rows"]
    assert {"paced, poisson", "paced, gamma", "at once, poisson", "at once, gamma"} <= set(rows)
    assert all(row["failed"] == 0 and row["requests"] > 50 for row in rows.values())
