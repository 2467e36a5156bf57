"""Blocks are read into the cache before the kernel copies them where that is quicker: the calls themselves show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native

NewId = Callable[[], bytes]
CALL = 256 << 10
STRETCH = 2 << 20
SETTLED = 11
"""Stretches after which five of one kind were compared with their neighbours."""
TURN = 17
"""Stretches from one that is tried to the next, once enough were compared."""


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
    costs = (0.2, 0.25) if is_quicker else (0.25, 0.2)
    reads = native.CacheReads()
    assert stretches(reads, 6, *costs) == [False, True] * 3, "each beside the other, until three were compared"
    stretches(reads, 2 * SETTLED, *costs)
    kinds = stretches(reads, 100 * TURN, *costs)
    assert sum(kind is not is_quicker for kind in kinds) == 100


def test_what_is_as_quick_as_plain_is_not_read() -> None:
    reads = native.CacheReads()
    stretches(reads, SETTLED, 0.2, 0.2)
    assert sum(stretches(reads, 10 * TURN, 0.2, 0.2)) == 10


def test_what_changes_is_noticed() -> None:
    reads = native.CacheReads()
    assert sum(stretches(reads, 100, 0.2, 0.25)) > 80
    stretches(reads, 4 * TURN, 0.3, 0.25)
    assert sum(stretches(reads, 10 * TURN, 0.3, 0.25)) == 10
    stretches(reads, 5 * TURN, 0.1, 0.25)
    assert sum(stretches(reads, 10 * TURN, 0.1, 0.25)) == 9 * TURN + 7


@pytest.mark.parametrize(("read_ns", "plain_ns"), [(0.2, 0.25), (0.25, 0.2)])
def test_a_machine_that_changes_its_speed_misleads_nobody(read_ns: float, plain_ns: float) -> None:
    """Half as fast for a while and then again as fast, as one that others use too: more than the kinds differ by."""
    random = np.random.default_rng(5)
    reads, speed, right, count = native.CacheReads(), 1.0, 0, 4000
    for _ in range(count):
        if random.random() < 1 / 50:
            speed = random.choice([0.5, 1, 2, 4])
        noise = random.normal(1, 0.1)
        right += stretches(reads, 1, read_ns * speed * noise, plain_ns * speed * noise)[0] is (read_ns < plain_ns)
    assert right > count * 0.85  # one of 17 is always the other


def test_who_was_not_run_for_a_while_is_not_that_slow() -> None:
    reads = native.CacheReads()
    stretches(reads, SETTLED, 0.2, 0.5)
    assert reads.is_on
    for _ in range(2):
        reads.spent(10**9, STRETCH)
        assert reads.is_on
        stretches(reads, 3 * TURN, 0.2, 0.5)


def test_calls_that_the_socket_took_nothing_of_count_for_the_next() -> None:
    reads = native.CacheReads()
    for _ in range(SETTLED):  # to read is quick, but for what was in vain
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
