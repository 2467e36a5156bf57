"""Facts: the settings of an engine that decide what its KV means, by name. Their digest is compared
(``config_fingerprint``); the short text here says which of them differ, and is never compared itself.

Decides how facts fit a bounded text, and what two texts say of a difference; must never know an engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

FACTS_BYTES_MAX = 4096
"""The longest text of facts that a record carries."""
AGENT_BYTES_MAX = 1 << 15
"""All texts of facts of an agent's pools together, in its signed metadata."""
VALUE_LENGTHS = (48, 20, 0)
"""A longer value is its beginning and a digest. The first of these lengths with which the text fits is taken."""
DIGEST_DIGITS = 8
OTHERS = "others"
"""Stands for the facts that did not fit, with a digest of all of them."""
NOT_SET = "not set"
_NAME = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,120}")


def digest_of(facts: Mapping[str, str]) -> str:
    """SHA-256 over all names and whole values: 64 hex digits."""
    return hashlib.sha256(_json(facts).encode()).hexdigest()


def facts_text(facts: Mapping[str, str], pools: int = 1) -> str:
    """What a record carries of ``facts``, for an agent of so many ``pools``: ASCII of at most FACTS_BYTES_MAX bytes,
    from which :func:`differences` tells names and values. Values that are too long are told by their beginning and a
    digest, facts beyond the bound by one digest."""
    bytes_max = min(FACTS_BYTES_MAX, AGENT_BYTES_MAX // pools)
    for length in VALUE_LENGTHS:
        text = _json({name: _short(value, length) for name, value in facts.items()})
        if len(text) <= bytes_max:
            return text
    names, kept = sorted(facts), {name: _short(facts[name], 0) for name in facts}
    fits = len(names)
    while fits > 0:
        fits -= max(1, fits // 8)
        others = {name: facts[name] for name in names[fits:]}
        text = _json({**{name: kept[name] for name in names[:fits]}, OTHERS: _short(_json(others), 0)})
        if len(text) <= bytes_max:
            return text
    return ""


def differences(ours: str, theirs: str) -> tuple[tuple[str, str, str], ...]:
    """(name, our value, their value) of each fact in which two texts of :func:`facts_text` differ, by name. Nothing
    for texts that are not of that form, or say nothing."""
    mine, yours = _read(ours), _read(theirs)
    if not mine or not yours:
        return ()
    names = sorted(name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name))
    return tuple((name, mine.get(name, NOT_SET), yours.get(name, NOT_SET)) for name in names)


def _json(facts: Mapping[str, str]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _short(value: str, length: int) -> str:
    if len(value) <= max(length, DIGEST_DIGITS + 1):
        return value
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]
    return f"{value[:length]}#{digest}"


def _read(text: str) -> dict[str, str]:
    """A peer may have written it: what is not of the form is nothing."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    is_of_form = all(_NAME.fullmatch(name) and isinstance(value, str) for name, value in values.items())
    return values if is_of_form else {}
