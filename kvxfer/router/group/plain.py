"""Values of typed dataclasses as JSON values, and back.

Decides how a type is written: a dataclass as the list of its fields, an enum by its value, bytes as hex, a set as a
list. What comes back is checked by the dataclasses' own rules. It must never know a message.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

from kvxfer.errors import ProtocolError

ValueT = TypeVar("ValueT")


def to_plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list | frozenset | set):
        return [to_plain(part) for part in value]
    if isinstance(value, dict):
        return [[to_plain(key), to_plain(part)] for key, part in value.items()]
    if dataclasses.is_dataclass(value):
        return [to_plain(getattr(value, name)) for name in _fields(typing.cast(Any, type(value)))]
    raise ProtocolError(f"a {type(value).__name__} cannot be told to another process")


def from_plain(kind: type[ValueT], plain: Any) -> ValueT:
    """The value of type ``kind`` that :func:`to_plain` wrote. Raises ProtocolError where it is none."""
    try:
        return typing.cast(ValueT, _read(kind, plain))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"no {getattr(kind, '__name__', kind)}: {error}") from None


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _read(kind: Any, plain: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        [inner] = [part for part in parts if part is not type(None)]
        return None if plain is None else _read(inner, plain)
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_read(parts[0], part) for part in plain)
        return tuple(_read(part, value) for part, value in zip(parts, plain, strict=True))
    if origin in (frozenset, set, list):
        return origin(_read(parts[0], part) for part in plain)
    if origin is dict:
        return {_read(parts[0], key): _read(parts[1], value) for key, value in plain}
    if kind is bytes:
        return bytes.fromhex(plain)
    if kind is float and type(plain) is int:
        return float(plain)
    if kind in (bool, int, str, float):
        if type(plain) is not kind:
            raise ValueError(f"a {kind.__name__} is expected")
        return plain
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(plain)
    if dataclasses.is_dataclass(kind):
        fields = _fields(typing.cast(Any, kind))
        return typing.cast(Any, kind)(
            **{name: _read(hint, value) for (name, hint), value in zip(fields.items(), plain, strict=True)}
        )
    raise TypeError(f"{kind} cannot be read")
