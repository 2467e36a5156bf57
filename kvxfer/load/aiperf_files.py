"""What aiperf 0.13 is given: a directory with its requests, its settings, and a tokenizer that it need not download.

Decides how a workload is told to aiperf. Each row of ``requests.jsonl`` has the complete body, which aiperf sends as it
is, and a ``session_id`` by which its record is found again: one of its own for each request, so that aiperf holds none
back for another, except in mode ``think``, where a session's turns have their session's and wait for each other.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import ConfigError
from kvxfer.load.drive.endpoint import ROUTES, api_key, base_path
from kvxfer.load.options import ApiKind, DriveOptions, TargetOptions
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.write_mooncake import mooncake_lines

ROWS, SETTINGS, TOKENIZER, RESULTS, OUTPUT = "requests.jsonl", "aiperf.yaml", "tokenizer", "results", "aiperf.txt"
CONNECTIONS_MAX = 65_000
RAW_BYTES_MAX = 1 << 30
"""Of all bodies. Accounts of requests are in aiperf's raw records alone, which repeat the bodies: with more, it writes
none, and the run has no accounts."""
KEY_VARIABLE = "KVXFER_LOAD_API_KEY"
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"word": 0, "end": 1}, "unk_token": "word"},
}
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "end", "unk_token": "word"}


def join_key(workload: Workload, request: WorkloadRequest) -> tuple[str, int]:
    """(``conversation_id``, ``turn_index``) of aiperf's record of this request."""
    if workload.mode is DispatchMode.THINK and request.session is not None:
        return str(request.session), request.turn
    return f"request-{request.number}", 0


def write_files(
    directory: pathlib.Path,
    workload: Workload,
    body: Callable[[WorkloadRequest], bytes],
    target: TargetOptions,
    options: DriveOptions,
) -> None:
    """Write all that aiperf reads. Raises ConfigError for a directory that cannot be written, and whatever ``body``
    raises."""
    try:
        (directory / TOKENIZER).mkdir(parents=True, exist_ok=True)
        (directory / TOKENIZER / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
        (directory / TOKENIZER / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG))
        with (directory / ROWS).open("w", encoding="utf-8") as file:
            for line in rows(workload, body):
                file.write(line + "\n")
            wants_raw = target.account and file.tell() <= RAW_BYTES_MAX
        told = settings(directory, target, options, wants_raw=wants_raw)
        (directory / SETTINGS).write_text(json.dumps(told, indent=1))
    except OSError as error:
        raise ConfigError(f"aiperf's files cannot be written to {directory}: {error.strerror}") from None


def rows(workload: Workload, body: Callable[[WorkloadRequest], bytes]) -> Iterator[str]:
    """Mooncake JSONL with bodies, each line with a ``session_id``. Raises whatever ``body`` raises."""
    for request, line in zip(workload.requests, mooncake_lines(workload, body), strict=True):
        if '"session_id":' in line.partition('"payload":')[0]:
            yield line
        else:
            name, _ = join_key(workload, request)
            yield f'{{"session_id":"{name}",{line[1:]}'


def settings(
    directory: pathlib.Path, target: TargetOptions, options: DriveOptions, *, wants_raw: bool
) -> dict[str, Any]:
    """aiperf's configuration, which is YAML, so JSON will do. No secret is in it."""
    parts = urlsplit(target.url)
    endpoint: dict[str, Any] = {
        "url": f"{parts.scheme}://{parts.netloc}{base_path(target.url)}{ROUTES[target.api]}",
        "type": "chat" if target.api is ApiKind.CHAT else "completions",
        "streaming": True,
        "timeout": options.timeout_s,
        "use_server_token_count": True,
    }
    if target.account:
        endpoint["headers"] = {"x-kvxfer-account": "1"}
    if target.api_key_file:
        endpoint["api_key"] = f"${{{KEY_VARIABLE}}}"
    return {
        "schemaVersion": "2.0",
        "benchmark": {
            "model": target.model or "unnamed",
            "endpoint": endpoint,
            "dataset": {"type": "file", "path": str(directory / ROWS), "format": "mooncake_trace"},
            "phases": {"type": "fixed_schedule"},
            "tokenizer": {"name": str(directory / TOKENIZER)},
            "gpu_telemetry": {"enabled": False},
            "server_metrics": {"enabled": False},
            "artifacts": {
                "dir": str(directory / RESULTS),
                "summary": ["json"],
                "records": ["jsonl"],
                "raw": wants_raw,
            },
            "runtime": {"ui": "none"},
        },
    }


def environment(directory: pathlib.Path, target: TargetOptions, options: DriveOptions) -> dict[str, str]:
    """The environment of aiperf's process: it downloads nothing, writes nothing outside the directory, and finds no
    Python package of ours. Raises ConfigError for a key that cannot be read."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", KEY_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.endswith("_OFFLINE")}
    kept |= {
        "HOME": str(directory),
        # Offline it would take the tokenizer's directory for the name of one that it should have downloaded before.
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "AIPERF_HTTP_CONNECTION_LIMIT": str(min(options.connections_max, CONNECTIONS_MAX)),
        "AIPERF_HTTP_IP_VERSION": "auto",
        "AIPERF_RECORD_EXPORT_BATCH_SIZE": "10",
    }
    if target.ca_file:
        kept["SSL_CERT_FILE"] = str(pathlib.Path(target.ca_file).absolute())
    if key := api_key(target):
        kept[KEY_VARIABLE] = key
    return kept
