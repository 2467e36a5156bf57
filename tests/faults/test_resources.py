"""A thousand rounds of everything that ends early: what a process holds afterwards is what it held before."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lanes import LANES
from parties import POISON, Party, resources

pytestmark = [pytest.mark.slow, pytest.mark.no_sanitizer]

ROUNDS, WARM_UP = 1000, 100
BLOCKS, BLOCK_BYTES = 16, 4096
SIZE = 64 << 10
COUNTED = ("descriptors", "sockets", "mappings", "threads")
QUIET_S = 0.6
"""More than a connection takes to be hung up on by both sides (0.5 s)."""
RSS_MARGIN_KIB = 6 << 10
"""Of a process that keeps the states of its last 65,536 transfers, each some hundred bytes, and an allocator."""


class Pair:
    """Source and reader in this process, so that what either keeps is seen; the reader dials through a gate."""

    def __init__(self, lane: str) -> None:
        options: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "reconnect_s": 5.0}
        self.source, self.reader = Party("source", [lane], **options), Party("reader", [lane], **options)
        self.source.open_gate()
        self.reader.open_gate()
        self.source.allocate(SIZE)
        self.reader.allocate(SIZE)
        self.introduce()
        self.source.fill(1)
        self.outcomes: dict[str, int] = {}

    def introduce(self) -> None:
        """Whoever of the two dials, it is through a gate."""
        self.source.meet(self.reader.card(0))
        self.reader.meet(self.source.card(0))

    def ended(self, party: Party, transfer: str) -> None:
        outcome = party.outcome(transfer)
        assert outcome, f"{transfer} is not over"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        party.posts.pop(transfer, None)

    def cancelled_pull(self) -> None:
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS // 2, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        self.reader.cancel(transfer)
        self.ended(self.reader, transfer)

    def late_pull(self) -> None:
        transfer = secrets.token_hex(16)
        self.reader.pull(transfer, "source", [0], deadline_s=0.002)
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


@pytest.fixture(params=LANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def held() -> dict[str, int]:
    """What this process holds once what is closing has closed: nothing of it changes any more."""
    last, since_s = resources(), time.monotonic()
    end_s = since_s + 10.0
    while time.monotonic() < min(since_s + QUIET_S, end_s):
        time.sleep(0.02)
        now = resources()
        if any(now[name] != last[name] for name in COUNTED):
            since_s = time.monotonic()
        last = now
    return last


def test_a_thousand_rounds(pair: Pair, record_property: Any) -> None:
    threads = threading.active_count()
    for number in range(WARM_UP):
        pair.round(number)
    pair.settle()
    before = held()
    for number in range(ROUNDS):
        pair.round(number)
    pair.settle()
    after = held()
    record_property("before", before)
    record_property("after", after)
    print(f"before {before} after {after} outcomes {pair.outcomes}")
    for name in COUNTED:
        assert after[name] <= before[name] + (4 if name == "mappings" else 0), (name, before, after)
    assert after["rss_kib"] <= before["rss_kib"] + RSS_MARGIN_KIB, (before, after)
    assert threading.active_count() <= threads + 2
    assert {"cancelled", "deadline", "committed", "grant_revoked"} <= set(pair.outcomes)
    assert (pair.reader.memory[BLOCKS * BLOCK_BYTES :] == POISON).all()
