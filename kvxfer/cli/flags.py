"""Command-line flags made one to one from an options dataclass, and the dataclass made back from them.

Decides how a field's type becomes a flag; must never know which command it serves. A field's ``metadata`` may carry
``help``, ``metavar`` and ``choices``. Fields without ``help`` get flags too: what can be set can be set by flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import pathlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

OptionsT = TypeVar("OptionsT")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
        raise TypeError(f"an option cannot be one of several kinds: {hint}")
    return hint


def _one_of(kind: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    def parse(text: str) -> enum.Enum:
        for member in kind:
            if text in (str(member.value), member.name.lower()):
                return member
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(str(m.value) for m in kind)}")

    return parse


def parser_of(hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of(hint)
    if hint in (str, int, float, pathlib.Path):
        return typing.cast(Callable[[str], Any], hint)
    if typing.get_origin(hint) is typing.Literal:
        return str
    raise TypeError(f"no flag can be made of an option of type {hint}")


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(parse(part.strip()) for part in text.split(",") if part.strip())

    return parse_list


class _ListAction(argparse.Action):
    """Takes the place of the default the first time, and adds to what came before from then on."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, self.default)
        setattr(namespace, self.dest, values if before is self.default else (*before, *values))


def _words(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(_words(part) for part in value)
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def _help(field: dataclasses.Field[Any], default: Any) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    if default is None or default == "" or default == () or default is dataclasses.MISSING:
        return text
    if isinstance(default, bool):
        return text
    return f"{text} (default: {_words(default)})".strip().replace("%%", "%").replace("%", "%%")


def _metavar(name: str, hint: Any) -> str:
    for ending, word in (("_s", "SECONDS"), ("_bytes", "BYTES"), ("_file", "FILE"), ("_dir", "DIR")):
        if name.endswith(ending):
            return word
    return "N" if hint in (int, float) else name.rpartition("_")[2].upper()


def add_flags(parser: argparse._ActionsContainer, options: type[Any], *, only_given: bool = False) -> None:
    """Add a flag for every field of the dataclass ``options``, to a parser or to a group of its flags. Raises TypeError
    for a type no flag can be made of.

    ``only_given``: the parsed namespace has only what was given, and no flag is required, because something else may
    give the rest.
    """
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if not field.init:
            continue
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        hint = without_none(hints[field.name])
        common: dict[str, Any] = {
            "dest": field.name,
            "help": _help(field, default),
            "required": required and not only_given,
        }
        if only_given:
            common["default"] = argparse.SUPPRESS
        elif not required:
            common["default"] = default
        if hint is bool:
            parser.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, **common)
            continue
        if typing.get_origin(hint) in (tuple, list):
            parse = _list_of(parser_of(typing.get_args(hint)[0]))
            metavar = field.metadata.get("metavar", "A,B,...")
            common["action"] = _ListAction
        else:
            parse = parser_of(hint)
            metavar = field.metadata.get("metavar", _metavar(field.name, hint))
            if isinstance(hint, type) and issubclass(hint, enum.Enum):
                metavar = "|".join(str(member.value) for member in hint)
            if typing.get_origin(hint) is typing.Literal:
                common["choices"] = typing.get_args(hint)
            elif "choices" in field.metadata:
                common["choices"] = [parse(str(choice)) for choice in field.metadata["choices"]]
                metavar = "|".join(str(choice) for choice in field.metadata["choices"])
        parser.add_argument(flag_name(field.name), type=parse, metavar=metavar, **common)


def options_from(options: type[OptionsT], namespace: argparse.Namespace) -> OptionsT:
    """The dataclass that the parsed flags describe; its own checks may raise ConfigError."""
    return options(**given(options, namespace))


def given(options: type[Any], namespace: argparse.Namespace) -> dict[str, Any]:
    """The options of which ``namespace`` has a value."""
    found = vars(namespace)
    return {
        field.name: found[field.name] for field in dataclasses.fields(options) if field.init and field.name in found
    }


def to_flags(values: dict[str, Any]) -> Sequence[str]:
    """Command-line words for field values; None leaves the flag out. Used to start a child with the same options."""
    words: list[str] = []
    for field, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag_name(field) if value else "--no-" + field.replace("_", "-"))
        else:
            words.append(f"{flag_name(field)}={_words(value)}")
    return words


def print_json_line(value: dict[str, Any]) -> None:
    """One JSON object as one line on stdout, flushed: what a supervisor reads."""
    print(json.dumps(value), flush=True)
