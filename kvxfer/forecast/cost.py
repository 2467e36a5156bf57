"""How long a step of an engine takes: a linear function of what the step computes.

What a step computes of prompts is told by two numbers. Each prompt token passes through the model: that is a constant
for each. And each attends to all tokens before it: a chunk of n tokens after k computed ones attends to
k + (k + 1) + ... + (k + n - 1) = n k + n (n - 1) / 2 tokens. So a prompt of n tokens of which none is cached takes
a + b n + c n (n - 1) / 2 seconds, in one chunk or, but for the constant of each further step, in several.

Decides seconds from counts alone. It must never know which sequences a step has, or what time it is.
"""

from __future__ import annotations

import dataclasses
import math

from kvxfer.errors import ConfigError


def attended_tokens(chunk: int, computed: int) -> int:
    """How many tokens those of a chunk attend to, each to all before it: ``computed`` and those of the chunk itself.

    The sum of ``computed`` to ``computed + chunk - 1``, without the tokens themselves.
    """
    return chunk * computed + chunk * (chunk - 1) // 2


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds of a step: a constant, and so much for each token and sequence in it. Raises ConfigError for a value that
    is no duration.

    The defaults are of the size that an 8B model has on one large GPU. Nothing here was fitted to a measurement.
    """

    step_s: float = 0.006
    prefill_token_s: float = 25e-6
    """For each prompt token that the step computes."""
    decode_sequence_s: float = 20e-6
    """For each sequence that gets one token."""
    context_token_s: float = 4e-9
    """For each token that a decoding sequence attends to."""
    prefill_context_token_s: float = 0.0
    """For each token that a prompt token attends to: of the size of 1e-9 for the model above. 0: prompts take time in
    proportion to their length."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name} must be 0 or more seconds, not {value!r}")

    def seconds(
        self, prefill_tokens: int, decode_sequences: int, context_tokens: int, prefill_context_tokens: int = 0
    ) -> float:
        """What a step takes that computes so much. ``prefill_context_tokens`` is the sum of :func:`attended_tokens` of
        the step's chunks of prompts.
        """
        return (
            self.step_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_sequence_s * decode_sequences
            + self.context_token_s * context_tokens
            + self.prefill_context_token_s * prefill_context_tokens
        )
