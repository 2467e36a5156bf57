"""A client's request as the router carries it: read once, never changed, the same for every attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxfer.openai.schemas import AnyRequest, CompletionRequest
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
        limit = self.parsed.token_limit
        is_whole = is_exact and "truncate_prompt_tokens" not in self.names  # vLLM's: the engine cuts the prompt itself
        need = Need(tokens if is_whole else 1, 1 if limit is None else limit[1])
        return need, dataclasses.replace(need, prompt_tokens=max(1, tokens))

    @property
    def prompt_field(self) -> str:
        """The field of the body that holds the prompt."""
        return "prompt" if isinstance(self.parsed, CompletionRequest) else "messages"

    @property
    def token_limit_field(self) -> str | None:
        """The field by which the client asked for a number of tokens; None where it did not."""
        limit = self.parsed.token_limit
        return None if limit is None else limit[0]

    def prompt_tokens(self) -> tuple[int, bool]:
        """About how many tokens the prompt has, and whether that is exact."""
        if isinstance(self.parsed, CompletionRequest):
            prompt = self.parsed.prompt
            is_exact = isinstance(prompt, list) and self.parsed.is_one_sequence
            return (len(prompt), True) if is_exact else (estimate_tokens(len(prompt or "")), False)
        return estimate_tokens(sum(message.text_chars for message in self.parsed.messages)), False

    def content(self, dialect: str, params: TransferParams | None) -> bytes:
        """The body of one leg: the client's own, with ``params`` in place of any that the client sent, in the words of
        an engine of that dialect.
        """
        return leg_body(dialect, self.body, self.names, params, self.leg_headers.get("traceparent"))
