"""Prompts whose right answers are known: what `transformers` alone says, where it is sure of every token.

Decides which prompts there are. It must never ask kvxfer for an answer.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from soaking.records import Question
from tests.support.e2e.reference import Reference

SURE = 1e-3
"""Smallest distance between the two best logits of each token: far more than sums in another order can move them."""
LENGTHS = (12, 40, 130, 300, 700)
COUNTS = (8, 64, 300)
SHARED_TOKENS = 96
"""Half of the longer prompts begin with the same so many tokens."""


def questions(model: pathlib.Path, seed: int, count: int) -> list[Question]:
    """``count`` prompts of different lengths; the same for the same seed."""
    return list(_questions(Reference(model), np.random.Generator(np.random.PCG64([seed, 1])), count))


def _questions(reference: Reference, random: np.random.Generator, count: int) -> Iterator[Question]:
    shared = [int(token) for token in random.integers(3, 300, SHARED_TOKENS)]
    number = 0
    while number < count:
        length, wanted = LENGTHS[number % len(LENGTHS)], COUNTS[int(random.integers(len(COUNTS)))]
        prompt = [int(token) for token in random.integers(3, 300, length)]
        if length > SHARED_TOKENS and random.random() < 0.5:
            prompt[:SHARED_TOKENS] = shared
        expected = reference.expect(prompt, wanted)
        if min(expected.gaps) >= SURE:
            yield Question(number, tuple(prompt), expected.token_ids)
            number += 1
