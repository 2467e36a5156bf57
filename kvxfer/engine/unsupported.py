"""Fields of a request that the built-in engine does not have and that would change its answer: refused by name.

A client that sends ``top_k`` counts on it. An engine that leaves the field out answers with other tokens than the
client asked for, and the client does not notice. So the table NEUTRAL has each such field that OpenAI, vLLM, SGLang,
llama.cpp or TGI take, together with its neutral values: those that change no token. Neutral values are accepted, as
many clients send every field with its default. ``user``, ``metadata`` and the like (HARMLESS) change no token and are
accepted with any value. A field in neither table is *ignored*: the answer names it (``kvxfer.ignored_fields``), and the
log does once in each process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.openai.errors import RequestError

_log = logging.getLogger(__name__)

TOOL_ROLES = frozenset({"tool", "function"})
NAMES_MAX = 32
"""Ignored fields of one request that are named, and of all requests that are logged."""
NAME_CHARS_MAX = 64

_TEXT_ONLY = {"type": "text"}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Which tokens may follow.
    "top_k": (0, -1),
    "min_p": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "samplers": ([],),
    "do_sample": (True,),
    "watermark": (False,),
    "guidance_scale": (1,),
    "cfg_scale": (1,),
    "negative_prompt": ("",),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "logit_bias": ({}, []),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    # What was said before weighs less.
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "dry_multiplier": (0,),
    "no_repeat_ngram_size": (0,),
    "repetition_detection": (),
    # An answer of a given form. Whatever begins with guided_ joins these.
    "response_format": (_TEXT_ONLY,),
    "structured_outputs": ({},),
    "structural_tag": ("", {}),
    "grammar": ("",),
    "json_schema": ("", {}),
    "regex": ("",),
    "ebnf": ("",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": ({},),
    # Tools.
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "documents": ([],),
    # Thinking.
    "reasoning_effort": ("none",),
    "reasoning": ({}, {"effort": "none"}, {"enabled": False}),
    "thinking": ({"type": "disabled"}, False),
    "enable_thinking": (False,),
    "thinking_budget": (0,),
    "thinking_token_budget": (0,),
    # Several answers, or parts of the prompt in the answer.
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0, False),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    # Where an answer ends, and how it is written.
    "min_tokens": (0,),
    "min_completion_tokens": (0,),
    "stop_token_ids": ([],),
    "stop_regex": ("", []),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "n_predict": (),
    # What the prompt is made of.
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "truncate": (),
    "transforms": ([],),
    "prompt_embeds": (),
    "input_ids": (),
    "input_embeds": (),
    "image_data": ([],),
    "mm_processor_kwargs": ({},),
    "lora_path": ("",),
    "session_params": ({},),
    "cache_salt": (),
}
"""Field -> the values that ask for nothing; ``null`` always does. ``cache_salt`` changes no token, and is refused all
the same: it asks that prompts of others do not share the prefix cache, which this engine cannot keep."""

ONLY_IN_CHAT: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (False,)}
ONLY_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (True,), "max_completion_tokens": ()}

IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": ({},),
    "audio": ({},),
    "prefix": (False,),
    "partial": (False,),
}
"""The same of one chat message: what a model called or said before, and a last message that is to be gone on with."""

HARMLESS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "include_reasoning",
        "logprob_start_len",
        "media_io_kwargs",
        "metadata",
        "mirostat_eta",
        "mirostat_tau",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "repeat_last_n",
        "request_id",
        "return_tokens_as_token_ids",
        "rid",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "store",
        "stream_reasoning",
        "user",
        "xtc_threshold",
    }
)
"""Change no token whatever they say: for accounts, caches and queues, or details of what is refused when it is on."""

_KNOWN = HARMLESS | NEUTRAL.keys() | ONLY_IN_CHAT.keys() | ONLY_IN_COMPLETIONS.keys()


def refuse_in_body(values: Mapping[str, Any], *, route: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestError for the first field of a body that would change the answer and is not supported.

    ``route``: ONLY_IN_CHAT or ONLY_IN_COMPLETIONS.
    """
    for name, value in values.items():
        neutral = route.get(name, NEUTRAL.get(name, () if name.startswith("guided_") else None))
        _refuse_unless_neutral(name, value, neutral)


def refuse_in_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """The same for the messages of a chat."""
    for number, message in enumerate(messages):
        if message["role"] in TOOL_ROLES:
            param = f"messages.{number}.role"
            raise RequestError(f"{param}: the built-in engine has no tools (got {message['role']!r})", param=param)
        for name, value in message.items():
            if name in IN_MESSAGE:
                _refuse_unless_neutral(f"messages.{number}.{name}", value, IN_MESSAGE[name])


def _refuse_unless_neutral(param: str, value: Any, neutral: tuple[Any, ...] | None) -> None:
    if value is None or neutral is None or any(_is_same(value, one) for one in neutral):
        return
    shown = _shown(param)
    raise RequestError(f"{shown}: not supported by the built-in engine, and it would change the answer", param=shown)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _shown(name: str) -> str:
    """A client's name for a field, in ASCII and not longer than NAME_CHARS_MAX characters of it."""
    return ascii(name[:NAME_CHARS_MAX])[1:-1]


class IgnoredFields:
    """Names fields that no table knows. Thread-safe; each name is logged once, NAMES_MAX at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def __repr__(self) -> str:
        return f"<IgnoredFields logged={len(self._logged)}>"

    def note(self, extra: Mapping[str, Any]) -> tuple[str, ...]:
        """The names among ``extra`` (fields that no schema declares) that are ignored, NAMES_MAX at most."""
        names: list[str] = []
        for name, value in extra.items():
            if value is not None and name not in _KNOWN and len(names) < NAMES_MAX:
                names.append(_shown(name))
        with self._lock:
            for name in names:
                if name not in self._logged and len(self._logged) < NAMES_MAX:
                    self._logged.add(name)
                    _log.warning("a field of a request is not known and is ignored", extra={"field": name})
        return tuple(names)
