"""A worker's line of prompts: how long a new one waits, and what ends tell of its speed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy.lines import BURST_MAX, Amount, Line, Measured


def test_the_wait_is_that_of_those_before_and_shrinks_while_the_first_is_computed() -> None:
    line = Line()
    assert line.wait_s(5.0) == 0.0
    for number, seconds in enumerate((2.0, 3.0)):
        line.add(number, seconds, 10.0, 1.0)
    assert line.wait_s(10.0) == 5.0
    assert line.wait_s(11.5) == 3.5
    assert line.wait_s(99.0) == 3.0  # late: the first may end at any time, the second has not begun
    assert line.ended(0, 1000, 0, 0, 12.0) is None
    assert line.wait_s(12.0) == 3.0
    assert line.wait_s(13.0) == 2.0
    line.lost(1, 13.0)
    assert line.wait_s(13.0) == 0.0
    assert len(line) == 0


def test_what_is_not_heard_is_over_when_its_time_is() -> None:
    line = Line()
    line.add(None, 2.0, 10.0, 1.0)
    line.add(None, 1.0, 10.5, 1.0)
    line.add(1, 4.0, 11.0, 1.0)
    assert line.wait_s(11.0) == 2.0 + 4.0
    assert line.wait_s(13.5) == 1.5
    line.add(None, 1.0, 20.0, 1.0)
    assert line.ended(1, 10, 0, 0, 20.0) == Measured(Amount(1, 10, 50.0), Amount(1, 10, 50.0), 9.0)
    assert line.wait_s(20.25) == 0.75


def test_a_busy_period_is_one_measurement() -> None:
    line = Line()
    line.add(1, 1.0, 0.0, 1.0)
    line.add(2, 1.0, 0.5, 1.0)
    assert line.ended(1, 100, 0, 0, 3.0) is None
    said, presumed = Amount(2, 300, 100 * 50.0 + 200 * 150.0), Amount(2, 310, 100 * 50.0 + 210 * 145.0)
    assert line.ended(2, 250, 50, 40, 3.1) == Measured(said, presumed, 3.1)
    line.add(3, 0.5, 100.0, 1.0)
    assert line.ended(3, 10, 0, 0, 100.25) == Measured(Amount(1, 10, 50.0), Amount(1, 10, 50.0), 0.25)


def test_nothing_is_measured_of_a_period_in_which_one_was_lost() -> None:
    line = Line()
    for number in (1, 2, 3):
        line.add(number, 1.0, 0.0, 1.0)
    assert line.ended(1, 100, 0, 0, 1.0) is None
    line.lost(2, 1.5)
    measured = line.ended(3, 100, 0, 0, 2.5)
    assert measured == Measured(Amount(1, 100, 5000.0), Amount(1, 100, 5000.0), 1.0)
    line.lost(3, 9.0)
    assert line.ended(3, 100, 0, 0, 9.0) is None


@given(st.integers(0, 1000), st.floats(0.1, 4.0), st.integers(1, 4))
def test_the_speed_of_a_worker_is_what_its_ends_say(seed: int, factor: float, at_once: int) -> None:
    """One that computes one after another, and one that computes several at once: the sums are right in both."""
    draw = random.Random(seed)
    line, now_s, tokens, seconds, number = Line(), 0.0, 0.0, 0.0, 0
    for _ in range(20):
        works = [draw.uniform(10, 1000) for _ in range(draw.randint(1, 9))]
        first_number = number
        for work in works:
            line.add(number, work, now_s, 1.0)
            number += 1
        for first in range(0, len(works), at_once):
            batch = works[first : first + at_once]
            now_s += factor * sum(batch)
            for at, work in enumerate(batch):
                measured = line.ended(first_number + first + at, work, 0, 0, now_s)
                if measured is not None:
                    assert measured.said.prompts <= BURST_MAX
                    tokens += measured.said.new
                    seconds += measured.seconds
        now_s += draw.uniform(0, 100)
    assert seconds == pytest.approx(tokens * factor, rel=0.25 if at_once > 1 else 1e-6)


def test_the_rate_is_that_of_arrivals_lately_and_of_one_scale_with_the_prompts() -> None:
    for scale in (0.01, 1.0, 100.0):
        line = Line()
        assert line.rate(0.0, scale) == 0.0
        for number in range(400):
            line.add(number, scale, number * scale * 2.0, scale)
            line.ended(number, 1, 0, 0, number * scale * 2.0 + scale)
        now_s = 400 * scale * 2.0
        assert line.rate(now_s, scale) * scale == pytest.approx(0.5, rel=0.05)
        assert line.rate(now_s + 1000 * scale, scale) * scale < 0.01
        assert line.rate(now_s, 0.0) == 0.0
