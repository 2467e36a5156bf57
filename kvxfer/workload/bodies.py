"""The JSON body of a request: streamed, with usage at its end, of exactly the planned number of tokens.

Decides the members of the body. Knows nothing of what sends it: the same bytes go through our driver and another tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from kvxfer.errors import ConfigError
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import WorkloadRequest

BodyApi = Literal["completions", "chat"]
FIXED = frozenset(
    {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n"}
)
"""Members that a load test decides itself: others would make its numbers wrong."""
EXTRA_BODY_MAX = 1 << 20


def extra_body_of(text: str) -> dict[str, Any]:
    """The members that ``--extra-body`` names; none where it is empty. Raises ConfigError."""
    if not text:
        return {}
    if len(text) > EXTRA_BODY_MAX:
        raise ConfigError(f"extra_body must have at most {EXTRA_BODY_MAX} characters, not {len(text)}")
    try:
        members = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"extra_body is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise ConfigError(f"extra_body must be a JSON object, not {text!r:.100}")
    return members


def asks_length(body: Mapping[str, Any]) -> bool:
    """Whether the answer is to have exactly ``max_tokens``, and not at most so many."""
    return body.get("ignore_eos") is True and not body.get("stop") and not body.get("stop_token_ids")


class BodyMaker:
    """Makes bodies for ``/v1/completions`` (the prompt as token ids; as text where the workload has text) or
    ``/v1/chat/completions`` (one message of the user).

    ``temperature`` is 0; ``ignore_eos`` asks engines that know it for answers of exactly ``max_tokens``; ``extra_body``
    has more members, and may change those two. Raises ConfigError where it has one of ``FIXED``, or no JSON.
    """

    def __init__(
        self,
        model: str,
        api: BodyApi,
        prompts: PromptMaker,
        *,
        ignore_eos: bool = True,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if api not in ("completions", "chat"):
            raise ConfigError(f"api must be completions or chat, not {api!r:.100}")
        extra = dict(extra_body or {})
        wrong = sorted(FIXED.intersection(extra))
        if wrong:
            raise ConfigError(f"extra_body must not have {', '.join(wrong)}: the load test sets it")
        self.api: BodyApi = api
        self.prompts = prompts
        members: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        members["temperature"] = 0
        if ignore_eos:
            members["ignore_eos"] = True
        try:
            written = json.dumps({**members, **extra}, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"extra_body cannot be written as JSON: {error}") from None
        self.asks_length = asks_length({**members, **extra})
        self._begin = written[:-1].encode() + b',"max_tokens":'

    def body(self, request: WorkloadRequest) -> bytes:
        """One JSON object. Raises InvalidArgumentError where the request's hash ids do not fit its length."""
        if self.api == "chat":
            name, value = b"messages", _json([{"role": "user", "content": self.prompts.text(request)}])
        elif request.text is not None:
            name, value = b"prompt", _json(self.prompts.text(request))
        else:
            name, value = b"prompt", self.prompts.json(request)
        return b'%b%d,"%b":%b}' % (self._begin, request.output_tokens, name, value)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
