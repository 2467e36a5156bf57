"""A client's request as the router carries it: read once, never changed, the same for every attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvxfer.openai.errors import RequestError
from kvxfer.openai.schemas import AnyRequest, CompletionRequest
from kvxfer.openai.sse import encode_object
from kvxfer.openai.transfer_params import TransferParams
from kvxfer.policy.disagg import estimate_tokens
from kvxfer.router.dialects import leg_body


@dataclasses.dataclass(frozen=True)
class Inbound:
    """``values`` is the client's own JSON object; ``leg_headers`` are what both legs get."""

    path: str
    values: dict[str, Any]
    parsed: AnyRequest
    leg_headers: Mapping[str, str]
    request_id: str
    arrived_s: float

    def prompt_tokens(self) -> tuple[int, bool]:
        """About how many tokens the prompt has, and whether that is exact."""
        if isinstance(self.parsed, CompletionRequest):
            prompt = self.parsed.prompt
            return (estimate_tokens(len(prompt)), False) if isinstance(prompt, str) else (len(prompt), True)
        return estimate_tokens(sum(len(message.content or "") for message in self.parsed.messages)), False

    def content(self, dialect: str, params: TransferParams | None) -> bytes:
        """The body of one leg: the client's own, with ``params`` in place of any that the client sent, in the words of
        an engine of that dialect.

        Raises RequestError for what could be read but cannot be written again: a number like 1e999, nesting at the
        very limit.
        """
        try:
            return encode_object(leg_body(dialect, self.values, params, self.leg_headers.get("traceparent")))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body cannot be passed on as JSON: {error}") from None
