"""An engine's settings as facts (:mod:`kvxfer.protocol.facts`): every setting counts, unless an exemption says why it
cannot change KV. So a setting that is in no list counts too, and two engines that differ in it are refused by its
name.

Decides how a setting's value is written; must never know an engine. A setting that is off (``None``, false or empty) is
no fact: versions add settings, and one that is off does what its absence did. Zero is a number, and counts.

A text counts only if it says all of a value. The ``repr`` of an unknown type may leave out what differs (an array's
middle, a tensor's digits, what an object was made of), so only types that are named here are told.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvxfer.errors import ConfigError

DEPTH_MAX = 12
SETTINGS_MAX = 4096
WHOLE_REPRS = frozenset(
    {
        *("builtins.complex", "builtins.range", "decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
        *("numpy.bool", "numpy.float16", "numpy.float32"),
        *(f"numpy.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("torch.dtype", "torch.device", "torch.layout", "torch.memory_format"),
    }
)
"""Types whose ``repr`` says all of a value. By name: no tensor library is imported."""


class Exemptions:
    """Names of settings, each with the reason why it cannot change KV. A name that ends with ``.*`` stands for all
    that is below it: only for parts whose whole purpose cannot."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        self._parts = tuple(name.removesuffix("*") for name in reasons if name.endswith(".*"))

    def why(self, name: str) -> str | None:
        """Why that setting does not count; ``None``: it does."""
        if (own := self.reasons.get(name)) is not None:
            return own
        part = next((part for part in self._parts if f"{name}.".startswith(part)), None)
        return None if part is None else self.reasons[f"{part}*"]


def facts_of(settings: Any, exempt: Exemptions, prefix: str = "") -> dict[str, str]:
    """The facts of an object with named settings, or of a mapping, by their whole names, below ``prefix``. What is
    exempt is not looked at. Raises ConfigError, naming it, for a value that cannot be compared."""
    found: dict[str, str] = {}
    for name, value in _settings_of(settings, exempt, prefix, 0):
        if value is None or value is False or (isinstance(value, str | list | dict) and not value):
            continue
        found[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
        if len(found) > SETTINGS_MAX:
            raise ConfigError(f"an engine has more than SETTINGS_MAX={SETTINGS_MAX} settings to compare")
    return found


def names_of(settings: Any, exempt: Exemptions, prefix: str = "") -> list[str]:
    """The names that :func:`facts_of` looks at, set or not, and of what is exempt the topmost. For tests."""
    seen: list[str] = []
    for _ in _settings_of(settings, exempt, prefix, 0, seen):
        pass
    return seen


def _settings_of(
    settings: Any, exempt: Exemptions, prefix: str, depth: int, seen: list[str] | None = None
) -> Iterator[tuple[str, Any]]:
    if depth > DEPTH_MAX:
        raise ConfigError(f"the setting {prefix} is nested deeper than DEPTH_MAX={DEPTH_MAX}")
    for key, value in _members(settings):
        name = f"{prefix}.{key}" if prefix else str(key)
        is_exempt = exempt.why(name) is not None
        is_parent = not is_exempt and _is_parent(value)
        if seen is not None and not is_parent:
            seen.append(name)
        if is_exempt:
            continue
        if is_parent:
            yield from _settings_of(value, exempt, name, depth + 1, seen)
        else:
            yield name, plain(value, name)


def _members(settings: Any) -> list[tuple[str, Any]]:
    if isinstance(settings, Mapping):
        return [(str(key), value) for key, value in settings.items()]
    if dataclasses.is_dataclass(settings):
        return [
            (field.name, getattr(settings, field.name))
            for field in dataclasses.fields(settings)
            if hasattr(settings, field.name)
        ]
    return list(vars(settings).items())


def _is_parent(value: Any) -> bool:
    """Whether its own settings are compared one by one."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(key, str) for key in value)
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """A value as JSON can say it, the same in every process. Raises ConfigError, naming the setting, for one that it
    cannot say."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"the setting {name} is nested deeper than DEPTH_MAX={DEPTH_MAX}")
    if isinstance(value, enum.Enum):
        return value.name if value.name is not None else plain(value.value, name, depth + 1)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, Mapping):
        return {_key(key, name, depth + 1): plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, name, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, name, depth + 1) for item in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(item, name, depth + 1) for key, item in _members(value)}
    if (found := _name_of(value)) is not None:
        return found
    kind = type(value)
    if f"{kind.__module__}.{kind.__qualname__}" in WHOLE_REPRS:
        return repr(value)
    raise ConfigError(
        f"the setting {name} has a value of type {kind.__name__}, which two engines cannot compare: leave it out"
    )


def _key(key: Any, name: str, depth: int) -> str:
    text = plain(key, name, depth)
    return text if isinstance(text, str) else json.dumps(text, sort_keys=True)


def _name_of(value: Any) -> str | None:
    """Of a class or a function that is found by its name, and so is the same one in every process. A bound method, a
    partial and what a decorator made may have the name of another."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(module, str) or not isinstance(path, str):
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}.{path}" if found is value else None
