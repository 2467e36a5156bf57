"""Which fields of a body make two prompts different from their first token on, whatever their messages say.

Decides what the root of a prompt's keys is made of, and what stands before the messages. It must never know which
engine reads the body: a field that any engine reads counts on every route. Two requests of different adapters or salts
never share a root, not even where a field occurs twice, since every occurrence that is not null counts.

Left out is what changes only the end of a prompt or its answer, so that a next turn may have another: ``tool_choice``,
``response_format``, ``add_generation_prompt``, ``continue_final_message``, sampling, ``user``.
"""

from __future__ import annotations

ADAPTERS = ("lora_path", "lora_id", "lora_name", "lora_request", "adapter_id")
"""SGLang's name of an adapter, its number and name beside it, and what other servers call theirs. vLLM's adapters are
models."""
SALTS = ("cache_salt", "extra_key")
"""vLLM's, which SGLang and TensorRT-LLM have too; SGLang's."""
TOOLS = ("tools", "functions", "builtin_tools")
TEMPLATE = (
    *("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "reasoning", "thinking", "task"),
    "add_special_tokens",
)
"""What a chat template or a tokenizer is given beside messages and tools."""
MEDIA = (
    *("image_data", "video_data", "audio_data", "modalities", "mm_processor_kwargs", "media_io_kwargs"),
    *("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"),
)
"""Images beside a prompt, and how those within it become tokens."""
EARLIER = ("previous_response_id", "conversation", "previous_input_messages", "session_params")
"""What an engine keeps of earlier requests and puts in front."""
CUT = ("truncate_prompt_tokens", "truncation_side", "truncation")
"""By which an engine drops a prompt's beginning."""
MEMBERS = (*ADAPTERS, *SALTS, *TOOLS, *TEMPLATE, *MEDIA, *EARLIER, *CUT)
HEADS = ("instructions", "system")
"""Long texts before the messages: they begin the chain, so that they have keys of their own."""

_RESPONSES = "/v1/responses"
_PROMPT_TEMPLATE = "prompt"
"""OpenAI's stored prompt, by its id and variables. On other routes this field is the prompt itself."""


def root_fields(path: str) -> tuple[str, ...]:
    """The fields of a route's body that belong in the root."""
    return (*MEMBERS, _PROMPT_TEMPLATE) if path == _RESPONSES else MEMBERS
