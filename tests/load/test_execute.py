"""The window of a run: so many seconds belong to so many requests."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.load.execute import EDGE_S, LoadPlan, offered_rate, window_of
from kvxfer.load.options import ArrivalKind, TargetOptions, WorkloadOptions
from kvxfer.load.record import MeasuredRequest

TIMES = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=50)


def records(times: list[float], *, warmup: int = 0) -> list[MeasuredRequest]:
    return [
        MeasuredRequest("run", number, str(number), due_s, 1, 1, is_warmup=number < warmup)
        for number, due_s in enumerate(times)
    ]


@given(TIMES, st.floats(0.0, 100.0))
def test_all_requests_of_a_whole_run_are_in_its_window(times: list[float], begin_s: float) -> None:
    made = records([begin_s + time_s for time_s in sorted(times)])
    begin, end = window_of(made, begin_s, 0.0, is_whole=True)
    assert begin == begin_s
    assert all(begin <= record.due_s < end for record in made)
    written = [MeasuredRequest.from_json(record.to_json()) for record in made]
    assert all(record.due_s < end for record in written), "also as they are written"


@given(st.integers(2, 100), st.floats(0.1, 1000.0), st.integers(0, 5))
def test_equal_gaps_give_the_rate_itself(count: int, rate: float, warmup: int) -> None:
    begin_s = warmup / rate
    made = records([number / rate for number in range(count + warmup)], warmup=warmup)
    begin, end = window_of(made, begin_s, 0.0, is_whole=True)
    assert count / (end - begin) == pytest.approx(rate, rel=1e-3)


def test_a_duration_that_was_asked_for_is_the_window() -> None:
    assert window_of(records([1.0, 2.0]), 0.5, 10.0, is_whole=True) == (0.5, 10.5)


def test_a_run_that_was_cut_ends_when_its_last_thing_happened() -> None:
    made = records([1.0, 2.0, 50.0])
    made[0].sent_s, made[0].end_s, made[1].sent_s = 1.0, 3.5, 2.0
    assert window_of(made, 0.0, 100.0, is_whole=False) == (0.0, 3.5)
    assert window_of(records([1.0]), 0.0, 0.0, is_whole=False) == (0.0, EDGE_S)
    assert window_of([], 0.0, 0.0, is_whole=True) == (0.0, EDGE_S)


def test_a_probe_has_a_rate_and_prompts_of_its_own() -> None:
    plan = LoadPlan(TargetOptions(), WorkloadOptions(salt="mine ", duration_s=9.0))
    probe = plan.at_rate(7.0, 90, warmup=9, seed=5, salt="search-0-1")
    assert offered_rate(probe.workload) == 7.0
    assert (probe.workload.requests, probe.workload.seed, probe.drive.warmup) == (90, 5, 9)
    assert (probe.workload.salt, probe.workload.duration_s) == ("mine search-0-1", 0.0)
    bursts = dataclasses.replace(plan, workload=WorkloadOptions(arrival=ArrivalKind.GAMMA, burstiness=0.25))
    assert bursts.at_rate(7.0, 90, warmup=0, seed=5, salt="s").workload.arrival is ArrivalKind.GAMMA


def test_a_probe_of_a_trace_with_times_is_as_fast_as_its_rate_says(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * number, "input_length": 9, "output_length": 3, "hash_ids": []} for number in range(9)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = LoadPlan(TargetOptions(), WorkloadOptions(trace=str(trace)))
    assert offered_rate(plan.workload) is None
    probe = plan.at_rate(4.0, 5, warmup=0, seed=5, salt="s")
    assert probe.workload.speedup == pytest.approx(2.0)
    assert probe.workload.requests == 5


def test_a_trace_without_times_is_offered_at_the_rate(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "prompts.jsonl"
    trace.write_text('{"prompt": "one", "output_tokens": 3}\n' * 9)
    assert offered_rate(WorkloadOptions(trace=str(trace), rate=3.0)) == 3.0


def test_certificates_for_a_server_without_tls_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ca_file is for https"):
        TargetOptions(url="http://127.0.0.1:1", ca_file="ca.pem")


def test_settings_name_no_enum_and_no_secret() -> None:
    settings = LoadPlan(TargetOptions(api_key_file="/a/file")).settings
    assert settings["target"]["api"] == "completions"
    assert settings["workload"]["session_mode"] == "think"
