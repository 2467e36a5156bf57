"""vLLM's prefill leg: a whole request for one token, with a short answer that is not streamed.

Decides which fields P's copy of a body loses, and which requests vLLM cannot split. Read from the sources of vLLM 0.32.

What P loses, and why nothing of the prompt changes with it:

- The bounds of the answer become 1 (``max_tokens`` in chat and completions, also ``max_completion_tokens`` where the
  body has it; ``max_output_tokens`` in Responses). ``min_tokens`` goes: vLLM refuses one above the bound
  (sampling_params.py, ``_verify_args``).
- ``stream`` is false; ``stream_options`` goes, since vLLM refuses it without a stream (``validate_stream_options``).
- What makes an answer long goes: ``echo`` and ``prompt_logprobs`` are as long as the prompt; ``top_logprobs: -1`` is as
  long as the vocabulary, and with it go ``logprobs`` and ``logprob_token_ids``, which vLLM takes only together
  (``check_logprobs``); ``return_token_ids``, ``return_prompt_text`` and ``return_token_offsets`` list the prompt.
- ``store`` is false in Responses: P's answer is no Response that anything may come back to.

What P keeps: tools, ``response_format``, ``chat_template_kwargs``, ``thinking`` and all the rest may stand in the
prompt (renderers), and a P with another prompt would hand over the KV of other tokens.

What is not split:

- ``n``, ``best_of``, beams and lists of several prompts. vLLM makes a request of each sequence
  (v1/engine/parallel_sampling.py, completion/serving.py) and gives all of them the same transfer parameters; P frees
  its blocks after the first reader (nixl/pull_worker.py, ``_get_new_notifs``), while the others read.
- ``prompt_logprobs``, and ``echo`` where it asks for them: always in chat, with ``logprobs`` in completions
  (``to_sampling_params``). D computes the whole prompt then and loads nothing (v1/core/sched/scheduler.py,
  ``skip_reading_prefix_cache``): P would have worked for nothing.
- ``prompt_embeds``: D counts token ids to learn what to load, and there are none (nixl/pull_scheduler.py,
  ``get_num_new_matched_tokens``).
- ``truncate_prompt_tokens``: what -1 cuts depends on the bound of the answer, which differs between the legs
  (renderers/params.py), so that the KV would be of other tokens.
- In Responses: ``background`` (the answer comes before the text), ``previous_response_id`` and others that name what
  one engine remembers, and tools that vLLM runs itself: each round asks the engine again, with the same transfer
  parameters, for blocks that P has freed (responses/serving.py).
"""

from __future__ import annotations

import json

from kvxfer.openai import scanner
from kvxfer.openai.scanner import Kind
from kvxfer.router.apis.routes import CHAT, COMPLETIONS, MESSAGES_API, RESPONSES_API
from kvxfer.router.dialects.base import Changes
from kvxfer.router.inbound import Inbound

DROPPED = (
    *("stream_options", "min_tokens"),
    *("echo", "prompt_logprobs", "logprobs", "top_logprobs", "logprob_token_ids"),
    *("return_token_ids", "return_prompt_text", "return_token_offsets"),
)
DROPPED_IN_RESPONSES = (*DROPPED, "include")
"""``include`` lists what else the answer has, such as log probabilities."""
REMEMBERED = ("previous_response_id", "previous_input_messages", "conversation")
PLAIN_TOOLS = ("function", "custom")
"""Tools that the client runs."""
TOOLS_BYTES_MAX = 256 << 10
"""A longer list of tools is not read: D serves that request alone."""

_ONE = b"1"


def one_token(inbound: Inbound) -> Changes:
    """The changes that make a body one for a single token."""
    changes: Changes = dict.fromkeys(DROPPED_IN_RESPONSES if inbound.api is RESPONSES_API else DROPPED)
    changes["stream"] = b"false"
    if inbound.api is RESPONSES_API:
        return {**changes, "max_output_tokens": _ONE, "store": b"false"}
    changes["max_tokens"] = _ONE
    if inbound.scan.kind("max_completion_tokens") is not None and inbound.api is not MESSAGES_API:
        changes["max_completion_tokens"] = _ONE
    return changes


def goes_on_at_the_end(inbound: Inbound) -> Changes:
    """So that a first token that ends the text is a token like any other. Connectors keep the KV of a request only if
    it reached its bound (MooncakeConnector, and NixlConnector in older versions)."""
    if inbound.api in (CHAT, COMPLETIONS):
        return {"ignore_eos": b"true", "stop_token_ids": None}
    return {"ignore_eos": b"true"} if inbound.api is RESPONSES_API else {}


def refuses_split(inbound: Inbound) -> str | None:
    """The field for which vLLM must do it alone."""
    if inbound.several is not None:
        return inbound.several
    if inbound.api is RESPONSES_API:
        return _refuses_response(inbound)
    for name in ("prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds"):
        if inbound.has(name):
            return name
    if inbound.is_on("echo") and (inbound.api is CHAT or inbound.has("logprobs")):
        return "echo"
    return None


def _refuses_response(inbound: Inbound) -> str | None:
    if inbound.is_on("background"):
        return "background"
    named = next((name for name in REMEMBERED if inbound.has(name)), None)
    return named or ("tools" if inbound.has("tools") and not _has_plain_tools(inbound) else None)


def _has_plain_tools(inbound: Inbound) -> bool:
    raw = scanner.raw(inbound.scan, "tools")
    if raw is None or inbound.scan.kind("tools") is not Kind.ARRAY or len(raw) > TOOLS_BYTES_MAX:
        return False
    return all(isinstance(tool, dict) and tool.get("type") in PLAIN_TOOLS for tool in json.loads(bytes(raw)))
