"""One route: where its body has the prompt and the bounds of the answer, and how its streamed answer reads.

Decides nothing; ``routes`` has the values. An Api must never know which engine serves the route.
"""

from __future__ import annotations

import dataclasses

from kvxfer.openai import scanner
from kvxfer.router.apis import roots
from kvxfer.router.apis.style import StreamStyle

PROMPTS = ("prompt", "prompt_embeds", "messages", "input", "text", "input_ids", "input_embeds")
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MANY = ("n", "best_of", "use_beam_search")
"""Fields by which one prompt is answered several times."""
BESIDE = ("system", "instructions", "tools")
"""Fields whose text an engine puts into the prompt beside the messages."""
DIALECTS_LOOK_AT = (
    *("echo", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "vllm_xargs", "sampling_params"),
    *("background", "store", "previous_response_id", "previous_input_messages", "conversation"),
    *("return_logprob", "logprob_start_len", "return_hidden_states", "return_routed_experts", "return_indexer_topk"),
    *("session_params", "min_tokens", "ignore_eos", "stop_token_ids"),
)
ADAPTER = "lora_path"
"""SGLang's: names an adapter, beside the model."""

_LOOKED_AT = ["model", "stream", *PROMPTS, *LIMITS, *MANY, *BESIDE, *DIALECTS_LOOK_AT, ADAPTER, *roots.MEMBERS]
FIELDS = scanner.Fields(list(dict.fromkeys(_LOOKED_AT)))
"""One table for all routes: what the router and the dialects look at in a client's body."""
NESTED = scanner.Fields(["n", "max_new_tokens", "beam_width"])
"""What they look at in ``sampling_params`` of SGLang's ``/generate``."""


@dataclasses.dataclass(frozen=True)
class Api:
    """``fields`` are prepared once; a body is scanned with them once."""

    path: str
    generates: bool
    """Whether it answers with generated text, so that the request may be split into prefill and decode."""
    style: StreamStyle
    prompt_fields: tuple[str, ...]
    """The first of them that a body has is its prompt, and one of them must be there."""
    beside_fields: tuple[str, ...] = ()
    limit_fields: tuple[str, ...] = ()
    """The first of them that is a count bounds the answer."""
    many_fields: tuple[str, ...] = ()
    has_list_of_prompts: bool = False
    """Whether a prompt may be a list of prompts. Elsewhere a list is one prompt: messages, or items."""
    is_sampled_by_object: bool = False
    """SGLang's ``/generate``: bounds and ``n`` stand in ``sampling_params``."""
    requires_model: bool = True
    fields: scanner.Fields = FIELDS

    def __repr__(self) -> str:
        return f"Api({self.path})"
