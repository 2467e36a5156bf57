"""Scaled lengths: what two prompts share grows with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.lengths import ScaledLengths
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import WorkloadRequest


def request(prompt: int, output: int, has_ids: bool) -> WorkloadRequest:
    return WorkloadRequest(0, prompt, output, 0.0, hash_ids=tuple(range(-(-prompt // 512))) if has_ids else ())


@given(
    st.integers(1, 9000),
    st.integers(1, 900),
    st.booleans(),
    st.floats(0.01, 8),
    st.floats(0.01, 8),
    st.integers(0, 5000),
)
def test_lengths_are_scaled_and_the_hash_ids_fit(
    prompt: int, output: int, has_ids: bool, by: float, output_by: float, most: int
) -> None:
    scaled = ScaledLengths(prompt=by, output=output_by, prompt_max=most, output_max=most)
    made = scaled.of(request(prompt, output, has_ids))
    limit = most or 1 << 30
    assert abs(made.output_tokens - min(output * output_by, limit)) <= 1
    assert made.prompt_tokens <= limit
    if not has_ids:
        assert abs(made.prompt_tokens - min(prompt * by, limit)) <= 1
    else:
        exact = prompt * scaled.hash_tokens_scaled / 512
        assert min(exact, limit) <= made.prompt_tokens <= exact + 1
        assert len(PromptMaker(hash_tokens=scaled.hash_tokens_scaled).tokens(made)) == made.prompt_tokens


@pytest.mark.parametrize("has_ids", [True, False])
def test_no_change_is_no_change(has_ids: bool) -> None:
    one = request(1500, 20, has_ids)
    assert ScaledLengths().of(one) is one


def test_text_stays() -> None:
    one = WorkloadRequest(0, 5, 10, 0.0, text="Why is it so?")
    made = ScaledLengths(prompt=3, output=2, prompt_max=1).of(one)
    assert (made.prompt_tokens, made.text, made.output_tokens) == (5, "Why is it so?", 20)


def test_a_length_beyond_the_bound_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="more than 16777216 tokens"):
        ScaledLengths(prompt=1e5).of(request(5000, 1, True))
