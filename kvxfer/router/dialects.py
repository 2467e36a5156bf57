"""What the engines behind the router call the two halves of a request: the body of each leg, in the engine's words.

``kvxfer``: the client's own body and ``kv_transfer_params``. ``vllm`` (vLLM with kvxfer's connector): the same, and
vLLM's words for which half it is; the prefill leg is a whole request of one token, not streamed. vLLM hands a request's
headers on only where it traces by itself, so the trace stands in the parameters too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.openai.transfer_params import PARAM, Part, TransferParams

KVXFER = "kvxfer"
VLLM = "vllm"
DIALECTS = frozenset({KVXFER, VLLM})
CLIPPING = frozenset({VLLM})
"""Of engines that end an answer where their context ends, whatever was asked for."""

_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1}
_LEFT_OUT = frozenset({"stream", "stream_options", "min_tokens", "prompt_logprobs", "return_token_ids"})
"""The last two make an answer as long as the prompt, which nobody reads."""


def leg_body(
    dialect: str, values: Mapping[str, Any], params: TransferParams | None, traceparent: str | None
) -> dict[str, Any]:
    """The client's ``values`` as one leg carries them: ``params`` stand in place of any that the client sent."""
    body = {name: value for name, value in values.items() if name != PARAM}
    if params is None:
        return body
    body[PARAM] = params.to_json()
    if dialect != VLLM:
        return body
    is_prefill = params.role is Part.PREFILL
    body[PARAM] |= {"do_remote_decode": is_prefill, "do_remote_prefill": not is_prefill}
    if traceparent is not None:
        body[PARAM]["traceparent"] = traceparent
    if is_prefill:
        body = {name: value for name, value in body.items() if name not in _LEFT_OUT}
        body |= {name: one for name, one in _ONE_TOKEN.items() if name in body or name == "max_tokens"}
    return body
