"""Changes of an input: of its bytes, of the JSON in it, of the protobuf message that it is."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

BYTES_MAX = 4096
TOKENS = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 8,
    b"\xff" * 9 + b"\1",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\n\n",
    b"data: ",
    b'"',
    b"{}",
    b"[]",
)
NUMBERS = (0, -1, 255, 65536, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, 1 << 63, (1 << 64) - 1, 1 << 64)
ODD_JSON = (
    *map(str, NUMBERS),
    *("null", "true", "false", "1.0", "-0.0", "1e999", "-1e999", "1e-999", "NaN", "Infinity"),
    *("9" * 25, "9" * 4300, "9" * 4301, '""', '"0"', '" "', '"\\ud800"', '"\\u0000"', '"\\n"', '"\u00e9"'),
    *("[]", "{}", "[null]", "[[]]", '{"":0}', '[{"":[]}]', '"' + "a" * 1100 + '"'),
)
ODD_TEXTS = ("", "a", "\0", "\n", "\u00e9", "a" * 64, "a" * 65, "a" * 1024, "a" * 1025)
_VALUE = re.compile(r'["\[{\-0-9tfn]')
_DECODER = json.JSONDecoder()


class Mutator:
    """Makes inputs of others. ``message`` is the protobuf message that they are of, if any."""

    def __init__(self, source: random.Random, message: Any = None) -> None:
        self._random = source
        self._message = message

    def child(self, parents: Sequence[bytes]) -> bytes:
        """Of one of ``parents``, or of two."""
        draw = self._random
        data = draw.choice(parents)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            kinds: list[Callable[[bytes, Sequence[bytes]], bytes]] = [self._bytes, self._bytes, self._splice]
            if b"{" in data:
                kinds += [self._json] * 4
            if self._message is not None:
                kinds += [self._fields] * 4
            data = draw.choice(kinds)(data, parents)
        return data[:BYTES_MAX]

    def _bytes(self, data: bytes, _: Sequence[bytes]) -> bytes:
        draw = self._random
        at = draw.randint(0, len(data))
        end = min(len(data), at + draw.choice((0, 1, 1, 2, 4, 8, 32)))
        some = data[at:end]
        kind = draw.randrange(7)
        if kind == 0 and some:
            some = bytes([some[0] ^ 1 << draw.randrange(8)]) + some[1:]
        elif kind == 1:
            some = draw.randbytes(len(some))
        elif kind == 2:
            some = b""
        elif kind == 3:
            some = some * 2
        elif kind == 4:
            some = draw.choice(TOKENS) + some
        elif kind == 5:
            number, size = draw.choice(NUMBERS) + draw.choice((-1, 0, 0, 1)), draw.choice((1, 2, 4, 8))
            some = (number % (1 << 8 * size)).to_bytes(size, draw.choice(("little", "big")))
        else:
            some = str(draw.choice(NUMBERS)).encode()
        return data[:at] + some + data[end:]

    def _splice(self, data: bytes, others: Sequence[bytes]) -> bytes:
        draw = self._random
        other = draw.choice(others)
        begin = draw.randint(0, len(other))
        end = draw.randint(begin, len(other))
        at = draw.randint(0, len(data))
        return data[:at] + other[begin:end] + data[draw.choice((at, min(len(data), at + end - begin), len(data))) :]

    def _json(self, data: bytes, others: Sequence[bytes]) -> bytes:
        """A value out of it becomes an odd one, goes, comes twice, or is wrapped up."""
        draw = self._random
        text = data.decode("latin-1")
        found = self._value(text)
        if found is None:
            return self._bytes(data, others)
        begin, end = found
        value = text[begin:end]
        is_name = text[end : end + 2].lstrip().startswith(":")
        kind = draw.randrange(6)
        if is_name:
            odd = draw.choice((value, value, '""', '"\\ud800"', '"kind"'))
            new = f"{value}:{self._odd()},{odd}" if kind < 3 else odd
        elif kind < 3:
            new = self._odd()
        elif kind == 3:
            new = draw.choice((f"[{value}]", f"{{{json.dumps('a')}:{value}}}", f"{value},{value}"))
        elif kind == 4:
            other = self._value(text)
            new = value if other is None else text[other[0] : other[1]]
        else:
            new = ""
            begin = begin - 1 if text[begin - 1 : begin] == "," else begin
        return (text[:begin] + new + text[end:]).encode("latin-1")

    def _value(self, text: str) -> tuple[int, int] | None:
        begins = [match.start() for match in _VALUE.finditer(text)]
        for begin in self._random.sample(begins, min(8, len(begins))):
            try:
                return begin, _DECODER.raw_decode(text, begin)[1]
            except (ValueError, RecursionError):
                continue
        return None

    def _odd(self) -> str:
        draw = self._random
        if draw.randrange(6):
            return draw.choice(ODD_JSON)
        depth = draw.choice((2, draw.randint(100, 450), draw.randint(340, 400), 2000))
        opening, closing = draw.choice((("[", "]"), ('{"":', "}")))
        return opening * depth + draw.choice(("", "0", "1e999")) * (opening != "[") + closing * depth

    def _fields(self, data: bytes, others: Sequence[bytes]) -> bytes:
        """A field of it, or of a message in it, becomes an odd one, goes, or comes many times."""
        draw = self._random
        try:
            whole = self._message.FromString(data)
        except DecodeError:
            return self._bytes(data, others)
        inner = [whole]
        for message in inner:
            for field, value in message.ListFields():
                if field.type == FieldDescriptor.TYPE_MESSAGE:
                    inner += value if _is_repeated(message, field) else [value]
        message = draw.choice([message for message in inner if message.DESCRIPTOR.fields])
        field = draw.choice(message.DESCRIPTOR.fields)
        is_repeated = _is_repeated(message, field)
        values = getattr(message, field.name)
        if draw.randrange(4) == 0:
            message.ClearField(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if not is_repeated:
                values.SetInParent()
            else:
                for _ in range(draw.choice((1, 1, 65))):
                    values.add().CopyFrom(values[0])
        else:
            odd = self._scalar(field)
            try:
                if is_repeated:
                    values.extend([odd] * draw.choice((1, 1, 33)))
                else:
                    setattr(message, field.name, odd)
            except (ValueError, TypeError, OverflowError):
                return data
        return bytes(whole.SerializeToString())

    def _scalar(self, field: Any) -> Any:
        draw = self._random
        if field.type == FieldDescriptor.TYPE_STRING:
            return draw.choice(ODD_TEXTS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return bytes(draw.choice((0, 1, 15, 16, 17, 32)))
        return draw.choice(NUMBERS)


def _is_repeated(message: Any, field: Any) -> bool:
    return hasattr(getattr(message, field.name), "extend")
