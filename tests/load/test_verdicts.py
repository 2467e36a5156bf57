"""Whether a run can be believed."""

from __future__ import annotations

import json

import pytest

from kvxfer.load.judge import summarize
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.offered import workload_from
from kvxfer.load.options import WorkloadOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import stationarity
from kvxfer.load.verdicts import RunVerdict, has_failed, judge_run, requests_for
from kvxfer.workload.request import DispatchMode
from tests.support.load_queues import queue_run
from tests.support.load_records import answered, failed, run_of

LIMITS = LatencyLimits.parse("ttft:200")


def verdicts(run: LoadRun, attainment: float = 0.9) -> dict[str, RunVerdict]:
    found = judge_run(run, summarize(run, LIMITS, attainment), stationarity(run, LIMITS))
    json.dumps([verdict.to_json() for verdict in found])
    assert all(verdict.sentence.endswith(".") for verdict in found)
    assert [verdict.is_failure for verdict in found] == sorted((one.is_failure for one in found), reverse=True)
    assert has_failed(found) == any(verdict.is_failure for verdict in found)
    return {verdict.name: verdict for verdict in found}


def even(count: int = 1000, **more: object) -> list[MeasuredRequest]:
    return [answered(number, number / 100, **more) for number in range(count)]


def test_a_good_run_has_no_verdict() -> None:
    assert verdicts(run_of(even())) == {}


def test_a_late_generator_fails_the_run() -> None:
    records = [answered(n, n / 100, sent_s=n / 100 + (0.004 if n % 50 == 0 else 0.0)) for n in range(1000)]
    found = verdicts(run_of(records))
    assert {*found} == {"generator_late"}
    assert found["generator_late"].is_failure
    assert "4.0 ms" in found["generator_late"].sentence


def test_a_server_that_is_slow_to_read_does_not_make_the_generator_late() -> None:
    """And its load was delivered: the requests were begun in time."""
    slow = [answered(n, n / 100, ttft_s=0.19, begun_s=n / 100 + 0.001, sent_s=n / 100 + 0.18) for n in range(1000)]
    assert verdicts(run_of(slow)) == {}
    late = [answered(n, n / 100, ttft_s=1.1, begun_s=n / 100 + 0.5, sent_s=n / 100 + 1) for n in range(1000)]
    assert {"generator_late", "undelivered"} <= {*verdicts(run_of(late))}


@pytest.mark.parametrize(("duration_s", "is_told"), [(20.0, True), (400.0, False)])
def test_sessions_that_come_up_slowly_offer_less_than_was_asked_for(duration_s: float, is_told: bool) -> None:
    asked = WorkloadOptions(rate=20.0, duration_s=duration_s, turns=4, think_s=5.0, session_mode=DispatchMode.TIMESTAMP)
    records = [
        answered(one.number, one.due_s or 0.0, session=one.session, turn=one.turn)
        for one in workload_from(asked).requests
    ]
    found = verdicts(run_of(records, duration_s, offered_per_s=asked.rate))
    assert ("offered_less" in found) == is_told
    if is_told:
        assert not found["offered_less"].is_failure
        assert "of 20 requests/s" in found["offered_less"].sentence
    imported = run_of(records, duration_s, offered_per_s=asked.rate, settings={"imported_from": "x"})
    assert "offered_less" not in verdicts(imported), "another tool's rate may be that of its sessions"


@pytest.mark.parametrize(
    ("late", "worst_s", "is_told"), [(11, 0.0021, True), (10, 0.5, False), (500, 0.0019, False), (0, 0.0, False)]
)
def test_arrivals_that_were_noted_too_late_are_told(late: int, worst_s: float, is_told: bool) -> None:
    """More than one in a hundred requests, and by more than the generator may be late."""
    uses = [
        {"sent": 500, "stamps_late": late, "worst_stamp_s": worst_s},
        {"sent": 500, "stamps_late": 0, "worst_stamp_s": 0.0},
    ]
    found = verdicts(run_of(even(), settings={"generator": {"processes": uses}}))
    assert {*found} == ({"stamps_late"} if is_told else set())
    if is_told:
        assert not found["stamps_late"].is_failure
        assert "noted 11 arrivals too late" in found["stamps_late"].sentence
        assert "2.1 ms" in found["stamps_late"].sentence


