"""The thread that receives does not stay on the processor of who sends to it, and no thread's affinity is changed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer._native import _core as native

COMMITTED = native.TransferState.COMMITTED
NewId = Callable[[], bytes]
BLOCKS, BLOCK_BYTES = 256, 65536
ALLOWED = os.sched_getaffinity(0)
ONE = min(ALLOWED)


def io_threads() -> set[int]:
    return {int(task.name) for task in pathlib.Path("/proc/self/task").iterdir() if name_of(task) == "kvxfer-io"}


def name_of(task: pathlib.Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it ended since the directory was read: any thread of this process may
        return ""


def wait_io_thread(others: set[int]) -> int:
    """The one that was started last: it names itself, once it runs."""
    until = time.monotonic() + 10.0
    while not (new := io_threads() - others):
        assert time.monotonic() < until
        time.sleep(0.001)
    (thread,) = new
    return thread


def pair_and_threads(nodes: Any) -> tuple[Any, Any, int, int]:
    """Source and reader, and the thread of each."""
    others = io_threads()
    p = nodes("source", block_bytes=BLOCK_BYTES, blocks=BLOCKS)
    source_thread = wait_io_thread(others)
    d = nodes("reader", block_bytes=BLOCK_BYTES, blocks=BLOCKS)
    reader_thread = wait_io_thread(others | {source_thread})
    nodes.join(p, d)
    p.fill_random()
    return p, d, source_thread, reader_thread


def running_threads() -> int:
    """Of the whole machine."""
    return int(pathlib.Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def pull(p: Any, d: Any, transfer: bytes) -> None:
    d.fill(0)
    p.grant(transfer, range(BLOCKS))
    d.pull(transfer, p, range(BLOCKS), lanes=[native.Lane.STREAM])
    assert d.wait_drained(transfer).state == COMMITTED
    assert d.memory.tobytes() == p.memory.tobytes()


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is no other processor")
def test_who_receives_leaves_the_senders_processor(nodes: Any, new_id: NewId) -> None:
    p, d, source_thread, reader_thread = pair_and_threads(nodes)
    os.sched_setaffinity(source_thread, {ONE})
    was_free = 0
    for _ in range(200):
        os.sched_setaffinity(reader_thread, {ONE})
        os.sched_setaffinity(reader_thread, ALLOWED)
        pull(p, d, new_id())
        if d.core.statistics().moves_over:
            break
        was_free += running_threads() < len(ALLOWED)  # this thread is one, and the two of the transfer are done
    if not d.core.statistics().moves_over and was_free < 190:
        pytest.skip("other programs keep the processors")
    assert d.core.statistics().moves_over
    assert not p.core.statistics().moves_over
    assert os.sched_getaffinity(reader_thread) == ALLOWED


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is no other processor")
def test_it_does_not_move_where_others_keep_the_processors(nodes: Any, new_id: NewId) -> None:
    p, d, source_thread, reader_thread = pair_and_threads(nodes)
    os.sched_setaffinity(source_thread, {ONE})
    two = set(sorted(ALLOWED)[:2])
    burn = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    busy = [subprocess.Popen(burn, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for process in busy:
            assert process.stdout is not None
            assert process.stdout.readline()
        for _ in range(3):  # the busy ones may not be running for a moment, where a quota holds them too
            before = d.core.statistics().moves_over
            for _ in range(20):
                os.sched_setaffinity(reader_thread, {ONE})
                os.sched_setaffinity(reader_thread, two)
                pull(p, d, new_id())
            if d.core.statistics().moves_over == before:
                break
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    assert d.core.statistics().moves_over == before


def test_who_may_run_on_one_processor_stays_there(nodes: Any, new_id: NewId) -> None:
    p, d, *threads = pair_and_threads(nodes)
    for thread in threads:
        os.sched_setaffinity(thread, {ONE})
    for _ in range(5):
        pull(p, d, new_id())
    assert not d.core.statistics().moves_over
    assert os.sched_getaffinity(threads[1]) == {ONE}
