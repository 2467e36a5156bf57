"""Blocks are read into the cache before the kernel copies them where that is quicker: the calls themselves show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvxfer._native import _core as native

NewId = Callable[[], bytes]
CALL = 256 << 10
STRETCH = 2 << 20
SETTLED = 8
"""Stretches after which both kinds are known."""


def stretches(reads: native.CacheReads, count: int, read_ns: float, plain_ns: float) -> list[bool]:
    """The kind of each of ``count`` stretches, which take so long a byte."""
    kinds = []
    for _ in range(count):
        kinds.append(reads.is_on)
        for _ in range(STRETCH // CALL):
            assert reads.is_on is kinds[-1], "in the middle of a stretch"
            reads.spent(round(CALL * (read_ns if reads.is_on else plain_ns)), CALL)
    return kinds


@pytest.mark.parametrize("is_quicker", [True, False])
def test_the_quicker_kind_goes_on_and_the_other_is_tried(is_quicker: bool) -> None:
    reads = native.CacheReads()
    first = stretches(reads, SETTLED, *((0.2, 0.25) if is_quicker else (0.25, 0.2)))
    assert first[:4] == [False, True, False, True]
    kinds = stretches(reads, 1700, *((0.2, 0.25) if is_quicker else (0.25, 0.2)))
    assert sum(kind is not is_quicker for kind in kinds) == 100


def test_what_changes_is_noticed() -> None:
    reads = native.CacheReads()
    stretches(reads, 100, 0.2, 0.25)
    assert not all(stretches(reads, 200, 0.3, 0.25)[100:])
    assert sum(stretches(reads, 170, 0.3, 0.25)) == 10
    assert sum(stretches(reads, 340, 0.1, 0.25)[170:]) == 160


def test_who_was_not_run_for_a_while_is_not_that_slow() -> None:
    reads = native.CacheReads()
    stretches(reads, SETTLED, 0.2, 0.5)
    assert reads.is_on
    reads.spent(10**9, STRETCH)
    assert reads.is_on


def test_calls_that_the_socket_took_nothing_of_count_for_the_next() -> None:
    reads = native.CacheReads()
    for _ in range(4):  # each kind twice; to read is quick, but for what was in vain
        if reads.is_on:
            reads.spent(round(STRETCH * 0.3), 0)
        reads.spent(round(STRETCH * (0.1 if reads.is_on else 0.3)), STRETCH)
    assert not reads.is_on


def test_both_kinds_bring_the_bytes(nodes: Any, new_id: NewId) -> None:
    blocks, nbytes = 1024, 65536
    p, d = nodes.pair(block_bytes=nbytes, blocks=blocks)
    for _ in range(2):
        transfer = new_id()
        d.fill(0)
        p.grant(transfer, range(blocks))
        d.pull(transfer, p, range(blocks), lanes=[native.Lane.STREAM])
        assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
        assert d.memory.tobytes() == p.memory.tobytes()
