"""How the next token is drawn from one row of logits.

Decides greedy, temperature and nucleus sampling; must never know where logits come from nor what a token means as text.
One request has one Sampler with its own generator, so that its draws depend on its seed and on no other request.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from kvxfer.engine.stop import StopChecker
from kvxfer.errors import InvalidArgumentError, KvxferError

__all__ = ["Sampler", "SamplingParams", "StopChecker"]

NUCLEUS_TRY = 256
"""Candidates looked at before the whole vocabulary is sorted; the usual nucleus is far smaller."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request asks of generation. Raises InvalidArgumentError naming the field that is out of range."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 2):
            raise InvalidArgumentError(f"temperature must be 0 to 2, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgumentError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if self.max_tokens < 1:
            raise InvalidArgumentError(f"max_tokens must be at least 1, not {self.max_tokens!r}")
        if any(not stop for stop in self.stop):
            raise InvalidArgumentError("stop must not hold an empty string")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Draws tokens for one request. The same params, seed and logits give the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator("cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed & (1 << 63) - 1)

    def sample(self, logits: torch.Tensor) -> int:
        """Draw from ``logits`` (1-D, float, any device). Raises KvxferError when they hold a NaN or no finite value."""
        best = logits.max()
        if not torch.isfinite(best):
            raise KvxferError("the model's logits are not finite")
        if self.params.is_greedy:
            return int(logits.argmax())
        # float64: the running sum over a large vocabulary must end at 1, or the last tokens get a wrong share.
        weights = torch.exp((logits - best).cpu().double() / self.params.temperature)
        total = weights.sum()
        if self.params.top_p < 1:
            candidates, weights = self._nucleus(weights, float(total) * self.params.top_p)
        else:
            candidates = None
        running = weights.cumsum(0)
        draw = torch.rand((), generator=self._generator, dtype=torch.float64) * running[-1]
        at = min(int(torch.searchsorted(running, draw, right=True)), len(running) - 1)
        return at if candidates is None else int(candidates[at])

    @staticmethod
    def _nucleus(weights: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The fewest most probable tokens that together reach ``mass``: (token ids, weights), most probable first."""
        count = min(NUCLEUS_TRY, len(weights))
        while True:
            top, candidates = weights.topk(count)
            running = top.cumsum(0)
            if float(running[-1]) >= mass or count == len(weights):
                break
            count = len(weights)
        keep = min(int(torch.searchsorted(running, mass)) + 1, count)
        return candidates[:keep], top[:keep]
