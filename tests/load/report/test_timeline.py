"""The timeline: no bar covers another, and of many workers those around the slowest request are drawn."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.report import trace_events as trace_events_module
from kvxfer.load.report.columns import columns_of
from kvxfer.load.report.timeline import (
    SERVER,
    SHOWN_REQUESTS,
    WORKERS_MAX,
    WorkerSpan,
    chosen,
    packed,
    spans_of,
    timeline,
)
from kvxfer.load.report.trace_events import trace_events
from tests.support.load_made_up import made_up_run
from tests.support.load_records import answered, run_of

SPANS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 20)), max_size=60)


@given(SPANS)
def test_no_two_bars_of_a_row_overlap(made: list[tuple[str, int, int]]) -> None:
    spans = [
        WorkerSpan(worker, float(begin), float(length), "decode", answered(at, 0.0))
        for at, (worker, begin, length) in enumerate(made)
    ]
    places, rows = packed(spans)
    by_row: dict[int, list[WorkerSpan]] = {}
    for span, row in zip(spans, places, strict=True):
        by_row.setdefault(row, []).append(span)
    for members in by_row.values():
        members.sort(key=lambda span: span.begin_s)
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(members))
        assert len({span.worker for span in members}) == 1
    for one in rows:
        mine = [row for span, row in zip(spans, places, strict=True) if span.worker == one.worker]
        assert min(mine) >= one.first
        assert max(mine) < one.first + one.count
        most = max(sum(s.worker == one.worker and s.begin_s <= at < s.end_s for s in spans) for at in range(71))
        assert one.count == max(most, 2), "no more rows than requests at one time, and room for the name"


def test_workers_that_prefill_stand_first_and_ten_after_nine() -> None:
    record = answered(0, 0.0)
    names = [("w10", "decode"), ("w9", "decode"), ("z2", "prefill"), ("z10", "prefill")]
    _, rows = packed([WorkerSpan(name, 0.0, 1.0, phase, record) for name, phase in names])
    assert [one.worker for one in rows] == ["z2", "z10", "w9", "w10"]


def test_of_many_workers_those_around_the_slowest_are_drawn() -> None:
    run = made_up_run(requests=1000, rate=200.0, split=(40, 40), failing=0.0)
    slowest = max(run.records, key=lambda record: record.ttft_s)
    figure = timeline(columns_of(run))
    assert len(figure.layout["yaxis"]["ticktext"]) == WORKERS_MAX
    drawn = {row[0] for trace in figure.traces for row in trace["customdata"]}
    assert slowest.number in drawn
    assert len(drawn) <= SHOWN_REQUESTS
    assert f"on {WORKERS_MAX} of 80 workers" in figure.notes[0]
    assert figure.height < 1500


def test_without_accounts_the_clients_view_is_drawn() -> None:
    run = made_up_run(requests=50, has_accounts=False)
    figure = timeline(columns_of(run))
    assert figure.layout["yaxis"]["ticktext"] == [SERVER]
    assert [trace["name"] for trace in figure.traces] == ["first token", "answer"]
    assert "No account of the phases came" in figure.sentence


def test_a_request_without_an_account_is_left_out_beside_others() -> None:
    run = made_up_run(requests=50, failing=0.0)
    run.records[7].account = None
    spans, requests, workers = chosen(run.records)
    assert requests == 49
    assert workers == 4
    assert SERVER not in {span.worker for span in spans}


def test_the_bars_of_a_request_are_its_phases() -> None:
    [record] = made_up_run(requests=1, failing=0.0).records
    spans = list(spans_of(record))
    assert [span.phase for span in spans] == ["queue", "prefill", "transfer", "gap", "decode"]
    assert [span.worker for span in spans] == ["prefill-0"] * 2 + ["decode-0"] * 3
    assert not timeline(columns_of(run_of([record], 1e9))).missing


def test_the_trace_has_every_phase_on_its_worker() -> None:
    run = made_up_run(requests=60, failing=0.0)
    document = json.loads(trace_events(columns_of(run)))
    names = {one["pid"]: one["args"]["name"] for one in document["traceEvents"] if one["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    drawn = [one for one in document["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["number"] for one in drawn} == set(range(60))
    of_first = [one for one in drawn if one["args"]["number"] == 0]
    assert [one["name"] for one in of_first] == ["queue", "prefill", "transfer", "gap", "decode"]
    assert of_first[-1]["ts"] + of_first[-1]["dur"] <= (run.records[0].last_s or 0.0) * 1e6 + 1
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in drawn:
        by_row.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for spans in by_row.values():
        assert all(one[1] <= other[0] + 0.2 for one, other in itertools.pairwise(sorted(spans)))


def test_the_trace_says_what_it_is_of() -> None:
    run = made_up_run(requests=100, failing=0.0)
    assert json.loads(trace_events(columns_of(run)))["otherData"] == {"run": "run", "requests": 100, "workers": 4}
    assert trace_events(columns_of(run_of([]))) == "", "of nothing there is none"


def test_the_trace_of_a_long_run_is_of_the_requests_around_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events_module, "REQUESTS_MAX", 20)
    run = made_up_run(requests=100, failing=0.0)
    slowest = max(run.records, key=lambda record: record.ttft_s)
    drawn = json.loads(trace_events(columns_of(run)))["traceEvents"]
    numbers = {one["args"]["number"] for one in drawn if one["ph"] == "X"}
    assert len(numbers) == 20
    assert slowest.number in numbers
