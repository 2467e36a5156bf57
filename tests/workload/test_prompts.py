"""Prompts: exact lengths, exact shared beginnings, and that seed and salt change everything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import WorkloadRequest
from kvxfer.workload.words import WORDS


def request(number: int, prompt_tokens: int, *ids: int, text: str | None = None) -> WorkloadRequest:
    return WorkloadRequest(number, prompt_tokens, 1, 0.0, hash_ids=ids, text=text)


@st.composite
def hashed(draw: st.DrawFn, block: int = 8) -> WorkloadRequest:
    ids = draw(st.lists(st.integers(0, 5) | st.just((1 << 64) - 1), min_size=1, max_size=6))
    last = draw(st.integers(1, block))
    return request(draw(st.integers(0, 9)), (len(ids) - 1) * block + last, *ids)


@given(hashed(), hashed(), st.integers(0, 3))
def test_prompts_share_exactly_what_their_hash_ids_say(one: WorkloadRequest, other: WorkloadRequest, seed: int) -> None:
    prompts = PromptMaker(seed=seed, hash_tokens=8, token_high=1 << 30)
    first, second = prompts.tokens(one).tolist(), prompts.tokens(other).tolist()
    same = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    blocks = next(
        (at for at, (a, b) in enumerate(zip(one.hash_ids, other.hash_ids, strict=False)) if a != b),
        min(len(one.hash_ids), len(other.hash_ids)),
    )
    assert same == min(blocks * 8, len(first), len(second))


@given(
    hashed() | st.builds(request, st.integers(0, 50), st.integers(1, 60)), st.integers(0, 200), st.integers(1, 100_000)
)
def test_ids_have_the_length_and_range_and_json_says_the_same(one: WorkloadRequest, low: int, count: int) -> None:
    prompts = PromptMaker(token_low=low, token_high=low + count, hash_tokens=8)
    ids = prompts.tokens(one).tolist()
    assert len(ids) == one.prompt_tokens
    assert all(low <= token < low + count for token in ids)
    assert json.loads(prompts.json(one)) == ids
    assert len(prompts.text(one).split(" ")) == len(ids)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 10), (9, 11), (95, 105), (0, 1 << 31), ((1 << 31) - 2, 1 << 31)])
def test_ids_of_any_width_are_written(low: int, high: int) -> None:
    prompts = PromptMaker(token_low=low, token_high=high, hash_tokens=16)
    for one in (request(0, 100), request(0, 40, 1, 2, 3)):
        assert json.loads(prompts.json(one)) == prompts.tokens(one).tolist()


@given(st.integers(0, 100), st.integers(0, 100))
def test_requests_without_hash_ids_share_nothing(one: int, other: int) -> None:
    prompts = PromptMaker(token_high=1 << 30)
    first, second = prompts.tokens(request(one, 20)).tolist(), prompts.tokens(request(other, 30)).tolist()
    assert (first == second[:20]) == (one == other)
    assert one == other or first[0] != second[0]


@given(st.integers(), st.text(max_size=20), st.integers(), st.text(max_size=20))
def test_seed_and_salt_change_every_block(seed: int, salt: str, other_seed: int, other_salt: str) -> None:
    one = PromptMaker(seed=seed, salt=salt, token_high=1 << 30, hash_tokens=4)
    other = PromptMaker(seed=other_seed, salt=other_salt, token_high=1 << 30, hash_tokens=4)
    is_same = (seed, salt) == (other_seed, other_salt)
    for asked in (request(3, 12, 1, 2, 3), request(3, 12)):
        first, second = one.tokens(asked).tolist(), other.tokens(asked).tolist()
        assert (first == second) == is_same
        assert is_same or all(a != b for a, b in zip(first[::4], second[::4], strict=True))


def test_a_salt_with_the_letters_of_a_seed_is_not_that_seed() -> None:
    one, other = PromptMaker(seed=1, salt="2"), PromptMaker(seed=12, salt="")
    assert one.tokens(request(0, 9)).tolist() != other.tokens(request(0, 9)).tolist()


def test_the_order_in_which_prompts_are_made_changes_nothing() -> None:
    asked = [request(number, 2000, number // 2, 100 + number, 200) for number in range(9000, 9020)]
    forward, backward = PromptMaker(hash_tokens=700), PromptMaker(hash_tokens=700)
    made = [forward.json(one) for one in asked]
    assert [backward.json(one) for one in reversed(asked)] == made[::-1]


def test_blocks_that_left_the_cache_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.workload.prompts.CACHE_TOKENS", 16)
    prompts = PromptMaker(hash_tokens=8)
    asked = [request(number, 24, number, number + 1, number + 2) for number in (1, 2, 9, 1)]
    made = [prompts.json(one) for one in asked]
    assert made[0] == made[3] == PromptMaker(hash_tokens=8).json(asked[0])


@given(hashed(), hashed())
def test_text_of_shared_ids_is_shared(one: WorkloadRequest, other: WorkloadRequest) -> None:
    prompts = PromptMaker(hash_tokens=8)
    ids = prompts.tokens(one).tolist()
    shared = 0
    for a, b in zip(ids, prompts.tokens(other).tolist(), strict=False):
        if a != b:
            break
        shared += 1
    assert prompts.text(one).split(" ")[:shared] == prompts.text(other).split(" ")[:shared]


def test_text_of_a_request_stays_but_for_the_salt() -> None:
    asked = request(0, 3, text="What is\nnew?")
    assert PromptMaker().text(asked) == "What is\nnew?"
    assert PromptMaker(salt="7").text(asked) == "7\nWhat is\nnew?"


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_hash_ids_that_do_not_fit_the_length_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="request 4: 20 tokens in blocks of 8 need 3 hash ids, not 2"):
        PromptMaker(hash_tokens=8).tokens(request(4, 20, 1, 2))


@pytest.mark.parametrize(("low", "high"), [(5, 5), (-1, 5), (0, (1 << 31) + 1)])
def test_token_ids_out_of_range_are_refused(low: int, high: int) -> None:
    with pytest.raises(InvalidArgumentError, match="token_low must be"):
        PromptMaker(token_low=low, token_high=high)
    with pytest.raises(InvalidArgumentError, match="hash_tokens"):
        PromptMaker(hash_tokens=0)
