"""The aiperf driver around aiperf: its command, its files, its end. aiperf itself is in ``test_aiperf.py``."""

from __future__ import annotations

import json
import pathlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.errors import ConfigError, InvalidArgumentError, PeerGoneError
from kvxfer.load import aiperf_files, drive_aiperf
from kvxfer.load.drive.start import DriveProgress, DriveResult
from kvxfer.load.options import ApiKind, DriveOptions, TargetOptions
from kvxfer.load.record import NOT_SENT, MeasuredRequest
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.sessions import with_mode
from tests.support.child import ROOT


def asked(number: int, due_s: float | None = None, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(number, 5, 3, number * 0.5 if due_s is None and not more.get("turn") else due_s, **more)


PLAIN = Workload("plain", [asked(number) for number in range(6)])
SESSIONS = [asked(0, session=4), asked(1, session=9), asked(2, session=4, turn=1, think_s=0.25)]


def body(request: WorkloadRequest) -> bytes:
    return json.dumps({"prompt": [request.number], "stream": True}).encode()


@pytest.fixture
def command(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "aiperf"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={str(ROOT)!r} exec {sys.executable!r} -m tests.support.load_fake_aiperf "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def drive(command: str, url: str, workload: Workload = PLAIN, **more: Any) -> tuple[DriveResult, list[MeasuredRequest]]:
    records: list[MeasuredRequest] = []
    options = DriveOptions(aiperf=command, drain_s=more.pop("drain_s", 120.0))
    target = TargetOptions(url=url, model="mock")
    result = drive_aiperf.drive_aiperf(workload, body, target, options, run="here", on_record=records.append, **more)
    assert [record.number for record in records] == [request.number for request in workload.requests]
    return result, records


def test_each_planned_request_has_the_record_of_aiperf_s(command: str, url: str) -> None:
    result, records = drive(command, url, warmup=2)
    assert (result.ended, result.message) == ("complete", "")
    for request, record in zip(PLAIN.requests, records, strict=True):
        assert record.is_good
        assert (record.run, record.due_s, record.request_id) == ("here", request.due_s, f"id-{request.number}")
        assert record.ttft_since_sent_s == pytest.approx(0.2)
        assert record.tpot_s == pytest.approx(0.02)
        assert record.lateness_s == pytest.approx(0.001), "the least late one was issued in time, as far as it is known"
        assert (record.prompt_tokens, record.output_tokens, record.output_tokens_asked) == (7, 3, 3)
    assert [record.is_warmup for record in records] == [True, True, False, False, False, False]
    assert result.began_unix_s == pytest.approx(1_790_000_000.001)


def test_turns_are_due_after_the_end_of_the_turn_before(command: str, url: str) -> None:
    _, records = drive(command, url, Workload("turns", SESSIONS, mode=DispatchMode.THINK))
    assert records[2].due_s == pytest.approx((records[0].end_s or 0.0) + 0.25)
    assert (records[2].session, records[2].turn) == (4, 1)


def test_what_aiperf_was_given_is_kept(command: str, url: str, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "kept"
    drive(command, url, directory=directory)
    rows = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 500, 1000, 1500, 2000, 2500]
    assert [row["payload"] for row in rows] == [json.loads(body(request)) for request in PLAIN.requests]
    assert len({row["session_id"] for row in rows}) == len(rows), "no request waits for another"
    with pytest.raises(ConfigError, match="is there already"):
        drive(command, url, directory=directory)


def test_rows_of_sessions_wait_only_in_mode_think() -> None:
    def rows(mode: DispatchMode) -> list[dict[str, Any]]:
        workload = with_mode(Workload("turns", SESSIONS, mode=DispatchMode.THINK), mode)
        return [json.loads(line) for line in aiperf_files.rows(workload, lambda request: b"{}")]

    think = rows(DispatchMode.THINK)
    assert [row["session_id"] for row in think] == ["4", "9", "4"]
    assert think[2]["delay"] == 250
    assert "timestamp" not in think[2]
    assert len({row["session_id"] for row in rows(DispatchMode.TIMESTAMP)}) == 3


def test_it_is_asked_to_stop_and_keeps_what_ran(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "half")
    stop = threading.Event()

    def look(progress: DriveProgress) -> None:
        assert progress.planned == 6
        if progress.ended == 3:
            stop.set()

    result, records = drive(command, url, on_progress=look, stop=stop)
    assert result.ended == "interrupted"
    assert [record.error for record in records] == [""] * 3 + [NOT_SENT] * 3


def test_answers_are_waited_for_no_longer_than_drain_s(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "half")
    result, records = drive(command, url, Workload("short", [asked(0), asked(1, 0.01)]), drain_s=0.1)
    assert result.ended == "complete"
    assert [record.error for record in records] == ["", NOT_SENT]


def test_an_aiperf_that_does_not_stop_is_ended(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "hang")
    monkeypatch.setattr(drive_aiperf, "EARLY_STOP_S", 0.2)
    stop = threading.Event()
    stop.set()
    result, records = drive(command, url, stop=stop)
    assert result.ended == "interrupted"
    assert {record.error for record in records} == {NOT_SENT}


def test_an_aiperf_that_fails_is_quoted(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "crash")
    result, records = drive(command, url)
    assert (result.ended, result.message) == ("driver_lost", "aiperf ended with code 3: Error: the dataset is no good")
    assert {record.error for record in records} == {"driver_lost"}


def test_records_that_are_none_are_told(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_AIPERF", "garbage")
    result, _ = drive(command, url)
    assert result.ended == "driver_lost"
    assert "line 7: metadata is missing" in result.message


def test_a_missing_or_another_aiperf_is_a_sentence(
    command: str, url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"there is no aiperf at .*pip install aiperf==0\.13\.0"):
        drive(str(tmp_path / "none"), url)
    monkeypatch.setenv("FAKE_AIPERF_VERSION", "0.14.1")
    with pytest.raises(ConfigError, match=r"must be aiperf 0\.13, but says '0\.14\.1'"):
        drive(command, url)
    monkeypatch.setenv("FAKE_AIPERF_VERSION", "0.13")
    assert drive_aiperf.find_aiperf(command)


def test_what_is_wrong_before_anything_starts(command: str, url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        drive(command, url, Workload("empty", []))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerGoneError):
        drive(command, f"http://127.0.0.1:{port}")


def test_the_settings_hold_no_secret(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("very-secret\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = TargetOptions(url="http://127.0.0.1:1/some/v1/", api_key_file=str(key), api=ApiKind.CHAT)
    told = aiperf_files.settings(tmp_path, target, DriveOptions(), wants_raw=True)
    assert "very-secret" not in json.dumps(told)
    assert told["benchmark"]["endpoint"]["url"] == "http://127.0.0.1:1/some/v1/chat/completions"
    environment = aiperf_files.environment(tmp_path, target, DriveOptions())
    assert "very-secret" in environment.values()
    assert "HF_HUB_OFFLINE" not in environment
    assert "PYTHONPATH" not in environment
