"""A run in numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.intervals import Percentiles, percentile, wilson
from kvxfer.load.judge import QUANTITIES, RunSummary, summarize, tokens_within
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.record import MeasuredRequest
from tests.support.load_made_up import account
from tests.support.load_records import answered, failed, run_of

LIMITS = LatencyLimits.parse("ttft:200 tpot:50")


def test_counts_and_rates_are_of_the_requests_due_in_the_window() -> None:
    records = [
        answered(0, -1.0, is_warmup=True),
        answered(1, 0.0),
        answered(2, 1.0, ttft_s=0.5),
        failed(3, 2.0),
        failed(4, 3.0, "not_sent", sent_s=None, end_s=None),
        answered(5, 10.0),
        answered(6, 2.0, is_warmup=True),
    ]
    summary = summarize(run_of(records, point={"devices": 2}), LIMITS, 0.9)
    assert (summary.due, summary.sent, summary.answered, summary.good) == (4, 3, 2, 1)
    assert (summary.failed, summary.missed) == ({"not_sent": 1, "status_503": 1}, {"ttft": 1})
    assert (summary.offered_per_s, summary.delivered_per_s) == (0.4, pytest.approx(0.3))
    assert (summary.goodput_per_s, summary.goodput_per_device_per_s) == (0.1, 0.05)
    assert summary.attainment.share == 0.25
    assert not summary.is_attained


def test_without_devices_or_limits_nothing_is_made_up() -> None:
    summary = summarize(run_of([answered(0, 0.0, ttft_s=99)]), None, 1.0)
    assert summary.goodput_per_device_per_s is None
    assert summary.output_tokens_per_s_per_device is None
    assert (summary.good, summary.limits, summary.is_attained) == (1, "", True)


def test_an_empty_run_is_a_summary_too() -> None:
    summary = summarize(run_of([], seconds=0.0), LIMITS, 0.9)
    assert (summary.due, summary.offered_per_s, summary.is_attained) == (0, 0.0, False)
    assert (summary.attainment.low, summary.attainment.high) == (0.0, 1.0)
    assert summary.of_all["ttft"] == Percentiles(0)
    json.dumps(summary.to_json(), allow_nan=False)


def test_phases_are_of_the_answers_that_an_account_explains() -> None:
    told = answered(0, 0.0, ttft_s=0.1)
    told.account = account("p", "d", began=0.02, prefill=0.05, transfer=0.01, first=told.ttft_s, last=told.e2e_s)
    summary = summarize(run_of([told, answered(1, 1.0), failed(2, 2.0)]), LIMITS, 0.9)
    assert (summary.joined.good, summary.joined.total) == (1, 2)
    assert sum(one.mean or 0.0 for one in summary.phases.values()) == pytest.approx(told.e2e_s)
    assert summary.phases["queue"].p99 == pytest.approx(0.0196)
    assert not summarize(run_of([answered(1, 1.0)]), LIMITS, 0.9).phases


def test_percentiles_are_of_the_successful_and_of_all() -> None:
    records = [answered(number, number / 10, ttft_s=0.1 + number / 1e3) for number in range(99)]
    summary = summarize(run_of([*records, failed(99, 9.9)]), LIMITS, 0.9)
    assert summary.of_successful["ttft"].max == pytest.approx(0.198)
    assert summary.of_successful["ttft"].mean == pytest.approx(0.149)
    assert summary.of_all["ttft"].p95 == pytest.approx(0.19405)
    assert summary.of_all["ttft"].p99 == summary.of_all["ttft"].max == summary.of_all["ttft"].mean == math.inf
    values = summary.to_json()["of_all"]["ttft"]
    assert (values["p99"], values["p50"], values["count"]) == ("inf", pytest.approx(0.1495), 100)


def test_one_token_answers_have_no_tpot() -> None:
    summary = summarize(run_of([answered(0, 0.0, output_tokens=1)]), LIMITS, 0.9)
    assert summary.of_successful["tpot"].count == summary.of_all["tpot"].count == 0
    assert summary.tokens_per_s_per_user is None
    assert summary.good == 1


def test_an_answer_without_content_is_infinite_among_all_and_left_out_of_the_successful() -> None:
    summary = summarize(run_of([answered(0, 0.0, first_s=None, last_s=None, output_tokens=1)]), None, 0.9)
    assert summary.of_successful["ttft"].count == 0
    assert summary.of_all["ttft"].max == math.inf


def test_what_a_tool_does_not_tell_is_unknown_and_not_failed() -> None:
    """One failed request made the gap of all answers infinite."""
    untold_gap = {"not_told": ["longest_gap_s"]}
    records = [answered(0, 0.0, longest_gap_s=None), failed(1, 1.0)]
    summary = summarize(run_of(records, settings=untold_gap), None, 0.9)
    assert summary.of_all["gap"] == Percentiles(0)
    assert summary.of_all["ttft"].max == math.inf
    assert summarize(run_of(records), None, 0.9).of_all["gap"].p50 == math.inf
    assert summarize(run_of(records[1:], settings=untold_gap), None, 0.9).of_all["gap"].p50 == math.inf


def test_lateness_of_a_failed_request_is_what_it_was() -> None:
    summary = summarize(run_of([failed(0, 0.0, sent_s=0.003), failed(1, 1.0, sent_s=None)]), None, 0.9)
    assert summary.of_all["lateness"].p50 == math.inf
    only_sent = summarize(run_of([failed(0, 0.0, sent_s=0.003)]), None, 0.9)
    assert only_sent.of_all["lateness"].max == 0.003


def test_tokens_count_when_they_come() -> None:
    one = answered(0, 0.0, ttft_s=1.0, tpot_s=1.0)
    assert tokens_within(one, 0.0, 100.0) == 11
    assert tokens_within(one, 0.0, 3.0) == pytest.approx(3)
    assert tokens_within(one, 3.0, 5.0) == pytest.approx(2)
    at_once = answered(0, 0.0, ttft_s=1.0, tpot_s=0.0)
    assert tokens_within(at_once, 0.0, 2.0) == 11
    assert tokens_within(at_once, 1.5, 2.0) == 0
    summary = summarize(run_of([one, answered(1, -5.0, is_warmup=True, ttft_s=1.0, tpot_s=1.0)]), None, 0.9)
    assert summary.output_tokens_per_s == pytest.approx((10 + 6) / 10)
    assert summary.tokens_per_s_per_user == pytest.approx(1.0)


def test_what_the_server_held_is_not_what_was_due() -> None:
    late = [answered(number, number / 10, ttft_s=number / 5) for number in range(100)]
    summary = summarize(run_of(late), None, 0.9)
    assert summary.offered_per_s == 10.0
    assert 3 < summary.answered_per_s < 3.5


@given(st.integers(0, 300), st.integers(0, 300))
def test_wilson_bounds_hold_the_share(good: int, bad: int) -> None:
    low, high = wilson(good, good + bad)
    assert 0 <= low <= high <= 1
    if good + bad:
        assert low <= good / (good + bad) <= high


def test_wilson_bounds_are_those_of_the_literature() -> None:
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)  # Newcombe 1998, table I, method 3


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_that_of_numpy(values: list[float], share: float) -> None:
    ours = percentile(sorted(values), share)
    assert ours == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-6, abs=1e-3)


records_of_run = st.lists(
    st.tuples(
        st.floats(0, 9.99), st.floats(0, 2), st.floats(0, 0.1), st.integers(1, 20), st.sampled_from(["", "status_503"])
    ),
    min_size=1,
    max_size=60,
)


def made(rows: list[tuple[float, float, float, int, str]]) -> list[MeasuredRequest]:
    return [
        failed(number, due, error)
        if error
        else answered(number, due, ttft_s=ttft, tpot_s=tpot, output_tokens=tokens, sent_s=due + 0.001)
        for number, (due, ttft, tpot, tokens, error) in enumerate(rows)
    ]


@given(records_of_run, st.data())
def test_a_failure_lowers_attainment_and_never_improves_a_percentile_of_all(rows: Any, data: st.DataObject) -> None:
    records = made(rows)
    before = summarize(run_of(records), LIMITS, 0.9)
    place = data.draw(st.integers(0, len(records) - 1))
    how: dict[str, Any] = data.draw(
        st.sampled_from(
            [{"error": "status_503"}, {"error": "cut"}, {"error": "not_sent", "sent_s": None}, {"end_s": None}]
        )
    )
    was_good = LIMITS.is_met(records[place])
    records[place] = dataclasses.replace(records[place], **how)
    after = summarize(run_of(records), LIMITS, 0.9)
    assert after.good == before.good - was_good
    assert after.attainment.share <= before.attainment.share
    assert after.goodput_per_s <= before.goodput_per_s
    for name in QUANTITIES:
        for of in ("mean", "p50", "p90", "p95", "p99", "max"):
            old, new = getattr(before.of_all[name], of), getattr(after.of_all[name], of)
            assert old is None or new >= old, (name, of)


@given(records_of_run)
def test_a_summary_is_json_without_nan(rows: Any) -> None:
    summary = summarize(run_of(made(rows)), LIMITS, 0.9)
    text = json.dumps(summary.to_json(), allow_nan=False)
    assert {*json.loads(text)} == {field.name for field in dataclasses.fields(RunSummary)} | {"is_attained"}
