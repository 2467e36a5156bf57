"""Whether a prompt is worth computing on another worker than the one that will generate.

A pure comparison of sizes: it never knows which workers there are beyond "one could", nor how text becomes tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class PrefillAt(enum.StrEnum):
    """Where the prompt's KV cache is computed."""

    REMOTE = "remote"
    LOCAL = "local"


class DisaggReason(enum.StrEnum):
    WORTH_IT = "worth_it"
    SHORT_PROMPT = "short_prompt"
    NOTHING_TO_MOVE = "nothing_to_move"


class DisaggDecision(NamedTuple):
    at: PrefillAt
    reason: DisaggReason


@dataclasses.dataclass(frozen=True)
class DisaggOptions:
    """``min_remote_prefill_tokens``: prompts shorter than this are computed where they are decoded; 0 or less: none."""

    min_remote_prefill_tokens: int = 0


CHARS_PER_TOKEN = 4
"""For an estimate of tokens from text; a rule of thumb for English that only shifts the threshold."""


def estimate_tokens(characters: int) -> int:
    """Tokens that ``characters`` of text make, roughly; 0 only for no text at all."""
    return -(-characters // CHARS_PER_TOKEN)


def decide_prefill(prompt_tokens: int, options: DisaggOptions, *, is_exact: bool = False) -> DisaggDecision:
    """Decide for a prompt of about ``prompt_tokens`` (``is_exact``: the client sent token ids).

    The last prompt token is always computed by the decoder, so a prompt of one token has nothing to move.
    """
    if is_exact and prompt_tokens <= 1:
        return DisaggDecision(PrefillAt.LOCAL, DisaggReason.NOTHING_TO_MOVE)
    if prompt_tokens < options.min_remote_prefill_tokens:
        return DisaggDecision(PrefillAt.LOCAL, DisaggReason.SHORT_PROMPT)
    return DisaggDecision(PrefillAt.REMOTE, DisaggReason.WORTH_IT)
