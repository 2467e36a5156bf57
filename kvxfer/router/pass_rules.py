"""Which paths pass through to which workers: ``--pass-through PATH=POOL``, read and checked.

Decides that no rule hides a route of the router, and which paths every server reads alike. It must never know how a
request is passed on.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable

from kvxfer.errors import ConfigError

OPTION = "pass_through"
RULES_MAX = 64
POOL_CHARS_MAX = 256
ROLE_POOLS = ("prefill", "decode", "engine")
"""Pools by what a worker does; ``engine`` is one that serves whole requests. Every other word is a model's name."""
OWN_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/", "/v1/messages", "/generate"),
    *("/v1/messages/count_tokens", "/v1/embeddings"),
    *("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/tokenize", "/detokenize"),
    *("/v1/models", "/v1/models/", "/v1/workers", "/workers", "/workers/", "/live", "/health", "/ready", "/metrics"),
    *("/docs", "/docs/", "/openapi.json", "/ui", "/ui/"),
)
"""The router's own routes; of one that ends with ``/`` all that is below it. A test compares them with the
application's."""

_PATH = re.compile(r"/[A-Za-z0-9._~!$&'()*+;:@/-]*")

_READ_OTHERWISE = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd%\\#?]")
"""In a path that was percent-decoded once: what is decoded again (``%``), taken for a slash (a backslash) or for the
end of the path (NUL, ``#``, ``?``), and what stands for bytes that are no UTF-8: overlong forms of dots and slashes."""
_DOTS = (".", "..")


def is_read_alike(raw_path: bytes, path: str) -> bool:
    """Whether every server, and every proxy before one, takes a path for one below the rule that matched it.
    ``raw_path`` is as the client sent it, ``path`` is that percent-decoded once.

    A segment counts without what is behind a ``;`` and without blanks, as some drop both; compatibility forms of
    letters count as these letters.
    """
    if b"%2f" in raw_path.lower():
        return False
    forms = [path] if path.isascii() else [path, unicodedata.normalize("NFKC", path)]
    for form in forms:
        *inner, last = (segment.partition(";")[0].strip() for segment in form.split("/")[1:])
        if _READ_OTHERWISE.search(form) is not None or last in _DOTS or any(one in ("", *_DOTS) for one in inner):
            return False
    return True


@dataclasses.dataclass(frozen=True)
class PassRule:
    """``prefix`` with ``/`` at its end stands for all below it, without for itself. It is the rule's metric label."""

    prefix: str
    pool: str

    @property
    def model(self) -> str:
        """The one model that requests go to; empty where the pool is a role's."""
        return "" if self.pool in ROLE_POOLS else self.pool

    def matches(self, path: str) -> bool:
        """Whether the rule is for a path, which is percent-decoded."""
        return path.startswith(self.prefix) if self.prefix.endswith("/") else path == self.prefix


def read_rules(texts: Iterable[str]) -> tuple[PassRule, ...]:
    """The rules, the longest prefix first: the first that matches counts. Raises ConfigError by the rule's own text."""
    rules: dict[str, PassRule] = {}
    for text in texts:
        rule = _read(text)
        if rule.prefix in rules:
            raise ConfigError(f"{OPTION} {text!r:.200}: the path {rule.prefix} is given twice")
        rules[rule.prefix] = rule
    if len(rules) > RULES_MAX:
        raise ConfigError(f"{OPTION}: at most {RULES_MAX} rules, not {len(rules)}")
    return tuple(sorted(rules.values(), key=lambda rule: len(rule.prefix), reverse=True))


def _read(text: str) -> PassRule:
    prefix, mark, pool = text.partition("=")
    shown = f"{OPTION} {text!r:.200}"
    if not mark or not 0 < len(pool) <= POOL_CHARS_MAX:
        raise ConfigError(f"{shown}: must be PATH=POOL; POOL is {', '.join(ROLE_POOLS)}, or a model's name")
    if _PATH.fullmatch(prefix) is None or not is_read_alike(prefix.encode(), prefix):
        raise ConfigError(f"{shown}: PATH must be a path such as /v1/audio/, without dots, doubles or percent signs")
    rule = PassRule(prefix, pool)
    for own in OWN_PATHS:
        if rule.matches(own) or (own.endswith("/") and prefix.startswith(own)):
            raise ConfigError(f"{shown}: it would hide the router's own route {own}")
    return rule
