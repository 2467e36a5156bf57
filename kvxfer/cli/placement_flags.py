"""The router's settings that decide which workers a request gets, as one text: what a sweep compares as policies.

Decides which settings these are. What they mean is the router's own.
"""

from __future__ import annotations

import dataclasses
import re

from kvxfer.errors import ConfigError

NAMES = (
    "local_prefill",
    "policy",
    "part_prefixes",
    "min_remote_prefill_tokens",
    "on_prefill_failure",
    "recompute_per_s",
)


def read(text: str) -> dict[str, str]:
    """Fields of RouterOptions with their values: ``seconds``, which is ``policy=seconds``, or ``local-prefill=off
    min-remote-prefill-tokens=256``, with ``+`` or spaces between them; empty and ``default``: none. Raises ConfigError
    for a setting that decides no placement. A bad value is the router's to refuse."""
    found: dict[str, str] = {}
    for word in re.split(r"[ +]+", text.strip()):
        if word in ("", "default"):
            continue
        if word in _policies():
            found["policy"] = word
            continue
        name, equals, value = word.partition("=")
        field = name.replace("-", "_")
        if not equals or field not in _names():
            known = ", ".join(name.replace("_", "-") for name in _names())
            raise ConfigError(f"policy: {word!r:.100} is not NAME=VALUE with one of the names {known}")
        found[field] = value
    return found


def _policies() -> tuple[str, ...]:
    from kvxfer.router.options import POLICIES

    return POLICIES


def _names() -> list[str]:
    """NAMES, in the order of the router's settings."""
    from kvxfer.router.options import RouterOptions

    return [field.name for field in dataclasses.fields(RouterOptions) if field.name in NAMES]
