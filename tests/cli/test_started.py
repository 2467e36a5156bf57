"""What is said of a process that does not become ready, and that nothing of it is left. Without vLLM."""

from __future__ import annotations

import asyncio
import pathlib
import sys
import time
from typing import Any

import pytest

from kvxfer.errors import DeadlineExceededError, KvxferError
from tests.support import started
from tests.support.cli.processes import is_running


async def never() -> None:
    return None


def start(directory: pathlib.Path, code: str) -> Any:
    return started.Started("p", [sys.executable, "-c", code], directory, {})


async def test_one_that_hangs_is_named_with_its_last_lines_and_its_log(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "SILENT_S", 0.5)
    process = start(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(DeadlineExceededError) as caught:
        await process.wait(never)
    said = f"p did not become ready: it did nothing for 0.5 s; its log is {tmp_path}/p.log"
    assert str(caught.value) in (said, f"{said}\n  loading")  # not where it was not begun yet
    process.end()
    assert process.process.returncode is not None


async def test_one_that_ends_is_named_with_its_last_lines_and_its_log(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(KvxferError) as caught:
        await process.wait(never)
    said = f"p ended with code 1 before it was ready; its log is {tmp_path}/p.log\n  no such model"
    assert str(caught.value) == said
    process.end()


async def test_children_of_a_started_process_end_with_it(tmp_path: pathlib.Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start(tmp_path, code)

    async def said() -> str | None:
        return process.log.read_text().strip() or None

    pid = int(await process.wait(said))
    await asyncio.to_thread(process.end)
    deadline_s = time.monotonic() + 20.0
    while is_running(pid):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def test_one_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KvxferError, match=r"^p could not be started: .*'/nowhere/vllm'$"):
        started.Started("p", ["/nowhere/vllm"], tmp_path, {})
