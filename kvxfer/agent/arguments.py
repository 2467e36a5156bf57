"""Judges the arguments of the agent's public methods by their annotations, before anything moves. Decides only whether
a value is of the kind that was asked for; must never know what it means.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.types import check_kind

P = ParamSpec("P")
R = TypeVar("R")
Judge: TypeAlias = Callable[[str, Any], Any]
"""Takes the name and the value of an argument, and returns what the method gets: of an enum, the member."""


COUNT_MAX = 0xFFFFFFFF


def check_count(name: str, value: int) -> None:
    """Raise InvalidArgumentError unless it is a number of blocks that the core can count."""
    if not 0 <= value <= COUNT_MAX:
        raise InvalidArgumentError(f"{name} must be 0 to {COUNT_MAX}, not {value}")


def judged(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which raises InvalidArgumentError with the name of the first argument that is not of its annotated
    kind. Annotations that say nothing (``Any``, array-likes) are not judged here."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        judges = _judges_of(method)
        taken = [judges.get(name, _anything)(name, value) for name, value in zip(names, args, strict=False)]
        more = {name: judges.get(name, _anything)(name, value) for name, value in kwargs.items()}
        return method(*taken, *args[len(taken) :], **more)  # type: ignore[arg-type]

    return call


@functools.cache
def _judges_of(method: Callable[..., object]) -> dict[str, Judge]:
    """By parameter. Once called, not when the class is made: only then all names of its annotations are there."""
    hints = typing.get_type_hints(method)
    found = {name: _judge_of(hint) for name, hint in hints.items() if name != "return"}
    return {name: judge for name, judge in found.items() if judge is not None}


def _judge_of(hint: Any) -> Judge | None:
    if hint is Any or hint == npt.ArrayLike:
        return None
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        if npt.ArrayLike == hint or len(parts) != 1:
            return None if not all(isinstance(part, type) for part in parts) else _either(tuple(parts))
        return _optional(_judge_of(parts[0]))
    if origin is collections.abc.Callable:
        return _callable
    if origin in (collections.abc.Sequence, tuple):
        return _sequence(typing.get_args(hint)[0])
    return functools.partial(_kind, hint) if isinstance(hint, type) else None


def _anything(name: str, value: Any) -> Any:
    return value


def _kind(kind: type, name: str, value: Any) -> Any:
    if issubclass(kind, enum.Enum) and not isinstance(value, kind):
        try:  # a lane may be named by its value
            return kind(value)
        except ValueError:
            values = ", ".join(str(member.value) for member in kind)
            raise InvalidArgumentError(f"{name} must be one of {values}, not {value!r:.100}") from None
    check_kind(name, value, kind)
    return value


def _optional(judge: Judge | None) -> Judge | None:
    if judge is None:
        return None
    return lambda name, value: None if value is None else judge(name, value)


def _either(kinds: tuple[type, ...]) -> Judge:
    def judge(name: str, value: Any) -> Any:
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise InvalidArgumentError(f"{name} must be of type {wanted}, not {type(value).__name__}")
        return value

    return judge


def _callable(name: str, value: Any) -> Any:
    if not callable(value):
        raise InvalidArgumentError(f"{name} must be callable, not of type {type(value).__name__}")
    return value


def _sequence(kind: type) -> Judge:
    def judge(name: str, value: Any) -> Any:
        if isinstance(value, (str, bytes)) or not isinstance(value, collections.abc.Sequence):
            raise InvalidArgumentError(f"{name} must be a list of {kind.__name__}, not of type {type(value).__name__}")
        return tuple(_kind(kind, name, item) for item in value)

    return judge
