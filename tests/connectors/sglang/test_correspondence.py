"""Messages are taken once, by the process that they are for, in whatever order they come."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.sglang import correspondence
from kvxfer.connectors.sglang.correspondence import WINDOW, Correspondence, Window
from kvxfer.connectors.sglang.greetings import Abort, Postmark, Register, Registered
from kvxfer.connectors.sglang.limits import Layout
from kvxfer.types import CompatibilityRecord

RECORD = CompatibilityRecord("m", "c", "w", "float32", 3, 2, 16, 16, "page", "6 x 256", "config", "torch_native")
REGISTER = Register("d", 0, "metadata", RECORD, Layout((256,) * 6, (64,)), None)
REGISTERED = Registered("p", 0, "metadata", None)
ABORT = Abort(1, "", "x")
P, D = ("127.0.0.1", 1), ("127.0.0.1", 2)


@pytest.fixture
def p() -> Correspondence:
    return Correspondence("p")


@pytest.fixture
def d() -> Correspondence:
    return Correspondence("d")


def introduce(p: Correspondence, d: Correspondence) -> None:
    assert p.take(d.mark(P, REGISTER), D, REGISTER)
    assert d.take(p.mark(D, REGISTERED), P, REGISTERED)


def test_a_message_is_taken_once(p: Correspondence, d: Correspondence) -> None:
    introduce(p, d)
    mark = d.mark(P, ABORT)
    assert (mark.by, mark.to) == ("d", "p")
    assert p.take(mark, D, ABORT)
    assert not p.take(mark, D, ABORT)


def test_only_register_is_for_any_process_at_its_address(p: Correspondence, d: Correspondence) -> None:
    first, second = d.mark(P, ABORT), d.mark(P, REGISTER)
    assert not first.to
    assert not p.take(first, D, ABORT)
    assert p.take(second, D, REGISTER)
    assert not p.take(second, D, REGISTER)


def test_message_for_another_process_is_dropped(p: Correspondence, d: Correspondence) -> None:
    introduce(p, d)
    mark = d.mark(P, ABORT)
    later = Correspondence("p again")
    assert not later.take(mark, D, ABORT)
    assert later.take(d.mark(P, REGISTER), D, REGISTER)
    assert not later.take(mark, D, ABORT)
    assert d.take(later.mark(D, REGISTERED), P, REGISTERED)
    assert later.take(d.mark(P, ABORT), D, ABORT)


def test_an_answer_of_an_earlier_process_is_not_taken_again(p: Correspondence, d: Correspondence) -> None:
    introduce(p, d)
    was = p.mark(D, REGISTERED)
    assert d.take(was, P, REGISTERED)
    later = Correspondence("p again")
    introduce(later, d)
    assert not d.take(was, P, REGISTERED)
    assert d.mark(P, ABORT).to == "p again"


def test_message_without_a_known_receiver_is_kept(
    d: Correspondence, p: Correspondence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correspondence, "HELD_MAX", 3)
    d = Correspondence("d")
    for number in range(5):
        assert d.hold(P, Abort(number, "", "x"))
    assert d.hold(D, ABORT)
    assert d.release(P) == []
    introduce(p, d)
    assert [greeting.room for greeting in d.release(P)] == [3, 4]  # type: ignore[union-attr]
    assert d.release(P) == []
    assert not d.hold(P, ABORT)


def test_places_are_bounded(p: Correspondence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correspondence, "PLACES_MAX", 3)
    for port in range(9):
        assert p.take(Postmark(f"d{port}", "", 1), ("h", port), REGISTER)
    assert [p.mark(("h", port), ABORT).to for port in range(9)] == [""] * 6 + ["d6", "d7", "d8"]


@given(st.lists(st.integers(1, 60) | st.integers(WINDOW, WINDOW + 60) | st.integers(0, 1 << 63), max_size=60))
def test_message_number_is_taken_once_in_any_order(numbers: list[int]) -> None:
    window, taken = Window(), set()
    for number in numbers:
        if window.take(number):
            assert number not in taken
            taken.add(number)


def test_numbers_that_are_overtaken_are_taken() -> None:
    window, numbers = Window(), list(range(1, 3 * WINDOW))
    draw = random.Random(1)
    for at in range(0, len(numbers), WINDOW // 2):
        block = numbers[at : at + WINDOW // 2]
        draw.shuffle(block)
        numbers[at : at + WINDOW // 2] = block
    assert all(window.take(number) for number in numbers)
    assert not any(window.take(number) for number in numbers)
    assert window.take(1 << 62)
    assert not window.take((1 << 62) - WINDOW)
    assert window.take((1 << 62) - WINDOW + 1)
