"""The report of a run: figures with the machine, the commit and the command they belong to; JSON out and in.

It decides what a report holds. It must never know how it is shown.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

from measure.ends import HERE
from measure.rows import Comparison, Row, Spread


@dataclasses.dataclass
class Report:
    machine: dict[str, Any]
    command: str
    commit: str
    date: str
    pairs: int
    pool_bytes: int
    nbytes: int
    rows: list[Row] = dataclasses.field(default_factory=list)
    latency: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    post_cost: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    held_gil: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    idle_peers: dict[str, Any] = dataclasses.field(default_factory=dict)
    checksums: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    directions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    stripes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    """What was asked for and not measured, each with why."""
    seconds: float = 0.0
    sets: int = 1
    """Of processes, that the pairs of a row were taken from."""

    def write(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: pathlib.Path) -> Report:
        """Raises OSError, and ValueError, KeyError, TypeError for a file that is no report."""
        found = json.loads(path.read_text())
        rows = [_row(row) for row in found.pop("rows")]
        return cls(**found, rows=rows)


def _row(found: dict[str, Any]) -> Row:
    others = tuple(
        Comparison(**{**one, "gb_s": Spread(**one["gb_s"]), "ratio": Spread(**one["ratio"])})
        for one in found.pop("others")
    )
    return Row(**{**found, "gb_s": Spread(**found["gb_s"]), "others": others})


def machine() -> dict[str, Any]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    memory_kib = int(pathlib.Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": f"{fields.get('model name', '?')} (family {fields.get('cpu family')}, model {fields.get('model')})",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit that is measured, with a + where files differ from it."""
    try:
        git = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def date() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
