"""``run.json`` and ``summary.csv`` as values: which members they have, and the definitions that stand in every one.

Decides names, and how a value becomes JSON: infinity is the text ``inf``. It writes no file.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import enum
import io
import math
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import kvxfer
from kvxfer.load.run import LoadRun

SCHEMA_VERSION = 1
KINDS = ("run", "search", "sweep", "import")
SECRETS = ("api_key", "authorization", "password", "secret", "_token")
"""Ends of names of settings whose values are left out."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Texts that begin so are formulas to a spreadsheet."""

DEFINITIONS = {
    "due": "when a request was to be sent: the workload's time, or the end of the turn before and the think time",
    "begun": "when its first bytes had been offered to the kernel, or a connection for it had been asked for",
    "sent": "when the last byte of its body was handed to the kernel",
    "first": "when the first chunk came that has text, reasoning text or a tool call; a role alone is none",
    "last": "when the last such chunk came",
    "ttft": "first - due: the wait of a client that sends on time; infinite where none came",
    "ttft_since_sent": "first - sent: without the lateness of the generator, and what it took to hand the body over",
    "e2e": "last - due; infinite where the request failed",
    "tpot": "(last - first) / (shown tokens - those of the first arrival); none of one token; not measured, and "
    "within no limit, where all came at once",
    "normalized_e2e": "e2e / tokens, the hidden ones among them: over the whole answer",
    "short": "whole answers with fewer tokens than asked for: not good",
    "gap": "the longest time between two chunks with content",
    "lateness": "begun - due (sent - due, where begun is not told): the generator's own fault",
    "window": "requests that were due in it are counted, whenever they ended; warm-up is not",
    "attainment": "requests with answers as long as asked for that met all limits / requests due in the window; one "
    "that failed met none",
    "goodput": "requests that met all limits / seconds of the window",
    "percentiles": "of all: a failed request counts as infinite; of the good: only answers that are whole",
    "joined": "whole answers whose phases an account tells / whole answers",
    "phases": "late, queue, prefill, transfer, gap, decode, unexplained: due to last, split; of the joined answers",
    "interval": "Wilson's, at 95 %",
    "seconds": "all times are seconds after the beginning of the run, of one monotonic clock",
    "inf": "the text inf stands for infinity: it never came",
}

FILES = {
    "run.json": "what ran, where, and what was found",
    "requests.jsonl": "one line for each request that was due",
    "summary.csv": "one row for each run",
    "report.html": "the figures; opens without a network",
    "timeline.json": "requests on workers, for Perfetto or chrome://tracing",
}


def environment() -> dict[str, Any]:
    """The machine that sent, without its name."""
    return {
        "kvxfer": kvxfer.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu_model": _cpu_model(),
    }


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return found[0] if found else platform.processor()


def plain(value: Any) -> Any:
    """``value`` as JSON has it: dataclasses as objects, enums as values, infinity as ``inf``, secrets left out."""
    if hasattr(value, "to_json") and not isinstance(value, type):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {
            str(name): "(left out)" if str(name).lower().endswith(SECRETS) and one else plain(one)
            for name, one in value.items()
        }
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    number = float(value)
    if math.isnan(number):
        return None
    return number if math.isfinite(number) else "inf" if number > 0 else "-inf"


def run_document(
    kind: str,
    runs: Sequence[LoadRun],
    summaries: Sequence[Any],
    verdicts: Mapping[str, Sequence[Any]],
    extra: Mapping[str, Any],
    files: Sequence[str],
) -> dict[str, Any]:
    """The members of ``run.json``, as JSON has them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "began": _date(min((run.began_unix_s for run in runs), default=0.0)),
        "environment": environment(),
        "verdicts": [{"run": run, **plain(one)} for run, found in verdicts.items() for one in found],
        "runs": [_run_members(run, summary) for run, summary in zip(runs, summaries, strict=True)],
        "extra": plain(extra),
        "definitions": DEFINITIONS,
        "files": {name: FILES[name] for name in files},
    }


def _date(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="milliseconds")


def _run_members(run: LoadRun, summary: Any) -> dict[str, Any]:
    members = {
        field.name: plain(getattr(run, field.name)) for field in dataclasses.fields(run) if field.name != "records"
    }
    members["requests"] = len(run.records)
    members["summary"] = plain(summary)
    return members


def summary_table(document: Mapping[str, Any]) -> str:
    """``summary.csv`` from the members of ``run.json``: one row a run, columns named as there."""
    left_out = {"settings", "summary"}
    rows = []
    for run in document["runs"]:
        members = {name: value for name, value in run.items() if name not in left_out}
        rows.append(dict(_flat(members)) | dict(_flat(run["summary"] or {})))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return out.getvalue()


def _flat(members: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in members.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list):
            yield from _flat({str(at): one for at, one in enumerate(value)}, f"{before}{name}.")
        else:
            yield before + name, value


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would compute gets a quote before it."""
    if isinstance(value, str) and value.startswith(FORMULA) and value != "-inf":
        return "'" + value
    return value
