"""The router's settings that decide which workers a request gets, as one text: what a sweep compares as policies.

Decides which settings these are. What they mean is the router's own.
"""

from __future__ import annotations

import dataclasses
import re

from kvxfer.errors import ConfigError

NAMES = ("local_prefill", "min_remote_prefill_tokens", "on_prefill_failure", "recompute_per_s")


def read(text: str) -> dict[str, str]:
    """Fields of RouterOptions with their values: ``local-prefill=off min-remote-prefill-tokens=256``, with ``+`` or
    spaces between them; empty and ``default``: none. Raises ConfigError for a setting that decides no placement. A bad
    value is the router's to refuse."""
    found: dict[str, str] = {}
    for word in re.split(r"[ +]+", text.strip()):
        if word in ("", "default"):
            continue
        name, equals, value = word.partition("=")
        field = name.replace("-", "_")
        if not equals or field not in _names():
            known = ", ".join(name.replace("_", "-") for name in _names())
            raise ConfigError(f"policy: {word!r:.100} is not NAME=VALUE with one of the names {known}")
        found[field] = value
    return found


def _names() -> list[str]:
    """NAMES, and ``policy`` and what begins so where the router has such settings."""
    from kvxfer.router.options import RouterOptions

    fields = [field.name for field in dataclasses.fields(RouterOptions)]
    return [name for name in fields if name in NAMES or name.startswith(("policy", "placement"))]
