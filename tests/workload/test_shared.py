"""What a workload shares with itself, against prompts that are compared token by token."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.offered import prompt_maker, with_warmup, workload_from
from kvxfer.load.options import WorkloadOptions
from kvxfer.workload.request import Workload, WorkloadRequest
from kvxfer.workload.shared import shared_tokens


def by_a_tree(prompts: list[list[int]]) -> int:
    """Tokens that a perfect cache gives: beginnings that were seen before."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        for length in range(1, len(prompt) + 1):
            found += tuple(prompt[:length]) in seen
            seen.add(tuple(prompt[:length]))
    return found


@given(st.integers(1, 3), st.sampled_from([0, 3, 64]), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_made_up_prompts_share_what_is_said(turns: int, shared: int, count: int, seed: int, has_warmup: bool) -> None:
    options = WorkloadOptions(
        prompt_tokens=80, output_tokens=7, length_spread=0.3, requests=count, turns=turns, shared_prefix_tokens=shared,
        seed=seed, token_low=0, token_high=1 << 30,
    )  # fmt: skip
    workload, _ = with_warmup(workload_from(options), 2 * has_warmup, 1.0)
    maker = prompt_maker(options, workload)
    prompts = [maker.tokens(request).tolist() for request in workload.requests]
    assert shared_tokens(workload) == by_a_tree(prompts) == by_a_tree(prompts[::-1])


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8))
def test_texts_share_their_beginnings(texts: list[str]) -> None:
    requests = [WorkloadRequest(number, len(text), 1, 0.0, text=text) for number, text in enumerate(texts)]
    expected = by_a_tree([[ord(letter) for letter in text] for text in texts])
    assert shared_tokens(Workload("texts", requests)) == expected
    longer = [dataclasses.replace(request, prompt_tokens=2 * request.prompt_tokens) for request in requests]
    assert shared_tokens(Workload("texts", longer)) == 2 * expected
