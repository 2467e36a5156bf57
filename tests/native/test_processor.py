"""The thread that receives does not stay on the processor of who sends to it, and no thread's affinity is changed."""

from __future__ import annotations

import os
import pathlib
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
    tasks = pathlib.Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() == "kvxfer-io"}


def pair_and_threads(nodes: Any) -> tuple[Any, Any, int, int]:
    """Source and reader, and the thread of each."""
    others = io_threads()
    p = nodes("source", block_bytes=BLOCK_BYTES, blocks=BLOCKS)
    (source_thread,) = io_threads() - others
    d = nodes("reader", block_bytes=BLOCK_BYTES, blocks=BLOCKS)
    (reader_thread,) = io_threads() - others - {source_thread}
    nodes.join(p, d)
    p.fill_random()
    return p, d, source_thread, reader_thread


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
    for _ in range(50):
        os.sched_setaffinity(reader_thread, {ONE})
        os.sched_setaffinity(reader_thread, ALLOWED)
        pull(p, d, new_id())
        if d.core.statistics().moves_over:
            break
    assert d.core.statistics().moves_over
    assert not p.core.statistics().moves_over
    assert os.sched_getaffinity(reader_thread) == ALLOWED


def test_who_may_run_on_one_processor_stays_there(nodes: Any, new_id: NewId) -> None:
    p, d, *threads = pair_and_threads(nodes)
    for thread in threads:
        os.sched_setaffinity(thread, {ONE})
    for _ in range(5):
        pull(p, d, new_id())
    assert not d.core.statistics().moves_over
    assert os.sched_getaffinity(threads[1]) == {ONE}
