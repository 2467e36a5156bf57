"""Runs that do not end by themselves: Ctrl-C, a stop, a killed process of either kind, a caller that fails."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.load.drive.control import RECORD, ControlLine
from kvxfer.load.drive.start import DriveProgress
from kvxfer.load.record import MeasuredRequest
from kvxfer.workload.request import DispatchMode, Workload
from tests.support.child import command, environment
from tests.support.load_server import (
    AskedOf,
    NumberBody,
    ScriptedServer,
    Step,
    driven,
    scripted,
    sessions_of,
    stream,
    token,
    workload_of,
)


def hanging(after: int, never: threading.Event) -> Any:
    """Answers the first requests, and never the others."""

    def script(asked: AskedOf) -> Iterator[Step]:
        if asked.number >= after:
            yield never
        yield stream(token())

    return script


class DriverProcess:
    """tests.support.load_child, up to its first line."""

    def __init__(self, server: ScriptedServer, *words: str) -> None:
        self.process = subprocess.Popen(
            command("load_child", server.url, *words),
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.senders: list[int] = json.loads(self.process.stdout.readline())["began"]

    def end(self) -> tuple[dict[str, Any], list[MeasuredRequest]]:
        """Its result and its records; it must have said nothing else."""
        out, said = self.process.communicate(timeout=60)
        assert not said, said.decode()
        *records, result = out.decode().splitlines()
        return json.loads(result), [MeasuredRequest.from_json(line) for line in records]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c(processes: str) -> None:
    """The terminal sends it to all processes of the command, as other programs send SIGTERM."""
    never = threading.Event()
    with scripted(hanging(2, never)) as server:
        child = DriverProcess(server, "40", "0.1", processes)
        server.wait(4)
        for sender in child.senders:
            os.kill(sender, signal.SIGTERM)
        os.killpg(child.process.pid, signal.SIGINT)
        result, records = child.end()
        never.set()
    assert (result["ended"], child.process.returncode) == ("interrupted", 0)
    assert sorted(record.number for record in records) == list(range(40))
    errors = {record.number: record.error for record in records}
    assert [errors[number] for number in range(4)] == ["", "", "not_finished", "not_finished"]
    assert errors[39] == "not_sent"
    assert all((record.sent_s is None) == (record.error == "not_sent") for record in records)


def test_a_stop_before_the_beginning() -> None:
    stop = threading.Event()
    stop.set()
    with scripted() as server:
        result, records = driven(server.url, workload_of([0.0, 0.1, 5.0]), stop=stop, processes=2)
    assert [record.error for record in records] == ["not_sent"] * 3
    assert result.ended == "interrupted"


def test_what_was_never_sent_is_told_by_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million records through the socket would take longer than a stop may."""
    kinds: list[bytes] = []

    def heard(line: ControlLine) -> Iterator[tuple[bytes, bytes]]:
        for kind, text in own(line):
            kinds.append(kind)
            yield kind, text

    own = ControlLine.heard
    monkeypatch.setattr(ControlLine, "heard", heard)
    workload = workload_of([0.0, 0.01, 0.02, *(1000.0 + number / 100 for number in range(20_000))])
    with scripted() as server:
        ended, records = stop_at_third(workload, server)
    assert ended == "interrupted"
    assert [record.number for record in records] == list(range(20_003))
    assert {record.error for record in records[3:]} == {"not_sent"}
    assert {record.message for record in records[3:]} == {"the run was stopped"}
    assert [record.due_s for record in records[3:5]] == [1000.0, 1000.01]
    assert kinds.count(RECORD) == 3


def stop_at_third(workload: Workload, server: ScriptedServer) -> tuple[str, list[MeasuredRequest]]:
    stop = threading.Event()

    def heard(_progress: DriveProgress) -> None:
        if len(server.asked) >= 3:
            stop.set()

    result, records = driven(server.url, workload, stop=stop, on_progress=heard)
    return result.ended, records


def test_a_stop_within_sessions() -> None:
    never = threading.Event()
    with scripted(hanging(2, never)) as server:
        ended, records = stop_at_third(sessions_of(2, 3, think_s=0.1, mode=DispatchMode.THINK), server)
        never.set()
    assert ended == "interrupted"
    assert {record.error for record in records if record.turn == 0} == {""}
    assert {record.error for record in records if record.turn == 2} == {"not_sent"}


def test_a_killed_sending_process() -> None:
    never = threading.Event()
    with scripted(hanging(2, never)) as server:
        child = DriverProcess(server, "40", "0.1", "2")
        server.wait(4)
        os.kill(child.senders[0], signal.SIGKILL)
        result, records = child.end()
        never.set()
    assert result["ended"] == "driver_lost"
    assert f"(pid {child.senders[0]})" in result["message"]
    assert sorted(record.number for record in records) == list(range(40))
    lost = {record.number % 2 for record in records if record.error == "driver_lost"}
    assert len(lost) == 1
    assert {record.error for record in records if record.number % 2 not in lost} == {"", "not_finished", "not_sent"}


def test_a_killed_command_leaves_no_process() -> None:
    with scripted() as server:
        child = DriverProcess(server, "1000", "0.05", "2")
        watched = [os.pidfd_open(pid) for pid in child.senders]
        child.process.kill()
        child.process.communicate(timeout=20)
        for one in watched:
            with open(one, "rb") as ended:
                assert select.select([ended], [], [], 20)[0]


def test_what_a_caller_raises_is_raised() -> None:
    def record(_record: MeasuredRequest) -> None:
        raise OSError("the disk is full")

    with scripted() as server, pytest.raises(OSError, match="the disk is full"):
        driven(server.url, workload_of([0.0, 0.1, 60.0]), NumberBody(), on_record=record)
