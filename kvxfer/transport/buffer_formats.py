"""Whether the format of a buffer (PEP 3118) says that its items are plain numbers and bytes, which mean the same in
another process. Decides that from the format's text and the size of an item; must never see the memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import struct

TOKEN = re.compile(
    r"(?P<order>[@=<>!^])|\((?P<shape>\d{1,18}(?:,\d{1,18})*)\)|(?P<count>\d{1,18})|(?P<open>T\{)|(?P<close>\})"
    r"|(?P<name>:[^:]*:)|(?P<kind>Z[fdg]|[?cbBhHiIlLqQnNefdgspuwx])"
)
"""Numbers, characters, bytes, padding and structures of them. No objects (``O``), addresses (``P``, ``&``), functions
(``X``) or C strings (``z``, and ``Z`` where it begins no complex number)."""
SIZES = {"g": ctypes.sizeof(ctypes.c_longdouble), "u": ctypes.sizeof(ctypes.c_wchar), "w": 4}
"""Those that :mod:`struct` does not have."""


@dataclasses.dataclass
class _Structure:
    """The sizes of what was read of a structure: without gaps, and with those of C's alignment."""

    count: int
    packed: int = 0
    aligned: int = 0
    alignment: int = 1

    def add(self, count: int, packed: int, aligned: int, alignment: int) -> None:
        self.packed += count * packed
        self.aligned = _up(self.aligned, alignment) + count * aligned
        self.alignment = max(self.alignment, alignment)


def is_plain(text: str, item_bytes: int) -> bool:
    """Whether items of ``item_bytes`` in the format ``text`` are numbers and bytes alone, all of whose bytes are in it.

    A format hides bytes where it is shorter than an item: ctypes says ``B`` of a union and of a packed structure,
    whatever is in it. Gaps of C's alignment are allowed, but not beside such a ``B``: they may be the rest of one.
    ctypes gives a number an order of bytes, and such a ``B`` none; numpy gives none where it is the machine's.
    """
    whole = _Structure(1)
    inner: list[_Structure] = [whole]
    order, count, at, may_hide, has_order = "@", 1, 0, False, False
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            return False
        at = token.end()
        if found := token["order"]:
            order, has_order = found, True
        elif found := token["shape"]:
            count *= math.prod(map(int, found.split(",")))
        elif found := token["count"]:
            count *= int(found)
        elif token["open"]:
            inner.append(_Structure(count))
            count = 1
        elif token["close"]:
            if len(inner) == 1:
                return False
            one = inner.pop()
            inner[-1].add(one.count, one.packed, _up(one.aligned, one.alignment), one.alignment)
        elif found := token["kind"]:
            size, alignment = _size(found, order)
            may_hide = may_hide or (found == "B" and not has_order)
            inner[-1].add(count, size, size, alignment)
            count, has_order = 1, False
    if len(inner) != 1:
        return False
    may_hide = may_hide and ("<" in text or ">" in text)
    return whole.packed == item_bytes or (_up(whole.aligned, whole.alignment) == item_bytes and not may_hide)


def _size(kind: str, order: str) -> tuple[int, int]:
    """Of one, and what its address is a multiple of, in bytes."""
    parts, kind = (2, kind[1]) if kind[0] == "Z" else (1, kind)
    size = SIZES.get(kind) or struct.calcsize(kind if order in "@^" or kind in "nN" else f"={kind}")
    return parts * size, size


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
