"""Members of a file that another tool wrote, taken out one by one, each with its place in the file.

Decides what an error about such a file says. Every read is total: a member that is missing or of the wrong kind is a
ConfigError that names the file, the line and the member. It must never know which tool wrote the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from kvxfer.errors import ConfigError

FILE_BYTES_MAX = 4 << 30
LINE_BYTES_MAX = 256 << 20


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    """One JSON object and where it stands: ``file``, the ``line`` where it has lines of its own, the ``path`` of names
    down to it. A getter with ``None`` in its type gives None for a member that is missing or null; the others raise
    ConfigError."""

    file: str
    values: dict[str, Any]
    line: int | None = None
    path: str = ""

    def error(self, name: str, what: str) -> ConfigError:
        place = f"{self.file}, line {self.line}" if self.line is not None else self.file
        member = ".".join(part for part in (self.path, name) if part)
        return ConfigError(f"{place}: {member or 'it'} {what}")

    def object(self, name: str) -> Members:
        found = self.object_or_none(name)
        if found is None:
            raise self.error(name, "is missing")
        return found

    def object_or_none(self, name: str) -> Members | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {_kind(value)}")
        return Members(self.file, value, self.line, ".".join(part for part in (self.path, name) if part))

    def number(self, name: str) -> float:
        value = self.number_or_none(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def number_or_none(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None else self._number(name, value)

    def count_or_none(self, name: str) -> int | None:
        """A whole number of 0 or more."""
        value = self.values.get(name)
        if value is None:
            return None
        number = self._number(name, value)
        if number < 0 or number != int(number):
            raise self.error(name, f"must be a whole number of 0 or more, not {number:g}")
        return int(value)

    def text_or_none(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be text, not {_kind(value)}")
        return value

    def text(self, name: str) -> str:
        value = self.text_or_none(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def is_true(self, name: str) -> bool:
        """Missing or null: false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {_kind(value)}")
        return bool(value)

    def list_or_none(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, f"must be a list, not {_kind(value)}")
        return value

    def objects(self, name: str) -> Iterator[Members]:
        """Those of a list of objects; none where it is missing."""
        for number, value in enumerate(self.list_or_none(name) or []):
            place = f"{name}[{number}]"
            if not isinstance(value, dict):
                raise self.error(place, f"must be an object, not {_kind(value)}")
            yield Members(self.file, value, self.line, ".".join(part for part in (self.path, place) if part))

    def lengths(self, name: str, length: int | None = None) -> list[float]:
        """As :meth:`numbers`, of 0 or more: durations and counts."""
        found = self.numbers(name, length)
        for place, value in enumerate(found):
            if value < 0:
                raise self.error(f"{name}[{place}]", f"must be 0 or more, not {value:g}")
        return found

    def numbers(self, name: str, length: int | None = None) -> list[float]:
        """A list of numbers; ``length``: it must have as many. Raises ConfigError where it is missing."""
        found = self.list_or_none(name)
        if found is None:
            raise self.error(name, "is missing")
        if length is not None and len(found) != length:
            raise self.error(name, f"must have {length} values, one for each request, not {len(found)}")
        return [self._number(f"{name}[{number}]", value) for number, value in enumerate(found)]

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, not {_kind(value)}")
        try:
            as_float = float(value)
        except OverflowError:
            as_float = math.inf
        if not math.isfinite(as_float):
            raise self.error(name, "must be a finite number")
        return as_float


def read_text(path: pathlib.Path) -> str:
    """The whole file. Raises ConfigError for one that cannot be read, is not UTF-8, or has above FILE_BYTES_MAX
    bytes."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX >> 30} GiB, the most that is read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8, at byte {error.start}") from None


def read_lines(path: pathlib.Path) -> Iterator[Members]:
    """The objects of a file with one JSON object a line; empty lines are passed over. A last line that was cut, as a
    tool that was killed leaves it, is passed over too. Raises ConfigError."""
    cut = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), 1):
                if cut:
                    raise ConfigError(f"{path}, line {cut}: is not JSON")
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(f"{path}, line {number}: is longer than {LINE_BYTES_MAX >> 20} MiB")
                if not line.strip():
                    continue
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):
                    if number == 1:
                        raise ConfigError(f"{path}, line 1: is not JSON") from None
                    cut = number
                    continue
                if not isinstance(values, dict):
                    raise ConfigError(f"{path}, line {number}: must be a JSON object, not {_kind(values)}")
                yield Members(str(path), values, number)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_documents(path: pathlib.Path) -> Iterator[Any]:
    """The JSON values of a file that has one, or several one after another. Raises ConfigError."""
    text = read_text(path)
    decoder = json.JSONDecoder()
    place = 0
    while True:
        while place < len(text) and text[place] in " \t\r\n":
            place += 1
        if place == len(text):
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            line = text.count("\n", 0, place) + 1
            raise ConfigError(f"{path}, line {line}: is not JSON") from None
        yield value
