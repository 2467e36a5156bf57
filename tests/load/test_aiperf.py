"""NVIDIA's ``aiperf``, unchanged, as the driver of a load test against mock engines: each planned request has a record.

It has an environment of its own, ``build/aiperf-venv``, which ``make nightly-aiperf`` makes.
"""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest

from kvxfer.load.drive.start import DriveProgress
from kvxfer.load.drive_aiperf import drive_aiperf
from kvxfer.load.importers.read import read_results
from kvxfer.load.offered import body_maker, workload_from
from kvxfer.load.options import ApiKind, DriveOptions, TargetOptions, WorkloadOptions
from kvxfer.load.record import NOT_SENT, MeasuredRequest
from kvxfer.workload.request import DispatchMode
from tests.support.mock_engine.mocks import Engine, mocks

AIPERF = pathlib.Path(__file__).resolve().parents[2] / "build" / "aiperf-venv" / "bin" / "aiperf"
TTFT_MS, ITL_MS = 100, 10

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.checkout,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not AIPERF.exists(), reason="build/aiperf-venv is not there: make nightly-aiperf"),
]


def through_aiperf(engine: Engine, directory: Any, api: ApiKind = ApiKind.COMPLETIONS, **workload: Any) -> Any:
    options = WorkloadOptions(rate=20, prompt_tokens=40, output_tokens=6, **workload)
    planned = workload_from(options)
    target = TargetOptions(url=engine.url, model="mock", api=api)
    records: list[MeasuredRequest] = []
    body = body_maker(target, options, planned, "mock").body
    drive = DriveOptions(aiperf=str(AIPERF), timeout_s=20)
    result = drive_aiperf(planned, body, target, drive, run="here", on_record=records.append, directory=directory)
    assert [record.number for record in records] == list(range(len(planned.requests)))
    return planned, result, records


@pytest.fixture(scope="module")
def engine() -> Any:
    with mocks("--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS), "--record", "256") as started:
        yield started.engines[0]


@pytest.mark.parametrize("api", list(ApiKind))
def test_the_plan_and_what_came_of_it(api: ApiKind, engine: Engine, tmp_path: pathlib.Path) -> None:
    planned, result, records = through_aiperf(engine, tmp_path, api, requests=30)
    assert (result.ended, result.message) == ("complete", "")
    assert not [record.error for record in records if record.error]
    for request, record in zip(planned.requests, records, strict=True):
        assert record.due_s == request.due_s
        assert record.lateness_s is not None
        assert record.lateness_s >= 0
        assert record.ttft_since_sent_s >= 0.9 * TTFT_MS / 1e3
        assert record.output_tokens == record.chunks == request.output_tokens
        assert record.tokens_from == "usage"
    sent = engine.request("GET", "/mock/requests").json()[-len(records) :]
    headers = [dict(one["headers"]) for one in sent]
    assert {one["x-request-id"] for one in headers} == {record.request_id for record in records}
    assert {one["x-kvxfer-account"] for one in headers} == {"1"}
    if api is ApiKind.COMPLETIONS:
        assert {len(one["body"]["prompt"]) for one in sent} == {40}
    [imported] = read_results(tmp_path / "results")
    assert len(imported.records) == len(records)


@pytest.mark.parametrize("mode", list(DispatchMode))
def test_the_turns_of_a_session(mode: DispatchMode, engine: Engine, tmp_path: pathlib.Path) -> None:
    planned, result, records = through_aiperf(engine, tmp_path, requests=12, turns=3, think_s=0.05, session_mode=mode)
    assert result.ended == "complete"
    ends: dict[int | None, float] = {}
    for request, record in zip(planned.requests, records, strict=True):
        assert record.is_good, record
        assert (record.session, record.turn) == (request.session, request.turn)
        if mode is DispatchMode.THINK and request.turn:
            assert record.due_s == pytest.approx(ends[request.session] + 0.05)
        else:
            assert record.due_s == request.due_s
        ends[request.session] = record.end_s or 0.0


def test_a_request_that_fails_is_a_record_with_an_error(engine: Engine, tmp_path: pathlib.Path) -> None:
    engine.fault("status", status=503, skip=3, count=1)
    _, result, records = through_aiperf(engine, tmp_path, requests=10)
    assert result.ended == "complete"
    assert [(record.status, bool(record.error)) for record in records if not record.is_good] == [(503, True)]


def test_stopped_in_the_middle_it_keeps_what_ran(engine: Engine, tmp_path: pathlib.Path) -> None:
    options = WorkloadOptions(rate=5, requests=400, prompt_tokens=20, output_tokens=2)
    planned = workload_from(options)
    target = TargetOptions(url=engine.url, model="mock")
    stop, records = threading.Event(), []

    def look(progress: DriveProgress) -> None:
        if progress.ended >= 5:
            stop.set()

    result = drive_aiperf(
        planned,
        body_maker(target, options, planned, "mock").body,
        target,
        DriveOptions(aiperf=str(AIPERF)),
        run="here",
        on_record=records.append,
        on_progress=look,
        stop=stop,
        directory=tmp_path,
    )
    assert result.ended == "interrupted"
    assert len(records) == 400
    ran = [record for record in records if record.is_good]
    assert 5 <= len(ran) < 200
    assert {record.error for record in records if not record.is_good} == {NOT_SENT}
