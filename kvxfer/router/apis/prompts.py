"""How large a prompt is, from its bytes in the body: a count of token ids, or an estimate.

Decides what is no prompt at all. Every step is a search or a count over bytes in native code, at about a nanosecond a
byte: no Python object is made of an item. The bytes are valid JSON when they come here. What else an engine asks of a
prompt (the range of ids, the order of messages) is the engine's business.
"""

from __future__ import annotations

import dataclasses
import re

from kvxfer.openai.errors import RequestError
from kvxfer.openai.scanner import Kind
from kvxfer.policy.disagg import estimate_tokens

_DIGITS_AND_COMMAS = b"0123456789, \t\r\n"
_SPACES = b" \t\r\n"
_FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
FRAME_BYTES = 29
"""What ``{"role":"user","content":""},`` takes around one message's text."""
_BASE64 = (b";base64,", b'"data"')
"""Behind one of these stands base64: a data URL, or the audio or image of a message."""
BLOBS_MAX = 512
"""So many are told from text. A message with more is estimated too long, which costs no more than a second look."""


@dataclasses.dataclass(frozen=True)
class PromptSize:
    """``tokens`` of all prompts together. ``prompts`` is None for one prompt, otherwise how many the list has."""

    tokens: int
    is_exact: bool = False
    prompts: int | None = None


def size_of_prompt(raw: bytes, kind: Kind, field: str) -> PromptSize:
    """A string or a list of token ids, or a list of such prompts. Raises RequestError that names ``field``."""
    if kind is Kind.STRING:
        if len(raw) == 2:
            raise _empty(field)
        return PromptSize(estimate_tokens(len(raw) - 2))
    if kind is not Kind.ARRAY:
        raise _no_prompt(field)
    first = _first_of(raw)
    if first == b"]":
        raise _empty(field)
    if first == b'"':
        return _size_of_texts(raw, field)
    rest = raw.translate(None, _DIGITS_AND_COMMAS)
    if rest == b"[]":
        return PromptSize(raw.count(b",") + 1, is_exact=True)
    return _size_of_lists(raw, rest, field)


def size_of_embeds(raw: bytes, kind: Kind, field: str, *, has_lists: bool) -> PromptSize:
    """Embeddings in place of a prompt. Their number of tokens is not known here. ``has_lists``: one prompt is itself a
    list of vectors, so that only what is nested deeper is a list of prompts."""
    if kind is Kind.STRING and len(raw) > 2:
        return PromptSize(1)
    if kind is not Kind.ARRAY:
        raise RequestError(f"{field}: must be a string or a list", param=field)
    if _first_of(raw) == b"]":
        raise _empty(field)
    if not has_lists:
        return PromptSize(1, prompts=_count_strings(raw)[0])
    head = raw[:64].translate(None, _SPACES)
    if not head.startswith(b"[[["):
        return PromptSize(1)
    return PromptSize(1, prompts=raw.translate(None, _SPACES).count(b"]],[[") + 1)


def size_of_messages(raw: bytes, kind: Kind, field: str, *, may_be_text: bool = False) -> PromptSize:
    """A list of messages or items; a string too where ``may_be_text``. Raises RequestError that names ``field``."""
    if may_be_text and kind is Kind.STRING:
        return size_of_prompt(raw, kind, field)
    if kind is not Kind.ARRAY:
        what = "must be a string or a list" if may_be_text else "must be a list"
        raise RequestError(f"{field}: {what}", param=field)
    if _first_of(raw) == b"]":
        raise _empty(field)
    return PromptSize(estimate_tokens(max(1, text_bytes(raw))))


def text_bytes(raw: bytes) -> int:
    """About how many bytes of text a list of messages has: without base64, and without the messages' frames."""
    count = len(raw) - FRAME_BYTES * raw.count(b'"role"')
    for mark in _BASE64:
        at = raw.find(mark)
        for _ in range(BLOBS_MAX):
            if at < 0:
                break
            begin = at + len(mark)
            if mark == b'"data"':  # a key, whose value begins with the next quote
                begin = raw.find(b'"', begin) + 1 or len(raw)
            end = raw.find(b'"', begin)
            end = len(raw) if end < 0 else end
            count -= end - begin
            at = raw.find(mark, end)
    return count


def _size_of_texts(raw: bytes, field: str) -> PromptSize:
    prompts, has_empty = _count_strings(raw)
    if has_empty:
        raise _empty(field)
    return PromptSize(estimate_tokens(max(1, len(raw) - 3 * prompts)), prompts=prompts)


def _size_of_lists(raw: bytes, rest: bytes, field: str) -> PromptSize:
    """A list of lists of ids: without digits and commas its brackets are ``[``, ``[]`` for each, ``]``."""
    prompts = len(rest) // 2 - 1
    if prompts < 1 or rest != b"[" + b"[]" * prompts + b"]":
        raise _no_prompt(field)
    if b"[]" in raw.translate(None, _SPACES):
        raise _empty(field)
    return PromptSize(raw.count(b",") + 1, is_exact=prompts == 1, prompts=prompts)


def _count_strings(raw: bytes) -> tuple[int, bool]:
    """How many strings a list of strings has, and whether one of them is empty. Once escaped backslashes and quotes are
    out of the way, every quote begins or ends a string."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"x").replace(b'\\"', b"x")
    return raw.count(b'"') // 2, b'""' in raw


def _first_of(raw: bytes) -> bytes:
    found = _FIRST_ITEM.match(raw)
    return found[1] if found else b""


def _empty(field: str) -> RequestError:
    return RequestError(f"{field}: must not be empty", param=field)


def _no_prompt(field: str) -> RequestError:
    return RequestError(f"{field}: must be a string or a list of token ids, or a list of such prompts", param=field)