def test_two_percent_of_the_first_tokens_time_is_allowed() -> None:
    slow, fast = even(ttft_s=0.19), even(ttft_s=0.1)
    for record in slow + fast:
        record.sent_s = record.due_s + 0.0035
    assert verdicts(run_of(slow)) == {}
    assert {*verdicts(run_of(fast))} == {"generator_late"}


def test_one_late_request_of_a_thousand_is_no_late_generator() -> None:
    assert verdicts(run_of([answered(n, n / 100, sent_s=n / 100 + (0.5 if n == 7 else 0)) for n in range(1000)])) == {}


def test_requests_that_were_not_sent_fail_the_run() -> None:
    records = [failed(n, n / 100, "not_sent", sent_s=None) if 300 <= n < 306 else one for n, one in enumerate(even())]
    found = verdicts(run_of(records))
    assert {*found} == {"undelivered", "failures"}
    assert found["undelivered"].is_failure
    assert "6 of 1000" in found["undelivered"].sentence
    assert not found["failures"].is_failure


def test_a_stall_of_the_generator_is_not_hidden_by_the_rest_of_the_run() -> None:
    records = [answered(n, n / 100, sent_s=max(n / 100, 11.0) if 1000 <= n < 1100 else n / 100) for n in range(6000)]
    assert {"undelivered", "generator_late"} <= {*verdicts(run_of(records, 60.0))}


def test_turns_of_a_broken_session_are_the_servers_failure() -> None:
    records = [failed(n, n / 100, "not_sent", sent_s=None, turn=1) if n < 20 else one for n, one in enumerate(even())]
    assert {*verdicts(run_of(records))} == {"failures"}


def test_failures_of_the_server_are_a_result() -> None:
    records = [failed(n, n / 100) if n % 20 == 0 else one for n, one in enumerate(even())]
    found = verdicts(run_of(records))
    assert {*found} == {"failures"}
    assert "50 of 1000 requests failed (status_503 50)" in found["failures"].sentence


def test_the_commonest_failure_is_told_in_the_servers_words() -> None:
    records = [
        failed(0, 0.0, "timeout", message="slow"),
        *(failed(n, n / 100, message="no model \x1b[31m'x'") for n in (1, 2)),
        answered(3, 0.03),
    ]
    said = verdicts(run_of(records))["failures"].sentence
    assert "The first status_503 says: " in said
    assert "no model" in said
    assert "\x1b" not in said, "a server's words may not steer a terminal"


def test_a_servers_full_stop_is_not_doubled() -> None:
    said = verdicts(run_of([failed(0, 0.0, message="The model is busy."), answered(1, 0.1)]))["failures"].sentence
    assert said.endswith("says: 'The model is busy'.")


def test_whole_answers_without_content_are_told_and_fail_nothing() -> None:
    """Real engines give them: each of its tokens was a special one, or a part of a character."""
    silent = answered(0, 0.0, first_s=None, last_s=None, chunks=0, longest_gap_s=None)
    found = verdicts(run_of([silent, *even()[1:]]))
    assert found.keys() == {"no_content"}
    assert "1 of 1000 whole answers had no content" in found["no_content"].sentence
    assert "They miss every limit" in found["no_content"].sentence


def lumps(**more: object) -> list[MeasuredRequest]:
    """Half a second of work, then 11 tokens in one chunk."""
    return even(ttft_s=0.15, tpot_s=0.0, chunks=1, arrivals=1, longest_gap_s=None, first_chunk_tokens=11, **more)


def test_tokens_that_come_in_lumps_are_told() -> None:
    found = verdicts(run_of(even(arrivals=4)))
    assert {*found} == {"lumps"}
    assert "2.8 tokens came at a time, and an answer in 4.0 lumps" in found["lumps"].sentence
    assert "a token took 18.2 ms (median)" in found["lumps"].sentence, "0.2 s for 11 tokens"
    assert verdicts(run_of(even(arrivals=9))) == {}


def test_what_could_not_be_measured_is_told_and_is_not_good() -> None:
    run = run_of(lumps())
    assert {*verdicts(run)} == {"lumps", "unmeasured"}, "a limit of TTFT is met"
    limits = LatencyLimits.parse("tpot:500")
    summary = summarize(run, limits, 0.9)
    assert (summary.good, summary.missed, summary.unmeasured) == (0, {}, {"tpot": 1000})
    assert (summary.of_all["tpot"].count, summary.tokens_per_s_per_user) == (0, None)
    found = {one.name: one for one in judge_run(run, summary, stationarity(run, limits))}
    assert "1000 of 1000 whole answers have no TPOT that could be measured" in found["unmeasured"].sentence
    assert "They do not meet the limits of tpot." in found["unmeasured"].sentence
    assert "attainment_missed" in found


