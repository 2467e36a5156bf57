"""Options of a service from a file and the environment, beneath its flags: one schema, that of its options dataclass.

A flag wins over the environment, which wins over the file, which wins over the default. Decides how words and YAML
values become options; what an option means is the service's own.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from kvxfer.cli.flags import parser_of, without_none
from kvxfer.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def variable(command: str, field: str) -> str:
    """The environment variable of one option."""
    return f"KVXFER_{command.replace('-', '_')}_{field}".upper()


def from_environment(options: type[Any], command: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment says of the options. Raises ConfigError that names the variable."""
    found = os.environ if environ is None else environ
    hints = typing.get_type_hints(options)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        name = variable(command, field.name)
        if field.init and name in found:
            values[field.name] = _from_word(name, found[name], hints[field.name])
    return values


def from_file(options: type[Any], path: str) -> dict[str, Any]:
    """What a YAML file says of the options: a mapping of option names (with ``_`` or ``-``) to values.

    Raises ConfigError that names the file, and the key.
    """
    import yaml  # only where a file is read

    try:
        with pathlib.Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the configuration {path} is longer than {FILE_BYTES_MAX} bytes")
    try:
        _check_keys(path, yaml.compose(content, Loader=yaml.SafeLoader))
        loaded = yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"the configuration {path} is not YAML: {' '.join(str(error).split())[:300]}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"the configuration {path} must be a mapping of options to values")
    hints = typing.get_type_hints(options)
    names = {field.name for field in dataclasses.fields(options) if field.init}
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: {key!s:.80} is no option; there is {', '.join(sorted(names))}")
        values[name] = _from_value(f"{path}: {name}", value, hints[name])
    return values


def _check_keys(path: str, root: Any) -> None:
    """YAML lets the last one of two equal keys win, and says nothing."""
    seen: set[str] = set()
    for key, _ in root.value if getattr(root, "id", "") == "mapping" else ():
        name = str(key.value).replace("-", "_")
        if name in seen:
            raise ConfigError(f"{path}: {name} is given twice")
        seen.add(name)


def _from_word(name: str, text: str, hint: Any) -> Any:
    kind = without_none(hint)
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{name} must be true or false, not {text!r:.80}")
    if typing.get_origin(kind) in (tuple, list):
        return tuple(_one(name, part.strip(), typing.get_args(kind)[0]) for part in text.split(",") if part.strip())
    return _one(name, text, kind)


def _from_value(name: str, value: Any, hint: Any) -> Any:
    kind = without_none(hint)
    if value is None and kind is not hint:
        return None
    if typing.get_origin(kind) in (tuple, list):
        parts = value if isinstance(value, list) else [value]
        return tuple(_from_value(f"{name}[{at}]", part, typing.get_args(kind)[0]) for at, part in enumerate(parts))
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{name} must be true or false, not {value!r:.80}")
    if isinstance(value, bool) and kind not in (int, float):
        # YAML 1.1 reads on and off as true and false, and they are words of some options.
        value = "on" if value else "off"
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return _one(name, str(value), kind)
    raise ConfigError(f"{name} must be a {_word(kind)}, not {value!r:.80}")


def _one(name: str, text: str, kind: Any) -> Any:
    if "\0" in text:
        raise ConfigError(f"{name} must not hold a NUL")
    try:
        return parser_of(kind)(text)
    except Exception:
        raise ConfigError(f"{name} must be a {_word(kind)}, not {text!r:.80}") from None


def _word(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "word out of " + ", ".join(str(member.value) for member in kind)
    return {int: "whole number", float: "number"}.get(kind, "word")
