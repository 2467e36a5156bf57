"""Which tool wrote a file, and its runs.

Decides by what a file has in it, never by its name. A directory is searched for the files that the tools write.
"""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Sequence
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.artefacts import RUN_FILE
from kvxfer.load.importers import aiperf, aiperf_raw, guidellm, inference_perf, vllm_bench
from kvxfer.load.importers.fields import read_documents, read_lines
from kvxfer.load.importers.made import name_apart
from kvxfer.load.join import join_log
from kvxfer.load.run import LoadRun


class ImportFormat(enum.Enum):
    """The tool that wrote the results."""

    AIPERF = "aiperf"
    GUIDELLM = "guidellm"
    VLLM_BENCH = "vllm-bench"
    INFERENCE_PERF = "inference-perf"


IN_DIRECTORIES = (aiperf.RECORDS, inference_perf.RECORDS, "benchmarks.json")
"""What a tool calls the file in the directory that it makes."""
KNOWN = "aiperf (profile_export.jsonl), guidellm (JSON), vllm bench serve --save-detailed, inference-perf (per request)"


def read_results(path: pathlib.Path, tool: ImportFormat | None = None) -> list[LoadRun]:
    """The runs that a tool's file, or the directory it made, has; ``tool`` None: found out from what is in it.

    Raises ConfigError for a file that cannot be read, that no tool known here wrote, or that lacks something: it names
    the file, the line where it has lines, and the member.
    """
    path = _file_of(path)
    first = _first_line(path)
    if first is not None and aiperf_raw.fits(first) and tool in (None, ImportFormat.AIPERF):
        return aiperf_raw.read_aiperf_raw(path)
    if tool is ImportFormat.AIPERF:
        return aiperf.read_aiperf(path)
    if first is not None and aiperf.fits(first):
        if tool is not None:
            raise ConfigError(f"{path}: was not written by {tool.value} but by aiperf")
        return aiperf.read_aiperf(path)
    runs: list[LoadRun] = []
    for value in read_documents(path):
        found = _tool_of(value)
        if found is None or (tool is not None and found is not tool):
            wanted = f"was not written by {tool.value}" if tool is not None else "has results of no known tool"
            but = f" but by {found.value}" if found is not None else f"; known are {KNOWN}"
            raise ConfigError(f"{path}: {wanted}{but}")
        if found is ImportFormat.GUIDELLM:
            runs += guidellm.read_guidellm(path, value)
        elif found is ImportFormat.VLLM_BENCH:
            runs += vllm_bench.read_vllm_bench(path, value)
        else:
            runs += inference_perf.read_inference_perf(path, value)
    if not runs:
        raise ConfigError(f"{path}: is empty")
    name_apart(runs)
    return runs


def join_router_log(runs: Sequence[LoadRun], path: pathlib.Path) -> int:
    """Give the requests of imported runs the accounts that a router's log has of their ids; returns how many got one.

    Raises ConfigError for a log that cannot be read, and for one without an account of any of these requests.
    """
    try:
        with path.open("rb") as lines:
            joined = join_log((record for run in runs for record in run.records), lines)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not joined:
        raise ConfigError(
            f"{path}: has no account of these requests; the tool must send each its own x-request-id and "
            "x-kvxfer-account: 1, and the router write its log with --log-style=json"
        )
    return joined


def _file_of(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        return path
    if (path / RUN_FILE).is_file():
        raise ConfigError(f"{path}: is a result of kvxfer load, not of another tool: use kvxfer load report")
    found = [path / name for name in IN_DIRECTORIES if (path / name).is_file()]
    if len(found) != 1:
        which = "none" if not found else "more than one"
        raise ConfigError(f"{path}: has {which} of the files {', '.join(IN_DIRECTORIES)}: name the file")
    return found[0]


def _first_line(path: pathlib.Path) -> dict[str, Any] | None:
    """The object of the first line, None where that line is no object."""
    try:
        return next((line.values for line in read_lines(path)), None)
    except ConfigError:
        if not path.is_file():
            raise
        return None


def _tool_of(value: Any) -> ImportFormat | None:
    if isinstance(value, list):
        first = value[0] if value else None
        return ImportFormat.INFERENCE_PERF if isinstance(first, dict) and inference_perf.fits(first) else None
    if not isinstance(value, dict):
        return None
    if guidellm.fits(value):
        return ImportFormat.GUIDELLM
    return ImportFormat.VLLM_BENCH if vllm_bench.fits(value) else None
