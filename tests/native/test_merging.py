"""How often the machine is asked: once for neighbours, however many blocks or elements they are, and for the rest as
many at once as a call takes, or as the bound lets be in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import POISON, UCX_LIBRARY, NewId, needs_cma, needs_ucx

BLOCK_BYTES, BLOCKS = 4096, 512
PART = 256
"""Blocks of a read: 1 MiB, which is less than any one call's or get's bound."""
RUNS_A_CALL, GETS_MAX = 1024, 512
"""Of process_vm_readv (its 1024 less one that proves the process), and in flight of one read by UCX."""
RUNS_A_SEND = 24
"""At least, of small blocks: half of the least that a call is to carry."""
MAPPED, CMA, UCX = native.Lane.MAPPED, native.Lane.CMA, native.Lane.UCX
ONE_SIDED = [
    pytest.param(MAPPED, "runs_mapped", id="mapped"),
    pytest.param(CMA, "runs_cma", id="cma", marks=needs_cma),
    pytest.param(UCX, "gets_ucx", id="ucx", marks=needs_ucx),
]
STREAMS = [native.Lane.STREAM, native.Lane.UNIX]
each_lane = pytest.mark.parametrize(("lane", "counter"), ONE_SIDED)

EVERY = list(range(PART))
APART = list(range(0, 2 * PART, 2))
CUTS = {
    "one": (EVERY, EVERY, 1),
    "one-elsewhere": (EVERY, [block + 100 for block in EVERY], 1),
    "apart": (APART, APART, PART),
    "apart-here": (EVERY, APART, PART),
    "apart-there": (APART, EVERY, PART),
    "backwards": (EVERY[::-1], EVERY[::-1], PART),
    "halves": ([*EVERY[PART // 2 :], *EVERY[: PART // 2]], EVERY, 2),
    "pairs": ([block + block // 2 for block in EVERY], EVERY, PART // 2),
}


def meet(nodes: Any, lane: Any, **options: Any) -> tuple[Any, Any]:
    """A source and a reader full of poison; one thread copies."""
    core: dict[str, Any] = {"copy_threads": 1}
    if lane == UCX:
        core["ucx_library"] = UCX_LIBRARY.path
    p, d = nodes.pair(**{"block_bytes": BLOCK_BYTES, "core": core, "is_exposed": True, **options})
    return p, d


def pull(p: Any, d: Any, transfer: bytes, blocks: tuple[list[int], list[int]], lane: Any) -> None:
    theirs, ours = blocks
    p.grant(transfer, theirs)
    d.pull(transfer, p, ours, lanes=[lane])
    final = d.wait_drained(transfer)
    assert final.state == native.TransferState.COMMITTED, final.text
    assert d.content(ours) == p.content(theirs)


def fetch(p: Any, d: Any, transfer: bytes, blocks: tuple[list[int], list[int]], lane: Any) -> None:
    """The same of elements of registered memory."""
    theirs, ours = (node.register(BLOCK_BYTES * BLOCKS) for node in (p, d))
    theirs.memory[:] = np.random.default_rng(5).integers(0, 256, theirs.memory.size, np.uint8)
    ours.memory[:] = POISON
    rows = [
        [(r.id, b * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 1) for b in ids]
        for r, ids in ((theirs, blocks[0]), (ours, blocks[1]))
    ]
    d.fetch(transfer, p, rows[1], rows[0], lanes=[lane])
    final = d.wait_drained(transfer)
    assert final.state == native.TransferState.COMMITTED, final.text
    there, here = (r.memory.reshape(BLOCKS, BLOCK_BYTES) for r in (theirs, ours))
    assert (here[blocks[1]] == there[blocks[0]]).all()
    rest = sorted(set(range(BLOCKS)) - set(blocks[1]))
    assert (here[rest] == POISON).all()


@pytest.mark.parametrize("move", [pull, fetch])
@pytest.mark.parametrize("cut", CUTS)
@each_lane
def test_neighbours_are_one(nodes: Any, new_id: NewId, lane: Any, counter: str, cut: str, move: Any) -> None:
    """Where they are neighbours on both sides."""
    *blocks, runs = CUTS[cut]
    p, d = meet(nodes, lane, blocks=BLOCKS)
    move(p, d, new_id(), blocks, lane)
    done = d.core.statistics()
    assert getattr(done, counter) == runs
    assert done.calls_cma == (lane == CMA)
    if lane == UCX:
        assert 1 <= done.gets_ucx_most <= runs


@needs_cma
def test_a_call_takes_as_many_runs_as_the_kernel_does(nodes: Any, new_id: NewId) -> None:
    count = 2 * RUNS_A_CALL - 2
    p, d = meet(nodes, CMA, block_bytes=1024, blocks=2 * count)
    apart = list(range(0, 2 * count, 2))
    pull(p, d, new_id(), (apart, apart), CMA)
    done = d.core.statistics()
    assert (done.runs_cma, done.calls_cma) == (count, 2)


@needs_ucx
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["", "tcp"])
def test_gets_in_flight_are_bounded(nodes: Any, new_id: NewId, tls: str) -> None:
    count = 4 * GETS_MAX
    p, d = nodes.pair(
        block_bytes=64, blocks=2 * count, is_exposed=True, core={"ucx_library": UCX_LIBRARY.path, "ucx_tls": tls}
    )
    apart = list(range(0, 2 * count, 2))
    pull(p, d, new_id(), (apart, apart), UCX)
    done = d.core.statistics()
    assert done.gets_ucx == count
    assert done.gets_ucx_most == GETS_MAX


@pytest.mark.parametrize("lane", STREAMS)
@pytest.mark.parametrize("is_zero_copy", [False, True], ids=["copied", "zero-copy"])
def test_a_call_sends_as_much_as_it_can(nodes: Any, new_id: NewId, lane: Any, is_zero_copy: bool) -> None:
    """Neighbours as one run, and what is apart in calls of many runs."""
    p, d = nodes.pair(block_bytes=BLOCK_BYTES, blocks=2 * BLOCKS, is_exposed=is_zero_copy)
    neighbours, apart = list(range(BLOCKS)), list(range(0, 2 * BLOCKS, 2))
    pull(p, d, new_id(), (neighbours, neighbours), lane)
    done = p.core.statistics()
    assert done.runs_streamed_out == done.calls_streamed_out >= 1
    pull(p, d, new_id(), (apart, neighbours), lane)
    more = p.core.statistics()
    runs, calls = more.runs_streamed_out - done.runs_streamed_out, more.calls_streamed_out - done.calls_streamed_out
    assert runs >= BLOCKS
    assert runs >= RUNS_A_SEND * calls
    assert more.bytes_streamed_out == 2 * BLOCKS * BLOCK_BYTES
