"""Sampling, stop strings and the incremental detokeniser."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvxfer.engine.detokenizer import Detokenizer
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.sampling import Sampler, SamplingParams
from kvxfer.engine.stop import StopChecker
from kvxfer.errors import InvalidArgumentError, KvxferError


def draws(logits: torch.Tensor, count: int, **params: float | int) -> list[int]:
    sampler = Sampler(SamplingParams(**params))  # type: ignore[arg-type]
    return [sampler.sample(logits) for _ in range(count)]


def test_greedy_is_the_largest() -> None:
    assert draws(torch.tensor([0.0, 3.0, 2.0]), 3, temperature=0) == [1, 1, 1]


def test_seeded_draws_repeat_and_depend_on_nothing_else() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    first = draws(logits, 50, seed=7, top_p=0.9)
    torch.rand(10)
    assert draws(logits, 50, seed=7, top_p=0.9) == first
    assert draws(logits, 50, seed=8, top_p=0.9) != first
    assert draws(logits, 50) != draws(logits, 50)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = torch.softmax(logits / temperature, 0)
    seen = torch.bincount(torch.tensor(draws(logits, 4000, temperature=temperature, seed=1)), minlength=4) / 4000
    assert torch.allclose(seen, expected, atol=0.03)


def test_nucleus_is_the_fewest_most_probable_that_reach_top_p() -> None:
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    assert set(draws(logits, 300, top_p=0.5, seed=1)) == {1}
    assert set(draws(logits, 300, top_p=0.51, seed=1)) == {1, 3}
    assert set(draws(logits, 600, top_p=0.9, seed=1)) == {1, 2, 3}
    assert set(draws(logits, 900, top_p=1.0, seed=1)) == {0, 1, 2, 3}


def test_a_wide_nucleus_looks_past_the_first_candidates() -> None:
    assert len(set(draws(torch.zeros(2000), 3000, top_p=0.99, seed=1))) > 1000


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((100,), -math.inf)
    logits[17] = 0.0
    assert set(draws(logits, 20, temperature=2, seed=3)) == {17}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float) -> None:
    with pytest.raises(KvxferError, match="not finite"):
        draws(torch.full((4,), value), 1, temperature=temperature)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_params_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def reference_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    places = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(places)], True) if places else (text, False)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_checker_ends_at_a_stop_string_wherever_the_pieces_break(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    checker, sent, at = StopChecker(stops), "", 0
    for cut in [*sorted(cuts), len(text)]:
        sent += checker.push(text[at:cut])
        at = max(at, cut)
        assert text.startswith(sent)
    is_stopped = checker.stopped is not None
    sent += checker.flush()
    expected, should_stop = reference_stop(text, stops)
    assert is_stopped == should_stop
    assert sent == expected if not should_stop else text.startswith(sent)


def test_of_two_stop_strings_in_one_piece_the_first_counts() -> None:
    checker = StopChecker(["world", "hello"])
    assert checker.push("say hello world") == "say "
    assert checker.stopped == "hello"
    assert checker.push("more") == ""
    assert checker.flush() == ""


def test_only_what_could_start_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert [checker.push(piece) for piece in ("Hi\n", "\nUs", "ual")] == ["Hi", "", "\n\nUsual"]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_detokenised_pieces_join_to_the_text(tiny_model: LoadedModel, text: str, prompt: str) -> None:
    # A special token written out is that token, as for every server of this API, and special tokens have no text.
    assume(not any(special in text for special in tiny_model.tokenizer.all_special_tokens))
    detokenizer = tiny_model.detokenizer(tiny_model.encode(prompt))
    pieces = [detokenizer.push(token) for token in tiny_model.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=60))
def test_detokenising_any_tokens_keeps_up_and_repeats_nothing(tiny_model: LoadedModel, ids: list[int]) -> None:
    detokenizer = tiny_model.detokenizer()
    sent, behind = "", 0
    for count, token in enumerate(ids, 1):
        sent += detokenizer.push(token)
        behind = max(behind, len(tiny_model.tokenizer.decode(ids[:count], skip_special_tokens=True)) - len(sent))
    sent += detokenizer.flush()
    expected = tiny_model.tokenizer.decode(ids, skip_special_tokens=True)
    assert sent.replace("\ufffd", "") == expected.replace("\ufffd", "")
    assert behind <= 3


def test_a_character_of_four_bytes_comes_whole(tiny_model: LoadedModel) -> None:
    ids = tiny_model.encode("a😀b")
    assert len(ids) >= 6
    detokenizer = tiny_model.detokenizer()
    assert [piece for piece in (detokenizer.push(token) for token in ids) if piece] == ["a", "😀", "b"]


class SentencePieceLike:
    """Decodes as Llama 2's tokenizer does: words carry their leading space, the first one loses it."""

    words = ("▁Hello", "▁big", "▁world", "s")

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        return "".join(self.words[token] for token in ids).replace("▁", " ").removeprefix(" ")


def test_leading_spaces_between_prompt_and_answer_are_kept() -> None:
    detokenizer = Detokenizer(SentencePieceLike(), [0])
    assert [detokenizer.push(token) for token in (1, 2, 3)] == [" big", " world", "s"]
    alone = Detokenizer(SentencePieceLike())
    assert [alone.push(token) for token in (0, 1)] == ["Hello", " big"]
