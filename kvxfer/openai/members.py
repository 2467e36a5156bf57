"""Changes single members of a JSON object in its own bytes: every other member stays as it came.

A body that is decoded and written again may grow (``\\uXXXX`` for each letter outside ASCII), shrink, or say another
number. Decides where a member begins and ends; it must never know what one means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from kvxfer.openai.errors import RequestError

_SPACE = re.compile(r"[ \t\n\r]*")
_SPACES = b" \t\n\r"
_DECODER = json.JSONDecoder()


def with_members(
    body: bytes, names: Collection[str], added: Mapping[str, Any], *, without: Collection[str] = ()
) -> bytes:
    """The JSON object ``body`` with the members ``added`` at its end. Members with the same names, and those named in
    ``without``, are removed.

    ``body`` is one that :func:`kvxfer.openai.schemas.load_object` takes, and ``names`` are the names of its members.
    The object is parsed only where a member has to be removed. It grows by no more than the added members take, written
    compactly in ASCII, with a comma each. Raises RequestError for nesting at the very limit.
    """
    texts = [_encode(name) + b":" + _encode(value) for name, value in added.items()]
    dropped = {*added, *without}
    if not dropped.isdisjoint(names):
        text = body.decode("utf-8")
        try:
            members = _members(text)
        except RecursionError:  # at the very limit: there is a little less room here than where it was first read
            raise RequestError("the body is not valid JSON: nested too deep") from None
        kept = [text[start:end].encode("utf-8") for name, start, end in members if name not in dropped]
        return b"{" + b",".join([*kept, *texts]) + b"}"
    if not texts:
        return body
    head = body.rstrip(_SPACES)[:-1].rstrip(_SPACES)
    return head + (b"," if names else b"") + b",".join(texts) + b"}"


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _members(text: str) -> list[tuple[str, int, int]]:
    """Name, start and end of each member of a valid object, without the spaces around it."""
    found: list[tuple[str, int, int]] = []
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        start = at
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        _, at = _DECODER.raw_decode(text, at)
        found.append((name, start, at))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
