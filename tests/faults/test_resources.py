"""A hundred rounds, or a thousand, of everything that ends early: what a process holds then is what it held before."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import re
import secrets
import threading
import time
from typing import Any

import pytest
from lanes import LANES
from parties import Party, resources

from kvxfer.errors import InvalidArgument

pytestmark = pytest.mark.no_sanitizer

BLOCKS, BLOCK_BYTES = 16, 4096
SIZE = 64 << 10
COUNTED = ("descriptors", "sockets", "mappings", "threads")
MARGINS = {"mappings": 10}
MARGIN = 2
"""Of what comes and goes by itself (a timer of UCX, an allocator's arenas); one leaky fault of the eight leaves 12."""
QUIET_S = 0.6
"""More than a connection takes to be hung up on by both sides (0.5 s)."""
REMEMBERED = 128
"""States of transfers that are over: so few that they are no growth."""
RSS_MARGIN_KIB = 3 << 10
"""Of an allocator: a thousand rounds that leak 3 KiB each leave more."""
GAUGES = ("connections", "sessions_tcp", "sessions_unix")


class Pair:
    """Source and reader in this process, so that what either keeps is seen; the reader dials through a gate."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.outcomes: dict[str, int] = {}
        self.source, self.reader = self.open("source"), self.open("reader")
        self.introduce()

    def open(self, name: str) -> Party:
        party = Party(name, [self.lane], blocks=BLOCKS, block_bytes=BLOCK_BYTES, reconnect_s=5.0, remembered=REMEMBERED)
        party.open_gate()
        party.allocate(SIZE)
        if name == "source":
            party.fill(1)
        return party

    def introduce(self) -> None:
        """Whoever of the two dials, it is through a gate."""
        self.source.meet(self.reader.card(0))
        self.reader.meet(self.source.card(0))

    def ended(self, party: Party, transfer: str) -> None:
        outcome = party.outcome(transfer)
        assert outcome, f"{transfer} is not over"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        party.posts.pop(transfer, None)

    def pull(self) -> None:
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        self.ended(self.reader, transfer)

    def cancelled_pull(self) -> None:
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS // 2, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        self.reader.cancel(transfer)
        self.ended(self.reader, transfer)

    def late_pull(self) -> None:
        transfer = secrets.token_hex(16)
        try:
            self.reader.pull(transfer, "source", [0], deadline_s=0.005)
        except InvalidArgument:
            return  # this thread was held up for so long
        self.ended(self.reader, transfer)

    def reset_pull(self) -> None:
        self.settle()  # a RELEASE that is lost with its connection leaves a grant to its time to live
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS // 2, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        for party in (self.source, self.reader):
            party.gate(0, "reset")
        self.source.ready(transfer, BLOCKS, True)
        self.ended(self.reader, transfer)

    def revoked_pull(self) -> None:
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS // 2, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        self.source.revoke(transfer)
        self.ended(self.reader, transfer)

    def read(self) -> None:
        name = secrets.token_hex(4)
        self.reader.post(name, "READ", "source", 0, 0, piece=4096)
        self.ended(self.reader, name)

    def cancelled_write(self) -> None:
        name = secrets.token_hex(4)
        self.source.post(name, "WRITE", "reader", 0, 0, piece=4096)
        self.source.cancel(name)
        self.ended(self.source, name)

    def taken_back(self) -> None:
        """A region that is taken back while it is read; its successor is another."""
        name = secrets.token_hex(4)
        self.reader.post(name, "READ", "source", 0, 0, piece=4096)
        self.source.deregister(0)
        self.ended(self.reader, name)
        for party in (self.source, self.reader):
            if party.regions[0] is not None:
                self.reader.wait_idle()
                party.deregister(0)
            party.regions.clear()
            party.known_regions.clear()
            party.allocate(SIZE)
        self.introduce()

    FAULTS = (cancelled_pull, late_pull, reset_pull, revoked_pull, read, cancelled_write, taken_back, cancelled_pull)

    def round(self, number: int) -> None:
        self.FAULTS[number % len(self.FAULTS)](self)
        if number % 16 == 0:
            self.settle()

    def settle(self) -> None:
        """Nothing is under way, and what the parties wrote down for their tests is forgotten."""
        for party in (self.source, self.reader):
            assert party.wait_idle() == ""
            for kept in (party.finals, party.drained, party.done, party.ended, party.offers):
                kept.clear()

    def close(self) -> None:
        self.reader.close()
        self.source.close()


class Lives(Pair):
    """In each round one of the two ends, and another life of it takes its place: it registers memory, connects and
    transfers."""

    FAULTS = (
        Pair.pull,
        Pair.cancelled_pull,
        Pair.read,
        Pair.reset_pull,
        Pair.late_pull,
        Pair.cancelled_write,
        Pair.revoked_pull,
    )

    def round(self, number: int) -> None:
        name, other = ("source", self.reader) if number % 2 else ("reader", self.source)
        getattr(self, name).close()
        other.peer_dead(name)
        setattr(self, name, self.open(name))
        self.introduce()
        self.FAULTS[number % len(self.FAULTS)](self)


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def held() -> dict[str, int]:
    """What this process holds once what is closing has closed: nothing of it changes any more."""
    last, since_s = resources(), time.monotonic()
    end_s = since_s + 10.0
    while time.monotonic() < min(since_s + QUIET_S, end_s):
        gc.collect()  # more than once: it does nothing while another thread is at it
        time.sleep(0.05)
        now = resources()
        if any(now[name] != last[name] for name in COUNTED):
            since_s = time.monotonic()
        last = now
    return last


def descriptors() -> collections.Counter[str]:
    """How many are open of each kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the directory
            kinds[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return kinds


def check_rounds(pair: Pair, rounds: int, record_property: Any) -> None:
    """Play ``rounds`` of them after some to warm up; nothing is held afterwards that was not before."""
    threads = threading.active_count()
    for number in range(max(rounds // 10, 2 * len(pair.FAULTS))):
        pair.round(number)
    for party in (pair.source, pair.reader):
        party.transport.wait(0.0)  # the first caller that drives or polls costs a core one epoll for good
    pair.settle()
    before, open_before = held(), descriptors()
    gauges = [{name: party.statistics()[name] for name in GAUGES} for party in (pair.source, pair.reader)]
    for number in range(rounds):
        pair.round(number)
    pair.settle()
    after = held()
    record_property("before", before)
    record_property("after", after)
    print(f"before {before} after {after} outcomes {pair.outcomes}")
    for name in COUNTED:
        new = descriptors() - open_before
        assert after[name] <= before[name] + MARGINS.get(name, MARGIN), (name, before, after, new)
    assert after["rss_kib"] <= before["rss_kib"] + RSS_MARGIN_KIB, (before, after)
    assert threading.active_count() <= threads + 2
    for party, most in zip((pair.source, pair.reader), gauges, strict=True):
        found = party.statistics()
        assert all(found[name] <= most[name] for name in GAUGES), (most, found)
        assert [pool.quarantined for pool in party.transport.counts().pools] == [0]
    assert {"cancelled", "deadline", "committed", "grant_revoked"} <= set(pair.outcomes)


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        pytest.param(Pair, 100, id="one-pair-100"),
        pytest.param(Pair, 1000, id="one-pair-1000", marks=pytest.mark.slow),
        pytest.param(Lives, 300, id="many-lives-300", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_held_after(lane: str, kind: type[Pair], rounds: int, record_property: Any) -> None:
    pair = kind(lane)
    try:
        check_rounds(pair, rounds, record_property)
    finally:
        pair.close()
