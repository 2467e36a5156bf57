"""When a process that is not ready yet is given up: by what it does, not by how long it takes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from kvxfer.cli import progress
from kvxfer.cli.progress import LONGEST, StartProgress, session_processor_s, wait_while_it_gets_on


def test_one_that_writes_is_waited_for() -> None:
    starts = StartProgress(60.0, 0.0)
    assert [starts.see(second, 0.0, float(second)) for second in range(1, 500)] == [None] * 499


def test_one_that_gets_a_little_of_a_busy_machine_is_waited_for() -> None:
    starts = StartProgress(60.0, 0.0)
    assert [starts.see(0, second / 30, float(second)) for second in range(1, 500)] == [None] * 499


def test_one_that_only_wakes_up_now_and_then_is_given_up() -> None:
    starts = StartProgress(60.0, 0.0)
    assert starts.see(7, 3.0, 1.0) is None
    said = [starts.see(7, 3.0 + second / 1000, float(second)) for second in range(2, 62)]
    assert said == [None] * 59 + ["it did nothing for 60 s"]


def test_one_that_is_busy_and_never_ready_is_given_up() -> None:
    starts = StartProgress(60.0, 0.0)
    said = [starts.see(second, float(second), float(second)) for second in range(1, LONGEST * 60 + 1)]
    assert said == [None] * (LONGEST * 60 - 1) + ["it was busy for 600 s"]


def test_processor_time_that_a_child_took_with_it_is_no_standstill() -> None:
    """A process that ends unwaited for takes its time out of the sum."""
    starts = StartProgress(10.0, 0.0)
    assert starts.see(0, 9.0, 1.0) is None
    assert starts.see(0, 4.0, 5.0) is None
    assert starts.see(0, 9.5, 10.9) is None
    assert starts.see(0, 9.5, 21.0) == "it did nothing for 10 s"


def test_processor_time_is_that_of_the_whole_session() -> None:
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'for _ in range(10**7): pass']); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, start_new_session=True) as process:
        while session_processor_s(process.pid) < 0.1:
            assert process.poll() is None
            os.sched_yield()
        process.communicate(b"\n")
    assert session_processor_s(process.pid) == 0.0


async def test_wait_returns_the_result_or_names_why_it_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "session_processor_s", lambda session: 0.0)
    ready = asyncio.get_running_loop().create_future()
    ready.set_result("ready")
    assert await wait_while_it_gets_on(ready, session=1, written_bytes=lambda: 0, timeout_s=0.05) == "ready"
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError, match=r"^it did nothing for 0\.05 s$"):
        await wait_while_it_gets_on(never, session=1, written_bytes=lambda: 0, timeout_s=0.05)
    assert never.cancelled()
