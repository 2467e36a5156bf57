"""The keys of prompts, found the plainest way: from what ``json`` of Python reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from kvxfer._native import _core as native
from kvxfer.openai.chains import ID_BYTES, INTERVAL_BYTES, KEYS_MAX

MARKS = (
    *("TextPart", "Text", "NamePart", "Name", "NumberPart", "Number", "Ids", "True", "False", "Null"),
    *("ObjectBegin", "ObjectEnd", "ListBegin", "ListEnd", "ItemEnd", "Member", "Given"),
)


class Written(str):
    """A number as it is written."""

    __slots__ = ()


class Members(list[tuple[str, Any]]):
    """An object's members as they stand."""


def parsed(text: bytes) -> Any:
    return json.loads(text.decode(), parse_int=Written, parse_float=Written, object_pairs_hook=Members)


class Full(Exception):
    """The chain has all its keys."""


class ChainModel:
    def __init__(self, secret: bytes, before: int, *, has_keys: bool = True) -> None:
        self.secret, self.has_keys = secret, has_keys
        self.words = struct.pack("<Q", before)
        self.keys: list[int] = []
        self.sizes: list[int] = []
        self.size = self.held = 0

    def value(self) -> int:
        return native.siphash(self.secret, self.words)

    def piece(self, content: bytes, mark: str) -> None:
        self.words += content + bytes(-len(content) % 8) + struct.pack("<Q", len(content) << 8 | MARKS.index(mark) + 1)

    def counted(self, content: bytes, mark: str) -> None:
        self.piece(content, mark)
        self.size += len(content)
        self.held += len(content)

    def cut(self) -> None:
        self.held = 0
        if not self.has_keys:
            return
        self.keys.append(self.value())
        self.sizes.append(self.size)
        self.words = struct.pack("<Q", self.keys[-1])
        if len(self.keys) == KEYS_MAX:
            raise Full

    def content(self, content: bytes, part: str, whole: str) -> None:
        while len(content) >= (room := INTERVAL_BYTES - self.held):
            self.counted(content[:room], part)
            self.cut()
            content = content[room:]
        self.counted(content, whole)

    def json_value(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self.piece(b"", {None: "Null", True: "True", False: "False"}[value])
        elif isinstance(value, Written):
            self.content(value.encode(), "NumberPart", "Number")
        elif isinstance(value, str):
            self.content(value.encode("utf-8", "surrogatepass"), "TextPart", "Text")
        elif isinstance(value, Members):
            self.piece(b"", "ObjectBegin")
            for name, inner in value:
                self.content(name.encode("utf-8", "surrogatepass"), "NamePart", "Name")
                self.json_value(inner)
            self.piece(b"", "ObjectEnd")
        else:
            self.piece(b"", "ListBegin")
            for inner in value:
                self.json_value(inner)
            self.piece(b"", "ListEnd")

    def item(self, value: Any) -> None:
        self.json_value(value)
        self.piece(b"", "ItemEnd")
        self.cut()

    def text_or_item(self, value: Any) -> None:
        if not isinstance(value, str) or isinstance(value, Written):
            return self.item(value)
        self.json_value(value)
        if self.held:
            self.cut()
        return None

    def items(self, value: Any) -> None:
        if not isinstance(value, list) or isinstance(value, Members):
            return self.text_or_item(value)
        for one in value:
            self.item(one)
        return None

    def id_room(self) -> int:
        return (INTERVAL_BYTES - self.held) // ID_BYTES

    def ids(self, values: list[Any]) -> None:
        run: list[int] = []

        def put() -> None:
            if run:
                self.counted(struct.pack(f"<{len(run)}I", *run), "Ids")
            run.clear()
            if not self.id_room():
                self.cut()

        for value in values:
            if isinstance(value, Written) and value.isdecimal() and int(value) < 1 << 32:
                run.append(int(value))
                if len(run) == self.id_room():
                    put()
            else:
                put()
                self.json_value(value)
                if not self.id_room():
                    self.cut()
        put()
        self.piece(b"", "ListEnd")
        if self.held:
            self.cut()

    def prompts(self, value: Any) -> None:
        if not isinstance(value, list) or isinstance(value, Members):
            self.text_or_item(value)
        elif not value:
            pass
        elif isinstance(value[0], str) and not isinstance(value[0], Written):
            self.text_or_item(value[0])
        elif isinstance(value[0], list) and not isinstance(value[0], Members):
            self.ids(value[0])
        else:
            self.ids(value)


def chain_of(
    secret: bytes, root: int, parts: Sequence[tuple[str, bytes]], *, is_list_of_prompts: bool = False
) -> tuple[list[int], list[int]]:
    """Keys and sizes of the named values, the last of which is the prompt."""
    model = ChainModel(secret, root)
    try:
        for at, (name, text) in enumerate(parts):
            model.piece(name.encode(), "Member")
            if is_list_of_prompts and at == len(parts) - 1:
                model.prompts(parsed(text))
            else:
                model.items(parsed(text))
    except Full:
        pass
    return model.keys, model.sizes


def root_of(secret: bytes, texts: Sequence[bytes], members: Sequence[tuple[str, bytes]]) -> int:
    model = ChainModel(secret, 0, has_keys=False)
    for text in texts:
        model.piece(text, "Given")
    for name, value in members:
        model.piece(name.encode(), "Member")
        model.json_value(parsed(value))
    return model.value()
