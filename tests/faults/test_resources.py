"""A hundred rounds, or a thousand, of everything that ends early: what a process holds then is what it held before."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from kvxfer.errors import InvalidArgumentError
from tests.support.faults.lanes import LANES
from tests.support.faults.parties import Party
from tests.support.faults.rounds import check_rounds

pytestmark = pytest.mark.no_sanitizer

BLOCKS, BLOCK_BYTES = 16, 4096
SIZE = 64 << 10
REMEMBERED = 128
"""States of transfers that are over: so few that they are no growth."""


class Pair:
    """Source and reader in this process, so that what either keeps is seen; the reader dials through a proxy."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.outcomes: dict[str, int] = {}
        self.source, self.reader = self.open("source"), self.open("reader")
        self.introduce()

    def open(self, name: str) -> Party:
        party = Party(name, [self.lane], blocks=BLOCKS, block_bytes=BLOCK_BYTES, reconnect_s=5.0, remembered=REMEMBERED)
        party.open_proxy()
        party.allocate(SIZE)
        if name == "source":
            party.fill(1)
        return party

    def parties(self) -> list[Party]:
        return [self.source, self.reader]

    def introduce(self) -> None:
        """Whichever of the two dials, it is through a proxy."""
        self.source.add_peer(self.reader.metadata(0))
        self.reader.add_peer(self.source.metadata(0))

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
        except InvalidArgumentError:
            return  # this thread was held up for so long
        self.ended(self.reader, transfer)

    def reset_pull(self) -> None:
        self.settle()  # a RELEASE that is lost with its connection leaves a grant to its time to live
        transfer = secrets.token_hex(16)
        self.source.grant(transfer, list(range(BLOCKS)), BLOCKS // 2, reader="reader")
        self.reader.pull(transfer, "source", list(range(BLOCKS)))
        for party in (self.source, self.reader):
            party.proxy(0, "reset")
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
        self.reader.post(name, "READ", "source", 0, 0, element=4096)
        self.ended(self.reader, name)

    def cancelled_write(self) -> None:
        name = secrets.token_hex(4)
        self.source.post(name, "WRITE", "reader", 0, 0, element=4096)
        self.source.cancel(name)
        self.ended(self.source, name)

    def taken_back(self) -> None:
        """A region that is taken back while it is read; its successor is another."""
        name = secrets.token_hex(4)
        self.reader.post(name, "READ", "source", 0, 0, element=4096)
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
        for party in self.parties():
            assert party.wait_idle() == ""
            party.forget()

    def close(self) -> None:
        self.reader.close()
        self.source.close()


class Incarnations(Pair):
    """In each round one of the two ends, and another incarnation of it takes its place: it registers memory, connects
    and transfers."""

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


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        pytest.param(Pair, 100, id="one-pair-100"),
        pytest.param(Pair, 1000, id="one-pair-1000", marks=pytest.mark.nightly),
        pytest.param(Incarnations, 300, id="many-incarnations-300", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_held_after(lane: str, kind: type[Pair], rounds: int, record_property: Any) -> None:
    pair = kind(lane)
    try:
        check_rounds(pair, rounds, max(rounds // 10, 2 * len(pair.FAULTS)), record_property)
        assert {"cancelled", "deadline", "committed", "grant_revoked"} <= set(pair.outcomes)
    finally:
        pair.close()
