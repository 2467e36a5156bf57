"""What ``transformers`` alone answers to a prompt, greedily, and how sure it was of each token.

Decides what counts as the right answer: the reference's tokens, where a divergence is excused only if the reference's
own two best tokens lie closer together than fp32 sums in another order can move them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import torch

from kvxfer.engine.model import LoadedModel

TIE_GAP = 1e-3
CONTEXT_TOKENS = 8192
"""Of the models that these tests make."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """Greedy tokens, and for each the distance of its logit to the second best."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


class Reference:
    """One model in this process, never through kvxfer's attention or pool."""

    def __init__(self, path: pathlib.Path) -> None:
        self.model = LoadedModel.load(path)
        self.excused: list[str] = []
        self._known: dict[tuple[tuple[int, ...], int], Expected] = {}

    def expect(self, prompt: Sequence[int], count: int) -> Expected:
        key = (tuple(prompt), count)
        if key not in self._known:
            self._known[key] = self._generate(key[0], count)
        return self._known[key]

    def _generate(self, prompt: tuple[int, ...], count: int) -> Expected:
        """On one thread: several spin while they wait for each other, and the workers need the cores."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._greedy(prompt, count)
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _greedy(self, prompt: tuple[int, ...], count: int) -> Expected:
        module, cache = self.model.module, None
        fresh = torch.tensor([prompt])
        tokens: list[int] = []
        gaps: list[float] = []
        for _ in range(count):
            out = module(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            best = torch.topk(out.logits[0, -1], 2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            fresh = torch.tensor([[tokens[-1]]])
        return Expected(tuple(tokens), tuple(gaps))

    def check(self, got: Sequence[int], prompt: Sequence[int], count: int) -> None:
        """Fail unless ``got`` are the right tokens; an excused divergence is printed and counted."""
        expected = self.expect(prompt, count)
        assert len(got) == count, f"{len(got)} tokens for a prompt of {len(prompt)}"
        pairs = enumerate(zip(got, expected.token_ids, strict=True))
        at = next((n for n, (ours, theirs) in pairs if ours != theirs), None)
        if at is None:
            return
        gap = expected.gaps[at]
        what = f"prompt of {len(prompt)} tokens: token {at} differs, the reference's top-2 gap is {gap:.2e}"
        assert gap < TIE_GAP, what
        self.excused.append(what)
        print(f"excused: {what}")


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """``length`` token ids, others for every length and seed."""
    generator = torch.Generator().manual_seed(100_003 * seed + length)
    return [int(token) for token in torch.randint(3, 300, (length,), generator=generator)]
