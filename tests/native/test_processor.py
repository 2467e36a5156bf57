"""A core's thread stays off its peer's processor while blocks flow, and is let back once they do not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


def wait_affinity(thread: int, processors: set[int]) -> None:
    until = time.monotonic() + 10.0
    while os.sched_getaffinity(thread) != processors:
        assert time.monotonic() < until
        time.sleep(0.001)


@contextlib.contextmanager
def on_processors(processors: set[int]) -> Iterator[None]:
    """Of the calling thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def running_threads() -> int:
    """Of the whole machine."""
    return int(pathlib.Path("/proc/loadavg").read_text().split()[3].split("/")[0])


def drive(d: Any, transfer: bytes) -> None:
    while not d.find(native.TransferDrained, id=transfer):
        d.core.wait(1_000_000_000)
        d.take()


def pull(p: Any, d: Any, transfer: bytes, wait: Callable[[Any, bytes], None] = lambda d, transfer: None) -> None:
    d.fill(0)
    p.grant(transfer, range(BLOCKS))
    d.pull(transfer, p, range(BLOCKS), lanes=[native.Lane.STREAM])
    wait(d, transfer)
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
    wait_affinity(reader_thread, ALLOWED)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is no other processor")
def test_who_sends_leaves_the_readers_processor(nodes: Any, new_id: NewId) -> None:
    p, d, source_thread, reader_thread = pair_and_threads(nodes)
    os.sched_setaffinity(reader_thread, {ONE})
    was_free = 0
    with on_processors({ONE}):  # who waits does the reader's work
        for _ in range(200):
            os.sched_setaffinity(source_thread, {ONE})
            time.sleep(0.01)  # what comes after a pause says where its sender is
            let_go = threading.Timer(0.001, os.sched_setaffinity, (source_thread, ALLOWED))
            let_go.start()
            pull(p, d, new_id(), wait=drive)
            let_go.join()
            if p.core.statistics().moves_over:
                break
            was_free += running_threads() < len(ALLOWED)
    if not p.core.statistics().moves_over and was_free < 190:
        pytest.skip("other programs keep the processors")
    assert p.core.statistics().moves_over
    assert not d.core.statistics().moves_over
    wait_affinity(source_thread, ALLOWED)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="there is no other processor")
def test_processors_that_somebody_else_chose_meanwhile_are_kept(nodes: Any, new_id: NewId) -> None:
    p, d, source_thread, reader_thread = pair_and_threads(nodes)
    os.sched_setaffinity(source_thread, {ONE})
    for _ in range(20):
        os.sched_setaffinity(reader_thread, {ONE})
        os.sched_setaffinity(reader_thread, ALLOWED)
        pull(p, d, new_id())
        os.sched_setaffinity(reader_thread, {ONE})
        time.sleep(0.01)
        assert os.sched_getaffinity(reader_thread) == {ONE}


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
