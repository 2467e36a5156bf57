"""The fingerprint of weights in memory: every byte counts, at its own place."""

from __future__ import annotations

import random

import pytest
import torch

from kvxfer.engine.fingerprint import weights_fingerprint


def test_weights_fingerprint_of_values_that_changed_places_is_another() -> None:
    """Along a column of any width, between tensors, and where the values are the same and the shape is not."""
    torch.manual_seed(0)
    matrix = torch.randn(4096, 512)
    plain = weights_fingerprint([("w", matrix), ("v", matrix[:2])])
    seen = {plain}
    for rows in ((0, 1), (7, 4095), (1000, 1001)):
        moved = matrix.clone()
        moved[list(rows), 3] = matrix[list(reversed(rows)), 3]
        seen.add(weights_fingerprint([("w", moved), ("v", matrix[:2])]))
    seen.add(weights_fingerprint([("v", matrix), ("w", matrix[:2])]))
    seen.add(weights_fingerprint([("w", matrix.view(512, 4096)), ("v", matrix[:2])]))
    seen.add(weights_fingerprint([("w", matrix.view(torch.int32)), ("v", matrix[:2])]))
    assert len(seen) == 7
    assert weights_fingerprint([("v", matrix[:2]), ("w", matrix)]) == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_fingerprint_changes_with_any_single_byte(dtype: torch.dtype) -> None:
    draw, tensor = random.Random(1), torch.randn(333, 77).to(dtype)
    content = tensor.view(-1).view(torch.uint8)
    seen = {weights_fingerprint([("w", tensor)])}
    for count in range(2, 102):
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        seen.add(weights_fingerprint([("w", tensor)]))
        assert len(seen) == count
