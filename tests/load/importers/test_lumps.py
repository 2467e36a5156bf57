"""Tokens that came in lumps, by what other tools tell of the chunks; what was asked for, by the bodies they kept."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.load.importers.made import asked_of, note_first, note_gaps
from tests.support.load_records import answered


def test_each_lump_counts_as_as_many_tokens_as_any_other() -> None:
    """Four chunks of 100 tokens: 20 ms a token, and not 1.5 s for 99."""
    record = answered(0, 0.0, ttft_s=0.5, tpot_s=1.5 / 99, output_tokens=100)
    note_gaps(record, [0.5, 0.5, 0.5])
    assert (record.chunks, record.arrivals, record.first_chunk_tokens, record.longest_gap_s) == (4, 4, 25, 0.5)
    assert record.tpot_s == pytest.approx(0.02)


def test_chunks_that_came_at_once_are_one_arrival() -> None:
    record = answered(0, 0.0, output_tokens=9)
    note_gaps(record, [0.0002, 0.0001, 0.5, 0.0004, 0.0007, 0.5, 0.0, 0.0])
    assert (record.chunks, record.arrivals, record.first_chunk_tokens) == (9, 4, 3), "the sixth came 1.1 ms later"


def test_without_gaps_a_token_each_chunk_stays_one() -> None:
    record = answered(0, 0.0)
    note_first(record)
    assert record.first_chunk_tokens == 1


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (None, (0, False)),
        ({"ignore_eos": True}, (0, False)),
        ({"max_tokens": 9}, (9, False)),
        ({"max_tokens": 9, "ignore_eos": True}, (9, True)),
        ({"max_completion_tokens": 9, "ignore_eos": True, "stop": ["x"]}, (9, False)),
    ],
)
def test_the_asked_length_is_that_of_the_body(body: Any, asked: tuple[int, bool]) -> None:
    assert asked_of(body) == asked
