"""Looks at a client's JSON body once, and changes fields of it in its own bytes.

Decides whether a body is a JSON object, where its members are, and how the bytes read with other members in place of
some. It must never know what a member means, nor which engine reads it.

A body is accepted exactly if ``json.loads`` accepts its bytes and makes a dict of them, with these differences, each of
them on the strict side, since another parser behind the router may read such bytes otherwise or not at all:

- UTF-8 only, with or without a byte order mark (RFC 8259, section 8.1). ``json.loads`` also reads UTF-16 and UTF-32,
  and surrogates that are encoded as if they were characters.
- ``NaN``, ``Infinity`` and ``-Infinity`` are refused: they are no JSON, and the router has always refused them.
- Containers are nested at most ``DEPTH_MAX`` deep. Python's own bound depends on its version and its caller's stack.
- At most ``MEMBERS_MAX`` members stand in the outer object, which bounds what a scan keeps beside the body: 48 KiB.
- An integer has at most 4300 digits, whatever this process has set with ``sys.set_int_max_str_digits``.

Escaped surrogates without a partner are accepted, as ``json.loads`` does: a name or value then has them too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import NamedTuple

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError

DEPTH_MAX = native.JSON_DEPTH_MAX
MEMBERS_MAX = native.JSON_MEMBERS_MAX

Kind = native.JsonKind
Fields = native.JsonFields
"""Names to look for, prepared once: ``Fields(["model", "stream"]).scan(body)``. Above 16 KiB the GIL is free meanwhile.
The calling thread waits, so an event loop gives a body of megabytes to another thread."""
Scan = native.JsonScan


class JsonMember(NamedTuple):
    """One member of the outer object: its decoded name, and where its key and value begin and end in the body."""

    name: str
    kind: native.JsonKind
    key: tuple[int, int]
    value: tuple[int, int]


def members_of(scan: native.JsonScan) -> list[JsonMember]:
    """Every member in the order of the body, also those whose name occurs again."""
    return [JsonMember(*member) for member in scan.members()]


def raw(scan: native.JsonScan, name: str) -> memoryview | None:
    """The bytes of a field's value as the client wrote them; None where the body has no such field."""
    span = scan.span(name)
    return None if span is None else memoryview(scan.body)[slice(*span)]


def replace(scan: native.JsonScan, changes: Mapping[str, bytes | None]) -> list[bytes | memoryview]:
    """The body with each named field's value in place of any that it has, or without it (None), in pieces.

    Every occurrence of a named field goes, however its key is spelled. The new ones are put in at the front, in the
    order of ``changes``; all other bytes are the body's own. A value that is not JSON raises InvalidArgumentError.
    """
    if not changes:
        return [scan.body]
    view = memoryview(scan.body)
    spans, has_members = scan.without(list(changes))
    texts = [_member(name, value) for name, value in changes.items() if value is not None]
    front = b",".join(texts) + (b"," if texts and has_members else b"")
    pieces: list[bytes | memoryview] = [view[: scan.open + 1], *(view[start:end] for start, end in spans)]
    if front:
        pieces.insert(1, front)
    return pieces


def _member(name: str, value: bytes) -> bytes:
    try:
        native.check_json(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"the new value of {name!r} is {error}") from None
    return _key(name) + value


@functools.lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return json.dumps(name).encode("ascii") + b":"
