"""How long a step of an engine takes: a linear function of what the step computes.

Decides seconds from counts alone. It must never know which sequences a step has, or what time it is.
"""

from __future__ import annotations

import dataclasses
import math

from kvxfer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds of a step: a constant, and so much for each token and sequence in it.

    The defaults are of the size that an 8B model has on one large GPU. Nothing here was fitted to a measurement.
    """

    step_s: float = 0.006
    prefill_token_s: float = 25e-6
    """For each prompt token that the step computes."""
    decode_sequence_s: float = 20e-6
    """For each sequence that gets one token."""
    context_token_s: float = 4e-9
    """For each token that a decoding sequence attends to."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name} must be 0 or more seconds, not {value!r}")

    def seconds(self, prefill_tokens: int, decode_sequences: int, context_tokens: int) -> float:
        """What a step takes that computes so much."""
        return (
            self.step_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_sequence_s * decode_sequences
            + self.context_token_s * context_tokens
        )
