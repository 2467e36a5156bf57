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
SETTLED = 13
"""Stretches after which five of one kind were compared with their neighbours, the first of all not counted."""
TURN = 17
"""Stretches from one that is tried to the next, once enough were compared."""
PAUSE_NS = 10**9


class Sender:
    """One connection's calls, each right after the other."""

    def __init__(self) -> None:
        self.reads = native.CacheReads()
        self.now_ns = 0

    def spend(self, took_ns: float, nbytes: int) -> None:
        self.reads.spent(self.now_ns, round(took_ns), nbytes)
        self.now_ns += round(took_ns)

    def pause(self) -> None:
        """And a first call, that the socket took nothing of."""
        self.now_ns += PAUSE_NS
        self.spend(1, 0)

    def stretches(self, count: int, read_ns: float, plain_ns: float) -> list[bool]:
        """The kind of each of ``count`` stretches, which take so long a byte."""
        kinds = []
        for _ in range(count):
            kinds.append(self.reads.is_on)
            for _ in range(STRETCH // CALL):
                assert self.reads.is_on is kinds[-1], "in the middle of a stretch"
                self.spend(CALL * (read_ns if self.reads.is_on else plain_ns), CALL)
        return kinds


@pytest.mark.parametrize("is_quicker", [True, False])
def test_the_quicker_kind_goes_on_and_the_other_is_tried(is_quicker: bool) -> None:
    costs = (0.2, 0.25) if is_quicker else (0.25, 0.2)
    sender = Sender()
    assert sender.stretches(7, *costs) == [False, *[False, True] * 3], (
        "each beside the other, until three were compared"
    )
    sender.stretches(2 * SETTLED, *costs)
    kinds = sender.stretches(100 * TURN, *costs)
    assert sum(kind is not is_quicker for kind in kinds) == 100


def test_what_is_as_quick_as_plain_is_not_read() -> None:
    sender = Sender()
    sender.stretches(SETTLED, 0.2, 0.2)
    assert sum(sender.stretches(10 * TURN, 0.2, 0.2)) == 10


def test_what_changes_is_noticed() -> None:
    sender = Sender()
    assert sum(sender.stretches(100, 0.2, 0.25)) > 80
    sender.stretches(4 * TURN, 0.3, 0.25)
    assert sum(sender.stretches(10 * TURN, 0.3, 0.25)) == 10
    sender.stretches(5 * TURN, 0.1, 0.25)
    assert sum(sender.stretches(10 * TURN, 0.1, 0.25)) == 10 * (TURN - 1)


@pytest.mark.parametrize(("read_ns", "plain_ns"), [(0.2, 0.25), (0.25, 0.2)])
def test_a_machine_that_changes_its_speed_misleads_nobody(read_ns: float, plain_ns: float) -> None:
    """Half as fast for a while and then again as fast, as one that others use too: more than the kinds differ by."""
    random = np.random.default_rng(5)
    sender, speed, right, count = Sender(), 1.0, 0, 4000
    for _ in range(count):
        if random.random() < 1 / 50:
            speed = random.choice([0.5, 1, 2, 4])
        noise = random.normal(1, 0.1)
        right += sender.stretches(1, read_ns * speed * noise, plain_ns * speed * noise)[0] is (read_ns < plain_ns)
    assert right > count * 0.85  # one of 17 is always the other


@pytest.mark.parametrize("place", ["before", "tried", "after"])
def test_who_was_not_run_for_a_while_is_not_that_slow(place: str) -> None:
    sender = Sender()
    sender.stretches(SETTLED + TURN, 0.2, 0.5)
    while sender.reads.is_on:
        sender.stretches(1, 0.2, 0.5)
    sender.stretches({"before": TURN - 1, "tried": 0, "after": 1}[place], 0.2, 0.5)
    assert sender.reads.is_on is (place != "tried")
    sender.spend(10**9, STRETCH)
    sender.stretches(TURN, 0.2, 0.5)
    assert sum(sender.stretches(TURN, 0.2, 0.5)) == TURN - 1


def test_who_has_just_woken_up_is_compared_with_nobody() -> None:
    """Whoever sends little at a time begins slowly each time; the kinds are equal."""
    sender, kinds = Sender(), []
    for _ in range(100):
        sender.pause()
        kinds += sender.stretches(1, 0.9, 0.9) + sender.stretches(3, 0.2, 0.2)
    assert 5 <= sum(kinds) <= 5 + len(kinds) // TURN
    sender, kinds = Sender(), []
    for _ in range(100):
        sender.pause()
        kinds += sender.stretches(2, 0.1, 0.2)
    assert sum(kinds) == 0, "two neighbours are no comparison, and never on two sides of a pause"


def test_calls_that_the_socket_took_nothing_of_count_for_the_next() -> None:
    sender = Sender()
    for _ in range(SETTLED):  # to read is quick, but for what was in vain
        if sender.reads.is_on:
            sender.spend(STRETCH * 0.3, 0)
        sender.spend(STRETCH * (0.1 if sender.reads.is_on else 0.3), STRETCH)
    assert not sender.reads.is_on


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
