"""Kubernetes' EndpointSlices as workers: which pods are ready, at which addresses, in which role.

Several slices may list one pod: dual-stack Services have a slice for each family of addresses, and two Services may
select the same pods. A pod is one worker all the same, with every address at which a slice lists it; in which order the
slices come makes no difference. Everything comes from the API server, as JSON values: what makes no worker is left out,
with the reason. It must never know how slices are fetched, nor which address answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.roster import WORKERS_MAX
from kvxfer.router.fleet.worker import EngineDialect, Worker, WorkerSource, origin_at, stock_worker
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
ADDRESSES_MAX = 8
"""Of one pod that are tried."""
NAME_CHARS_MAX = 253
"""Of a slice or a pod, as Kubernetes has it; a slice with a longer name is left out."""


@dataclasses.dataclass(frozen=True)
class _Listing:
    """One endpoint of one slice. ``pod`` is empty where none is named; ``dialect`` and ``bootstrap_port`` are None
    where no label says them."""

    pod: str
    uid: str
    url: str
    role: Role
    dialect: str | None
    bootstrap_port: int | None


def slice_name(value: Any) -> str:
    """The slice's own name; empty where it has none that can be."""
    metadata = value.get("metadata") if isinstance(value, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and len(name) <= NAME_CHARS_MAX else ""


def workers_of_slices(slices: Iterable[Mapping[str, Any]], *, dialect: str) -> tuple[list[Worker], list[str]]:
    """The workers of all slices, one for each pod, by name; and why others are none. ``dialect`` is that of pods for
    which no label says it."""
    reasons: list[str] = []
    workers: list[Worker] = []
    for listings in _by_pod(sorted(slices, key=slice_name), reasons):
        if len(workers) == WORKERS_MAX:
            reasons.append(f"more than {WORKERS_MAX} pods are listed; the others get no requests")
            break
        try:
            workers.append(_worker(listings, dialect))
        except ConfigError as error:
            reasons.append(f"{listings[0].pod or listings[0].url}: {error}")
    return sorted(workers, key=lambda one: one.agent_id), reasons


def _by_pod(slices: Iterable[Mapping[str, Any]], reasons: list[str]) -> list[list[_Listing]]:
    """What is listed of each pod. An endpoint that names no pod is at an address of its own, unless that is a pod's."""
    pods: dict[str, list[_Listing]] = {}
    nameless: dict[str, list[_Listing]] = {}
    for one in slices:
        try:
            for listing in _listings(one, reasons):
                found = pods.setdefault(listing.pod, []) if listing.pod else nameless.setdefault(listing.url, [])
                found.append(listing)
        except ConfigError as error:
            reasons.append(f"{slice_name(one)}: {error}")
    of_pods = {listing.url for listings in pods.values() for listing in listings}
    return [*pods.values(), *(listings for url, listings in nameless.items() if url not in of_pods)]


def _worker(listings: list[_Listing], dialect: str) -> Worker:
    """Raises ConfigError where slices say different things of one pod."""
    urls = sorted({one.url for one in listings}, key=lambda url: ("[" in url, url))[:ADDRESSES_MAX]
    roles = {one.role for one in listings}
    pod, uids = listings[0].pod, {one.uid for one in listings if one.uid}
    first = stock_worker(
        urls[0],
        roles.pop() if len(roles) == 1 else Role.BOTH,
        _one("dialect", {one.dialect for one in listings}) or dialect,
        WorkerSource.KUBERNETES,
        name=_agent_id(pod),
        bootstrap_port=_one("bootstrap-port", {one.bootstrap_port for one in listings}),
    )
    return dataclasses.replace(first, addresses=tuple(urls), uid=uids.pop() if len(uids) == 1 else "")


def _one(label: str, said: set[Any]) -> Any:
    """What the slices of a pod say by a label; None where none does."""
    values = sorted(value for value in said if value is not None)
    if len(values) > 1:
        raise ConfigError(f"its slices say kvxfer.io/{label} {' and '.join(map(str, values))}: it can be one only")
    return values[0] if values else None


def _agent_id(pod: str) -> str:
    """A pod's name where a worker may be called so, else its beginning with a digest."""
    if not pod or AGENT_ID_PATTERN.fullmatch(pod) is not None:
        return pod
    return f"{pod[:55]}-{hashlib.sha256(pod.encode()).hexdigest()[:8]}"


def _listings(value: Mapping[str, Any], reasons: list[str]) -> Iterator[_Listing]:
    """Raises ConfigError where the slice says of no endpoint what it is."""
    labels = _mapping(_mapping(value.get("metadata")).get("labels"))
    role = _role(labels)
    port = _port(value.get("ports"))
    bootstrap = labels.get(BOOTSTRAP_PORT_LABEL)
    if bootstrap is not None and not (isinstance(bootstrap, str) and bootstrap.isascii() and bootstrap.isdigit()):
        raise ConfigError(f"label {BOOTSTRAP_PORT_LABEL} must be a port, not {bootstrap!r:.100}")
    dialect = labels.get(DIALECT_LABEL)
    if dialect is not None and dialect not in tuple(EngineDialect):
        raise ConfigError(f"label {DIALECT_LABEL} must be one of {', '.join(EngineDialect)}, not {dialect!r:.100}")
    for endpoint in _list(value.get("endpoints")):
        if not isinstance(endpoint, dict) or not _is_ready(endpoint):
            continue
        addresses = _list(endpoint.get("addresses"))
        if not addresses or not isinstance(addresses[0], str):
            continue
        target = _mapping(endpoint.get("targetRef"))
        try:
            url = origin_at(f"http://{_host(addresses[0])}:{port}", WorkerSource.KUBERNETES)
        except ConfigError as error:
            reasons.append(f"{slice_name(value)}: {error}")
            continue
        yield _Listing(
            pod=_text(target.get("name")),
            uid=_text(target.get("uid")),
            url=url,
            role=role,
            dialect=dialect,
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= NAME_CHARS_MAX and value.isprintable() else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
