"""The limits of a good request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.load.limits import LatencyLimits
from tests.support.load_records import answered, failed

LATE = LatencyLimits.parse("tpot:10 gap:100")


def test_what_was_not_measured_meets_no_limit() -> None:
    """All content at once, by one chunk or by several; no count of the tokens; no gap told."""
    lump = answered(0, 1.0, last_s=1.1, chunks=1, arrivals=1, longest_gap_s=None)
    burst = answered(0, 1.0, last_s=1.1, arrivals=1, longest_gap_s=0.0)
    for record in (lump, burst):
        assert (record.tpot_s, LATE.unmeasured(record), LATE.missed(record)) == (None, ("tpot", "gap"), ())
        assert not LATE.is_met(record)
        assert LatencyLimits.parse("ttft:200").is_met(record)
    uncounted = answered(0, 1.0)
    uncounted.output_tokens = None
    assert LATE.unmeasured(uncounted) == ("tpot",)
    assert LATE.unmeasured(answered(0, 1.0, longest_gap_s=None)) == ("gap",)


def test_a_single_token_has_neither_tpot_nor_gap() -> None:
    """Also where others were hidden. Limits of these say nothing of it."""
    assert LATE.is_met(answered(0, 1.0, output_tokens=1))
    assert LATE.is_met(answered(0, 1.0, output_tokens=50, last_s=1.1, longest_gap_s=None, chunks=1, hidden_tokens=49))


def test_an_answer_without_content_misses_each_limit() -> None:
    silent = answered(0, 0.0, first_s=None, last_s=None, chunks=0, longest_gap_s=None)
    for text in ("ttft:9", "tpot:9", "e2e:9", "gap:9"):
        assert LatencyLimits.parse(text).missed(silent)


def test_a_short_answer_is_not_good_without_limits_too() -> None:
    cut = answered(0, 1.0, is_length_asked=True)
    cut.output_tokens_asked = 200
    assert not LatencyLimits().is_met(cut)
    cut.is_length_asked = False
    assert LatencyLimits().is_met(cut)


def test_limits_are_read_in_milliseconds() -> None:
    assert LatencyLimits.parse("ttft:200 tpot:50") == LatencyLimits(ttft_s=0.2, tpot_s=0.05)
    assert LatencyLimits.parse(" gap:1e3,e2e:12.5 ") == LatencyLimits(e2e_s=0.0125, gap_s=1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no limit"),
        ("  ", "no limit"),
        ("ttft", "one of ttft, tpot, e2e, gap"),
        ("ttft:", "not ''"),
        ("ttft:fast", "'fast'"),
        ("ttft:0", "above 0"),
        ("ttft:-1", "above 0"),
        ("ttft:nan", "above 0"),
        ("ttft:inf", "at most"),
        ("ttft:1_000", "'1_000'"),
        ("ttft:200ms", "'200ms'"),
        ("ttft: 200", "not ''"),
        ("ttft:1 ttft:2", "twice"),
        ("TTFT:200", "one of"),
        ("itl:20", "one of"),
        ("ttft:1e99", "at most"),
    ],
)
def test_anything_else_is_told_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LatencyLimits.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_limits_or_one_error(text: str) -> None:
    try:
        found = LatencyLimits.parse(text)
    except ConfigError:
        return
    assert LatencyLimits.parse(str(found)) == found


def test_a_request_meets_all_limits_or_is_not_good() -> None:
    limits = LatencyLimits.parse("ttft:100 tpot:10 e2e:200 gap:50")
    assert limits.is_met(answered(0, 1.0, ttft_s=0.09, tpot_s=0.009))
    assert limits.missed(answered(0, 1.0, ttft_s=0.11, tpot_s=0.008)) == ("ttft",)
    assert limits.missed(answered(0, 1.0, ttft_s=0.05, tpot_s=0.011)) == ("tpot",)
    assert limits.missed(answered(0, 1.0, ttft_s=0.05, tpot_s=0.016)) == ("tpot", "e2e")
    assert limits.missed(answered(0, 1.0, ttft_s=0.05, tpot_s=0.008, longest_gap_s=0.06)) == ("gap",)


def test_time_counts_from_when_the_request_was_due() -> None:
    assert LatencyLimits.parse("ttft:100").missed(answered(0, 1.0, ttft_s=0.15, sent_s=1.1)) == ("ttft",)


def test_an_answer_of_one_token_has_no_tpot_and_no_gap_to_miss() -> None:
    assert LatencyLimits.parse("tpot:1 gap:1").is_met(answered(0, 0.0, output_tokens=1))


@pytest.mark.parametrize("limits", [LatencyLimits(), LatencyLimits.parse("ttft:1000")])
def test_a_failed_request_meets_nothing(limits: LatencyLimits) -> None:
    assert not limits.is_met(failed(0, 0.0))
    assert not limits.is_met(failed(0, 0.0, "cut", first_s=0.1, last_s=0.2, output_tokens=5))
    assert not limits.is_met(failed(0, 0.0, "not_sent", sent_s=None, end_s=None))
    assert not limits.is_met(answered(0, 0.0, end_s=None))


def test_without_limits_each_whole_answer_is_good() -> None:
    assert LatencyLimits().is_met(answered(0, 0.0, ttft_s=1e4))
