"""The workers that a YAML file names, as text. Decides what the file may say, and says where it is wrong. It must never
know when the file is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kvxfer.errors import ConfigError
from kvxfer.router.fleet.places import Places
from kvxfer.router.fleet.roster import WORKERS_MAX
from kvxfer.router.fleet.worker import EngineDialect, Worker, WorkerSource, stock_worker
from kvxfer.types import Role

FILE_BYTES_MAX = 4 << 20

TOP_KEYS = {"defaults": dict, "workers": list}
DEFAULT_KEYS = {"dialect": str, "model": str, "bootstrap_port": int}
WORKER_KEYS = {
    "url": str,
    "role": str,
    "dialect": str,
    "name": str,
    "model": str,
    "bootstrap_port": int,
    "dp_rank": int,
}
_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}


def read_worker_file(name: str, content: bytes) -> tuple[Worker, ...]:
    """Its workers. Raises ConfigError that names the file, the line and what is wrong there."""
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{name}: more than {FILE_BYTES_MAX} bytes")
    try:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigError(f"{name}: empty; it needs workers, if only an empty list: workers: []")
            return _read(name, loader, node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"{error.problem_mark.line + 1}:"
        raise ConfigError(f"{name}:{line} {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: no YAML: {error!s:.200}") from None


def _read(name: str, loader: yaml.SafeLoader, node: yaml.Node) -> tuple[Worker, ...]:
    top = _members(name, node, TOP_KEYS, "the file")
    if "workers" not in top:
        raise _wrong(name, node, "there is no key workers")
    defaults = _values(name, loader, top["defaults"], DEFAULT_KEYS, "defaults") if "defaults" in top else {}
    entries = _typed(name, top["workers"], list, "workers").value
    if len(entries) > WORKERS_MAX:
        raise _wrong(name, node, f"more than {WORKERS_MAX} workers")
    workers: list[Worker] = []
    names: dict[str, int] = {}
    places: Places[int] = Places()
    for entry in entries:
        values = _values(name, loader, entry, WORKER_KEYS, "a worker")
        try:
            worker = _worker(values, defaults)
        except ConfigError as error:
            raise _wrong(name, entry, str(error)) from None
        line = entry.start_mark.line + 1
        other = names.setdefault(worker.agent_id, line)
        if other != line:
            raise _wrong(name, entry, f"the worker of line {other} has the same name")
        there = places.find(worker)
        if there is not None:
            raise _wrong(name, entry, f"the worker of line {there} has the same address")
        places.take(worker, line)
        workers.append(worker)
    return tuple(workers)


def _worker(values: dict[str, Any], defaults: dict[str, Any]) -> Worker:
    if "url" not in values:
        raise ConfigError("a worker needs a url")
    dialect = values.get("dialect", defaults.get("dialect", EngineDialect.VLLM.value))
    role = values.get("role", Role.BOTH.value if dialect == EngineDialect.PLAIN else None)
    if role not in tuple(Role):
        raise ConfigError(f"role must be one of {', '.join(Role)}, not {role!r:.100}")
    port = values.get("bootstrap_port")
    if port is None and dialect in (EngineDialect.SGLANG, EngineDialect.VLLM_MOONCAKE):
        port = defaults.get("bootstrap_port")
    return stock_worker(
        values["url"],
        Role(role),
        dialect,
        WorkerSource.FILE,
        name=values.get("name", ""),
        model=values.get("model", defaults.get("model", "")),
        bootstrap_port=port,
        dp_rank=values.get("dp_rank"),
    )


def _values(name: str, loader: yaml.SafeLoader, node: yaml.Node, keys: Mapping[str, type], what: str) -> dict[str, Any]:
    """The scalars of a mapping, as Python's, each of its kind."""
    values: dict[str, Any] = {}
    for key, value_node in _members(name, node, keys, what).items():
        value = loader.construct_object(value_node, deep=True) if isinstance(value_node, yaml.ScalarNode) else None
        if type(value) is not keys[key]:
            raise _wrong(name, value_node, f"{key} must be {_KINDS[keys[key]]}")
        values[key] = value
    return values


def _members(name: str, node: yaml.Node, keys: Mapping[str, type], what: str) -> dict[str, yaml.Node]:
    """The nodes of a mapping by key; a key that is unknown, or there twice, is refused by its name."""
    members: dict[str, yaml.Node] = {}
    for key_node, value_node in _typed(name, node, dict, what).value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a key that is no text"
        if key not in keys:
            raise _wrong(name, key_node, f"{what} has the unknown key {key!r:.100}; it may have {', '.join(keys)}")
        if key in members:
            raise _wrong(name, key_node, f"{what} has the key {key} twice")
        members[key] = value_node
    return members


def _typed(name: str, node: yaml.Node, kind: type, what: str) -> yaml.Node:
    wanted = yaml.MappingNode if kind is dict else yaml.SequenceNode
    if not isinstance(node, wanted):
        raise _wrong(name, node, f"{what} must be {_KINDS[kind]}")
    return node


def _wrong(name: str, node: yaml.Node, text: str) -> ConfigError:
    return ConfigError(f"{name}:{node.start_mark.line + 1}: {text}")
