"""Kubernetes' EndpointSlices as workers: which of their endpoints are ready, on which port, in which role.

Everything comes from the API server, as JSON values: an endpoint that makes no worker is left out, with the reason. It
must never know how slices are fetched.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.worker import EngineDialect, Worker, WorkerSource, stock_worker
from kvxfer.types import AGENT_ID_PATTERN, Role

ROLE_LABELS = ("kvxfer.io/role", "llm-d.ai/role")
"""Labels of a slice, which Kubernetes copies from its Service. The first that is there counts."""
DIALECT_LABEL = "kvxfer.io/dialect"
BOOTSTRAP_PORT_LABEL = "kvxfer.io/bootstrap-port"
ROLES = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "both": Role.BOTH,
    "prefill-decode": Role.BOTH,
}
"""The last is llm-d's."""
HTTP_PORT = "http"
WORKERS_MAX = 16384
NAME_CHARS_MAX = 253
"""Of a slice, as Kubernetes has it; one with a longer name is left out."""


def slice_name(value: Any) -> str:
    """The slice's own name; empty where it has none that can be."""
    metadata = value.get("metadata") if isinstance(value, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and len(name) <= NAME_CHARS_MAX else ""


def workers_of_slices(slices: Iterable[Mapping[str, Any]], *, dialect: str) -> tuple[list[Worker], list[str]]:
    """The workers of all slices, each once, and why others are none. ``dialect`` is that of slices without a label."""
    workers: dict[str, Worker] = {}
    reasons: list[str] = []
    for one in slices:
        try:
            for worker in _workers(one, dialect):
                if len(workers) < WORKERS_MAX:
                    workers.setdefault(worker.url, worker)
        except ConfigError as error:
            reasons.append(f"{slice_name(one)}: {error}")
    return list(workers.values()), reasons


def _workers(value: Mapping[str, Any], dialect: str) -> Iterator[Worker]:
    labels = _mapping(_mapping(value.get("metadata")).get("labels"))
    role = _role(labels)
    port = _port(value.get("ports"))
    bootstrap = labels.get(BOOTSTRAP_PORT_LABEL)
    if bootstrap is not None and not (isinstance(bootstrap, str) and bootstrap.isascii() and bootstrap.isdigit()):
        raise ConfigError(f"label {BOOTSTRAP_PORT_LABEL} must be a port, not {bootstrap!r:.100}")
    spoken = str(labels.get(DIALECT_LABEL, dialect))
    for endpoint in _list(value.get("endpoints")):
        if not isinstance(endpoint, dict) or not _is_ready(endpoint):
            continue
        addresses = _list(endpoint.get("addresses"))
        if not addresses or not isinstance(addresses[0], str):
            continue
        name = _mapping(endpoint.get("targetRef")).get("name")
        is_name = isinstance(name, str) and AGENT_ID_PATTERN.fullmatch(name) is not None
        yield stock_worker(
            f"http://{_host(addresses[0])}:{port}",
            role,
            spoken,
            WorkerSource.KUBERNETES,
            name=name if is_name and isinstance(name, str) else "",
            bootstrap_port=None if bootstrap is None else int(bootstrap[:6]),
        )


def _role(labels: Mapping[str, Any]) -> Role:
    for label in ROLE_LABELS:
        if label in labels:
            role = ROLES.get(str(labels[label]))
            if role is None:
                raise ConfigError(f"label {label} must be one of {', '.join(ROLES)}, not {labels[label]!r:.100}")
            return role
    if labels.get(DIALECT_LABEL) == EngineDialect.PLAIN:
        return Role.BOTH
    raise ConfigError(f"it has none of the labels {', '.join(ROLE_LABELS)}")


def _port(value: Any) -> int:
    """The port named ``http``, else the only one."""
    ports = [one for one in _list(value) if isinstance(one, dict) and type(one.get("port")) is int]
    named = [one for one in ports if one.get("name") == HTTP_PORT]
    if len(named) != 1 and len(ports) != 1:
        raise ConfigError(f"it needs one port, or one that is named {HTTP_PORT}; it has {len(ports)}")
    return int((named or ports)[0]["port"])


def _is_ready(endpoint: Mapping[str, Any]) -> bool:
    """Kubernetes says that a condition which is missing is to be taken as ready."""
    conditions = _mapping(endpoint.get("conditions"))
    return conditions.get("ready", True) is not False and conditions.get("terminating") is not True


def _host(address: str) -> str:
    try:
        return f"[{address}]" if isinstance(ipaddress.ip_address(address), ipaddress.IPv6Address) else address
    except ValueError:
        return address


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
