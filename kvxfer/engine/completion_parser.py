"""From an HTTP body to a request of the engine: tokens, sampling, legs, and whether it can ever fit.

It decides what is refused before the engine sees it, naming the field. It must never know of sockets or of other
requests. Tokenising is slow: :meth:`CompletionParser.completion` and :meth:`CompletionParser.chat` run outside the
event loop."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer.engine.model import LoadedModel
from kvxfer.engine.request import Leg, OtherLeg, Request
from kvxfer.engine.sampling import SamplingParams
from kvxfer.engine.schemas import ChatCompletionBody, CompletionBody, parse_chat, parse_completion
from kvxfer.engine.unsupported import IgnoredFields
from kvxfer.errors import DoesNotFitError, InvalidArgumentError, RefusedError
from kvxfer.openai.errors import RequestError
from kvxfer.openai.transfer_params import PARAM, Part, TransferParams, parse_transfer_params
from kvxfer.types import Role


@dataclasses.dataclass(frozen=True)
class ParsedCompletion:
    """A request for the engine, and how its answer is to look."""

    request: Request
    is_chat: bool
    is_stream: bool
    has_usage: bool
    has_token_ids: bool
    ignored_fields: tuple[str, ...] = ()


class CompletionParser:
    """Reads bodies for one worker. ``capacity_tokens`` is what its pool can hold for one request."""

    def __init__(self, model: LoadedModel, *, role: Role, agent_id: str, capacity_tokens: int) -> None:
        self._model = model
        self._role = role
        self._agent_id = agent_id
        self._capacity_tokens = capacity_tokens
        self._ignored = IgnoredFields()

    def completion(self, body: bytes, request_id: str) -> ParsedCompletion:
        """Read a body of ``/v1/completions``. Raises RequestError that names the field, RefusedError for a wrong
        worker."""
        parsed = parse_completion(body)
        self._check_model(parsed.model)
        if isinstance(parsed.prompt, str):
            self._check_length(len(parsed.prompt), "prompt")
            tokens = self._model.encode(parsed.prompt)
        else:
            tokens = parsed.prompt
            if max(tokens) >= self._model.vocab_size:
                raise RequestError(f"prompt: token {max(tokens)} is not in the vocabulary", param="prompt")
        return self._build(parsed, tokens, "prompt", parsed.max_new_tokens, request_id)

    def chat(self, body: bytes, request_id: str) -> ParsedCompletion:
        """Read a body of ``/v1/chat/completions``. Raises what :meth:`completion` raises."""
        parsed = parse_chat(body)
        self._check_model(parsed.model)
        self._check_length(sum(len(message.content or "") for message in parsed.messages), "messages")
        try:
            tokens = self._model.encode_chat([message.model_dump() for message in parsed.messages])
        except InvalidArgumentError as error:
            raise RequestError(str(error), param="messages") from None
        return self._build(parsed, tokens, "messages", parsed.max_new_tokens, request_id)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model: {name!r} is not served here, {self._model.name!r} is"
            raise RequestError(message, param="model", error_code="model_not_found")

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse what cannot fit before it is tokenised: that takes a second a megabyte, and other prompts wait."""
        if characters > self._model.longest_prompt_chars:
            context = self._model.context_tokens
            message = f"{field}: {characters} characters are more than the context of {context} tokens can hold"
            raise DoesNotFitError(message, field=field)

    def _build(
        self,
        parsed: CompletionBody | ChatCompletionBody,
        tokens: list[int],
        prompt_field: str,
        max_new: int | None,
        request_id: str,
    ) -> ParsedCompletion:
        if not tokens:
            raise RequestError(f"{prompt_field}: has no tokens", param=prompt_field)
        leg, remote = self._leg(parsed.kv_transfer_params)
        max_tokens = self._max_tokens(parsed, len(tokens), prompt_field, max_new, leg)
        params = SamplingParams(
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            seed=parsed.seed,
            max_tokens=max_tokens,
            stop=tuple(parsed.stop),
            ignore_eos=parsed.ignore_eos,
        )
        return ParsedCompletion(
            Request(request_id, tuple(tokens), params, leg, remote),
            is_chat=isinstance(parsed, ChatCompletionBody),
            is_stream=parsed.stream,
            has_usage=parsed.include_usage,
            has_token_ids=parsed.return_token_ids,
            ignored_fields=self._ignored.note(parsed.model_extra or {}),
        )

    def _max_tokens(
        self,
        parsed: CompletionBody | ChatCompletionBody,
        prompt_tokens: int,
        prompt_field: str,
        max_new: int | None,
        leg: Leg,
    ) -> int:
        context = self._model.context_tokens
        if prompt_tokens >= context:
            message = f"{prompt_field}: {prompt_tokens} tokens leave no room in the context of {context} tokens"
            raise DoesNotFitError(message, field=prompt_field, prompt_tokens=prompt_tokens)
        if prompt_tokens > self._capacity_tokens:
            message = f"{prompt_field}: {prompt_tokens} tokens do not fit a KV pool of {self._capacity_tokens} tokens"
            raise DoesNotFitError(message, field=prompt_field, prompt_tokens=prompt_tokens)
        if leg is Leg.PREFILL:  # the answer is made by another worker, whose limits are its own
            return 1
        # The last token that is generated needs no KV.
        capacity = min(context, self._capacity_tokens + 1)
        chat_field = isinstance(parsed, ChatCompletionBody) and parsed.max_completion_tokens is not None
        is_asked = chat_field or parsed.max_tokens is not None
        if max_new is not None and is_asked and prompt_tokens + max_new > capacity:
            field = "max_completion_tokens" if chat_field else "max_tokens"
            what = "context" if capacity == context else "KV pool"
            message = (
                f"{field}: {prompt_tokens} prompt tokens and {max_new} more do not fit the {what} of {capacity} tokens"
            )
            raise DoesNotFitError(message, field=field, prompt_tokens=prompt_tokens)
        room = capacity - prompt_tokens
        return room if max_new is None else min(max_new, room)

    def _leg(self, values: dict[str, Any] | None) -> tuple[Leg, OtherLeg | None]:
        if values is None:
            if not self._role.can_decode:
                raise RequestError(f"{PARAM}: a prefill worker needs it", param=PARAM)
            return Leg.LOCAL, None
        params = parse_transfer_params(values)
        is_prefill = params.role is Part.PREFILL
        if not (self._role.can_prefill if is_prefill else self._role.can_decode):
            raise RequestError(f"{PARAM}.role: a {self._role} worker does not {params.role}", param=f"{PARAM}.role")
        self._check_self(params, is_prefill)
        peer = params.destination if is_prefill else params.source
        remote = OtherLeg(params.transfer_id, peer.agent_id, params.attempt, params.timeout_s)
        return (Leg.PREFILL if is_prefill else Leg.DECODE), remote

    def _check_self(self, params: TransferParams, is_prefill: bool) -> None:
        named = (params.source if is_prefill else params.destination).agent_id
        if named != self._agent_id:
            raise RefusedError(f"this leg is for agent {named}, and this is {self._agent_id}")
