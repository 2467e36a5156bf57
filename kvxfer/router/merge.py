"""What the router adds to D's answer: to its account of the transfer which workers took which part, the attempt, and
P's own timings; to its usage the prompt tokens that P's prefix cache held.

Touches only an object that already has a ``kvxfer`` member or a usage; every other byte passes as it came.

A prompt token counts as cached once, whichever had it: both caches hold beginnings of the same prompt, so that together
they held the longer one. What D pulled from P is not cached for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvxfer.openai.sse import Event, encode_event, encode_object
from kvxfer.router.dialects import Prefilled

ACCOUNT = "kvxfer"
COUNTS_LOADED = frozenset({"vllm", "vllm-kvxfer", "vllm-mooncake"})
"""Dialects of engines that count what they loaded from P as cached."""
MARKS = (b'"kvxfer"', b'"prompt_tokens"')
"""Inside a JSON string the quotes would be escaped."""


class Merger:
    """One answer's, of a D of ``dialect``, which ``has_source`` where a P was to compute the prompt."""

    def __init__(self, dialect: str, *, has_source: bool) -> None:
        self._dialect = dialect
        self._has_source = has_source
        self._own: dict[str, Any] = {}
        """D's own account, once it was seen."""
        self._usage: dict[str, Any] = {}

    @property
    def own(self) -> dict[str, Any]:
        """D's own account, where it gave one."""
        return self._own

    @property
    def usage(self) -> dict[str, Any]:
        """As the client gets it, where it was looked at."""
        return self._usage

    @property
    def account(self) -> dict[str, Any]:
        """D's own account, without what the router added; empty until it was seen."""
        return self._own

    @staticmethod
    def is_concerned(content: bytes) -> bool:
        """Whether there may be something to add to in these bytes."""
        return any(mark in content for mark in MARKS)

    def event(self, event: Event, extra: dict[str, Any], prefilled: Prefilled | None) -> bytes:
        """The event's bytes, with ``extra`` in its account and P's share in its usage, where it has them."""
        return self._merged(event.data, encode_event, extra, prefilled) or event.raw

    def body(self, content: bytes, extra: dict[str, Any], prefilled: Prefilled | None) -> bytes:
        """As :meth:`event`, for a whole answer."""
        return self._merged(content, encode_object, extra, prefilled) or content

    def _merged(
        self, content: bytes, encode: Callable[[Any], bytes], extra: dict[str, Any], prefilled: Prefilled | None
    ) -> bytes | None:
        """None where there is nothing to add, or what could be read cannot be written again: a number like 1e999."""
        try:
            values = json.loads(content)
            if not isinstance(values, dict):
                return None
            has_account = self._add_account(values, extra)
            usage = values.get("usage")
            has_usage = self._has_source and self._add_usage(usage, prefilled)
            if isinstance(usage, dict):
                self._usage = usage
            return encode(values) if has_account or has_usage else None
        except (ValueError, RecursionError):
            return None

    def _add_account(self, values: dict[str, Any], extra: dict[str, Any]) -> bool:
        account = values.get(ACCOUNT)
        if isinstance(account, dict):
            self._own = dict(account)
            account.update(extra)
            return True
        params = values.get("kv_transfer_params")  # where vLLM puts it
        if isinstance(params, dict) and isinstance(params.get(ACCOUNT), dict):
            self._own = params[ACCOUNT]
        return False

    def _add_usage(self, usage: Any, prefilled: Prefilled | None) -> bool:
        if not isinstance(usage, dict) or not _is_count(usage.get("prompt_tokens")):
            return False
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        said = details.get("cached_tokens")
        cached = self._cached_tokens(usage["prompt_tokens"], said if _is_count(said) else None, prefilled)
        if cached is None or cached == said:
            return False
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return True

    def _cached_tokens(self, prompt_tokens: int, said: int | None, prefilled: Prefilled | None) -> int | None:
        """None where D's own count stands."""
        theirs = None if prefilled is None else prefilled.cached_tokens
        if self._dialect in COUNTS_LOADED:
            ours = self._own_cached_of_vllm(prompt_tokens, said)
        elif self._own.get("prefill") == "remote" and theirs is not None:
            ours = said
        else:  # it computed the prompt itself
            return None
        if ours is None and theirs is None:
            return None
        return min(prompt_tokens, max(ours or 0, theirs or 0))

    def _own_cached_of_vllm(self, prompt_tokens: int, said: int | None) -> int | None:
        """What D's own cache held: vLLM counts what it loaded from P as cached too, and then all but the last token."""
        own: Any = self._own.get("cached_tokens")
        if _is_count(own):
            return int(own)
        return 0 if said is not None and said >= prompt_tokens - 1 else said


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
