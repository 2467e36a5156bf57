"""A client's request as the router carries it: read once, never changed, the same for every attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxfer.openai.schemas import AnyRequest, ChatCompletionRequest, CompletionRequest
from kvxfer.openai.transfer_params import TransferParams
from kvxfer.policy.capacity import Need
from kvxfer.policy.disagg import estimate_tokens
from kvxfer.router.dialects import leg_body


@dataclasses.dataclass(frozen=True)
class Inbound:
    """``body`` is the client's own JSON object as it came, with members ``names``; both legs get ``leg_headers``."""

    path: str
    body: bytes
    names: frozenset[str]
    parsed: AnyRequest
    leg_headers: Mapping[str, str]
    request_id: str
    arrived_s: float

    def needs(self) -> tuple[Need, Need]:
        """What the request takes at least, and what it will take by the router's estimate."""
        tokens, is_exact = self.prompt_tokens()
        asked = self.parsed.max_new_tokens if self.token_limit_field is not None else None
        is_whole = is_exact and "truncate_prompt_tokens" not in self.names  # vLLM's: the engine cuts the prompt itself
        need = Need(tokens if is_whole else 1, asked or 1)
        return need, Need(max(1, tokens), self.parsed.max_new_tokens or 1)

    @property
    def prompt_field(self) -> str:
        """The field of the body that holds the prompt."""
        return "prompt" if isinstance(self.parsed, CompletionRequest) else "messages"

    @property
    def token_limit_field(self) -> str | None:
        """The field by which the client asked for a number of tokens; None where it did not."""
        if isinstance(self.parsed, ChatCompletionRequest) and self.parsed.max_completion_tokens is not None:
            return "max_completion_tokens"
        return None if self.parsed.max_tokens is None else "max_tokens"

    def prompt_tokens(self) -> tuple[int, bool]:
        """About how many tokens the prompt has, and whether that is exact."""
        if isinstance(self.parsed, CompletionRequest):
            prompt = self.parsed.prompt
            return (estimate_tokens(len(prompt)), False) if isinstance(prompt, str) else (len(prompt), True)
        return estimate_tokens(sum(len(message.content or "") for message in self.parsed.messages)), False

    def content(self, dialect: str, params: TransferParams | None) -> bytes:
        """The body of one leg: the client's own, with ``params`` in place of any that the client sent, in the words of
        an engine of that dialect.
        """
        return leg_body(dialect, self.body, self.names, params, self.leg_headers.get("traceparent"))