def test_hidden_tokens_are_told() -> None:
    found = verdicts(run_of(even(output_tokens=500, hidden_tokens=480, chunks=20, arrivals=20, tpot_s=0.001)))
    assert {*found} == {"hidden_tokens"}
    assert "1000 of 1000 whole answers have hidden tokens" in found["hidden_tokens"].sentence
    assert "96.0%" in found["hidden_tokens"].sentence
    assert verdicts(run_of(even(output_tokens=500, hidden_tokens=40, tpot_s=0.0001))) == {}, "special tokens"


def test_answers_shorter_than_asked_are_told_and_are_not_good() -> None:
    run = run_of(even(is_length_asked=True))
    for record in run.records[:150]:
        record.output_tokens_asked = 200
    found = verdicts(run)
    assert {*found} == {"short_answers", "attainment_missed"}
    sentence = found["short_answers"].sentence
    assert "150 of 1000 whole answers are shorter than asked for: 11.0 of 200.0 tokens" in sentence
    assert (summarize(run, None, 0.9).good, summarize(run, None, 0.9).short) == (850, 150)


def test_tokens_that_nobody_counted_are_told() -> None:
    assert {*verdicts(run_of(even(tokens_from="chunks")))} == {"tokens_uncounted"}


def test_attainment_that_is_missed_is_told() -> None:
    found = verdicts(run_of([answered(n, n / 100, ttft_s=0.3 if n % 5 == 0 else 0.1) for n in range(1000)]))
    assert {*found} == {"attainment_missed"}
    assert "80.0%" in found["attainment_missed"].sentence


@pytest.mark.parametrize(("share", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (1.0, 300)])
def test_a_quantile_needs_requests_beyond_it(share: float, needed: int) -> None:
    assert requests_for(share) == needed


def test_too_few_requests_are_told() -> None:
    assert {*verdicts(run_of(even(30)))} == {"too_few_requests"}
    assert verdicts(run_of(even(60))) == {}, "94 % to 100 % are all above the target"
    assert verdicts(run_of(even(100))) == {}
    assert {*verdicts(run_of(even(100)), 0.99)} == {"too_few_requests"}


def test_few_requests_that_are_enough_to_tell_are_not_told() -> None:
    bad = even(40)
    for record in bad[:30]:
        record.error = "timeout"
    assert "too_few_requests" not in verdicts(run_of(bad))


def test_of_no_request_nothing_is_judged() -> None:
    assert verdicts(run_of([]))["too_few_requests"].sentence.startswith("No request was due")


def test_a_run_above_capacity_is_told() -> None:
    assert "backlog_grows" in verdicts(queue_run(30.0, 20.0, 900, warmup=90, seed=1))


@pytest.mark.parametrize("ended", ["interrupted", "disk_full", "unreachable", "something_new"])
def test_a_run_that_ended_early_has_failed(ended: str) -> None:
    assert verdicts(run_of(even(), ended=ended))[ended].is_failure


@pytest.mark.parametrize("error", ["too_many_connections", "not_sent", "no_body"])
def test_a_server_cannot_say_that_the_generator_failed(error: str) -> None:
    """It refuses a hundred requests by a code that is also a name of ours."""
    told = [failed(n, n / 100, error, sent_s=n / 100) if n < 100 else one for n, one in enumerate(even())]
    assert "undelivered" not in verdicts(run_of(told))
    ours = [failed(n, n / 100, error, sent_s=None) if n < 100 else one for n, one in enumerate(even())]
    assert verdicts(run_of(ours))["undelivered"].is_failure


def test_a_name_of_its_own_for_each_error_is_no_column_of_its_own() -> None:
    records = [failed(n, n / 100, f"request_{n}") if n < 400 else one for n, one in enumerate(even())]
    run = run_of([*records, *(failed(n, 5.0, "busy") for n in range(1000, 1100))])
    summary = summarize(run, LIMITS, 0.9)
    assert len(summary.failed) == 50
    assert sum(summary.failed.values()) == 500
    assert (summary.failed["busy"], summary.failed["other_errors"]) == (100, 352)
    assert len(verdicts(run)["failures"].sentence) < 400
