"""What the engines behind the router call the two halves of a request: the body of each leg, in the engine's words.

``kvxfer``: the client's own body and ``kv_transfer_params``. ``vllm`` (vLLM with kvxfer's connector): the same, and
vLLM's words for which half it is; the prefill leg is a whole request of one token, not streamed. vLLM hands a request's
headers on only where it traces by itself, so the trace stands in the parameters too.
"""

from __future__ import annotations

from collections.abc import Collection

from kvxfer.openai.members import with_members
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
    dialect: str, body: bytes, names: Collection[str], params: TransferParams | None, traceparent: str | None
) -> bytes:
    """The client's ``body``, whose members are ``names``, as one leg carries it: ``params`` stand in place of any that
    the client sent, and what need not change is passed on byte for byte. At most LEG_BYTES_MAX bytes longer.
    """
    if params is None:
        return with_members(body, names, {}, without=(PARAM,))
    values = params.to_json()
    if dialect != VLLM:
        return with_members(body, names, {PARAM: values})
    is_prefill = params.role is Part.PREFILL
    values |= {"do_remote_decode": is_prefill, "do_remote_prefill": not is_prefill}
    if traceparent is not None:
        values["traceparent"] = traceparent
    if not is_prefill:
        return with_members(body, names, {PARAM: values})
    limits = {name: one for name, one in _ONE_TOKEN.items() if name in names or name == "max_tokens"}
    return with_members(body, names, {**limits, PARAM: values}, without=_LEFT_OUT)
