"""The copies of `mapped` and `cma`: runs of any length and alignment, past the cache or into it, by several threads."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import NewId, needs_cma

MAPPED, CMA = native.Lane.MAPPED, native.Lane.CMA
MIB = 1 << 20
POISON = 0xEE
each_lane = pytest.mark.parametrize(
    "lane", [pytest.param(MAPPED, id="mapped"), pytest.param(CMA, id="cma", marks=needs_cma)]
)


@each_lane
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", [1, 7, 63, 257, 4095, 4097, 12_289, 300_001])
def test_elements_of_any_length_and_alignment(
    nodes: Any, new_id: NewId, threads: int, length: int, lane: native.Lane
) -> None:
    """Elements far apart and elements that touch, in any order; no byte beside them changes."""
    p, d = nodes("source"), nodes("reader", core={"copy_threads": threads})
    nodes.join(p, d)
    count = min(3000, 6 * MIB // length)
    size = count * (length + 100) + 4096
    theirs, ours = p.register(size), d.register(size)
    random = np.random.default_rng(length)
    theirs.memory[:] = random.integers(0, 256, size, dtype=np.uint8)
    ours.memory[:] = POISON
    there = 13 + random.permutation(count) * (length + 100)
    gaps = random.integers(0, 2, count) * random.integers(0, 100, count)
    here = 5 + np.cumsum(length + gaps) - length
    transfer = new_id()
    rows = [
        [(region.id, int(at), length, length, 1) for at in starts] for region, starts in ((ours, here), (theirs, there))
    ]
    d.fetch(transfer, p, *rows, lanes=[lane])
    final = d.wait_drained(transfer)
    assert (final.state, final.lane) == (native.TransferState.COMMITTED, lane), final.text
    expected = np.full(size, POISON, np.uint8)
    for begin, origin in zip(here, there, strict=True):
        expected[begin : begin + length] = theirs.memory[origin : origin + length]
    assert np.array_equal(ours.memory, expected)


@each_lane
def test_many_large_copies_by_several_threads(nodes: Any, lane: native.Lane) -> None:
    p, d = nodes.pair(blocks=4096, block_bytes=4096, is_exposed=True, reader={"core": {"copy_threads": 4}})
    for seed in range(20):
        random = np.random.default_rng(seed)
        granted, filled = random.permutation(4096)[:2048], random.permutation(4096)[:2048]
        d.fill(POISON)
        transfer = d.pull_granted(p, granted, filled, lanes=[lane])
        assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
        theirs, ours = (node.memory.reshape(4096, 4096) for node in (p, d))
        assert np.array_equal(ours[filled], theirs[granted])
        rest = np.setdiff1d(np.arange(4096), filled)
        assert np.all(ours[rest] == POISON)


def helpers() -> set[str]:
    """Threads of this process that help copying."""
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text() == "kvxfer-copy\n":
                found.add(task.name)
    return found


def pull_all(p: Any, d: Any, lane: native.Lane) -> None:
    d.fill(POISON)
    transfer = d.pull_granted(p, list(range(4096)), list(range(4096)), lanes=[lane])
    assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
    assert np.array_equal(d.memory, p.memory)


def pair_of(nodes: Any, threads: int) -> Any:
    return nodes.pair(blocks=4096, block_bytes=4096, is_exposed=True, reader={"core": {"copy_threads": threads}})


@each_lane
def test_one_thread_is_one(nodes: Any, lane: native.Lane) -> None:
    p, d = pair_of(nodes, 1)
    before = helpers()
    for _ in range(5):
        pull_all(p, d, lane)
    assert helpers() <= before
