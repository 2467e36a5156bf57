"""The middle of a copy, where the side that has the bytes, or the one that copies, is lost: both have their memory back
in bounded time, and nothing lands in it, or is committed, afterwards.

The copying process is stopped when its first bytes have changed and its last have not; then comes the fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.support.faults.lanes import LANES, ONE_SIDED, ZERO_COPY_LANES, at_once
from tests.support.faults.parties import POISON
from tests.support.faults.phase_fixture import MARGIN_S, PAINT, PATIENT_S, RECONNECT_S, SILENCE_S, STALL_S
from tests.support.faults.remote import Remote

pytestmark = pytest.mark.no_sanitizer

SIZE, ELEMENT = 64 << 20, 1 << 20
SEED = 41
ATTEMPTS = 20
TTL_S = 2.0
DEADLINE_S = 2.0
GIVES_UP = {"stall_s": STALL_S, "reconnect_s": RECONNECT_S, "grant_ttl_s": TTL_S}
PATIENT = dict.fromkeys(GIVES_UP, PATIENT_S)
BY_NOW_S = 0.0


class Copy:
    """The owner of the bytes and the side that copies them, each a process; the asking one dials through a proxy.

    ``is_proxied``: without it the two are connected to one another directly.
    """

    def __init__(self, lane: str, op: str, limits: Mapping[str, float], is_proxied: bool) -> None:
        self.lane, self.op = lane, op
        options: dict[str, Any] = {**limits, "blocks": 1}
        self.owner = Remote("owner", [lane], **options)
        self.reader = Remote("reader", [lane], **options)
        self.poster, self.peer = (self.reader, "owner") if op == "READ" else (self.owner, "reader")
        for party in (self.owner, self.reader):
            party.allocate(SIZE)
        self.owner.fill(SEED, region=0)
        self.memory = self.reader.memory_of(0, SIZE)
        self.owner.add_peer(self.reader.metadata())
        self.reader.add_peer(self.owner.metadata())
        if is_proxied and op == "READ":
            self.reader.add_peer(self.owner.metadata(self.owner.open_proxy()))
        elif is_proxied:
            reader = self.reader.metadata()
            self.owner.add_peer(self.owner.proxied(reader, self.owner.open_proxy(reader)))
        self.name, self.number = "", -1
        self.begun_s = self.struck_s = 0.0
        """When bytes had landed: its time was counted by then."""

    def catch(self, deadline_s: float) -> None:
        """The reader is stopped when some of the bytes have landed, and not the last."""
        for self.number in range(ATTEMPTS):
            self.reader.paint(POISON, region=0)
            self.name = f"{self.op}-{self.number}"
            posted_s = time.monotonic()
            self.poster.post(self.name, self.op, self.peer, 0, 0, element=ELEMENT, deadline_s=deadline_s)
            while self.memory[0] == POISON and self.memory[1] == POISON:
                assert time.monotonic() < posted_s + 20, "nothing landed"
            self.begun_s = time.monotonic()
            self.reader.stop()
            if (self.memory[-ELEMENT:] == POISON).all():
                if self.lane in ZERO_COPY_LANES:
                    assert self.owner.statistics()["bytes_spliced_out"] > 0, "its blocks are not sent zero-copy"
                return
            self.reader.go_on()
            assert self.poster.outcome(self.name) == "committed"
        raise AssertionError("every copy was over before it could be caught")

    def go_on(self) -> None:
        """The reader does; what comes now is measured from here."""
        self.struck_s = time.monotonic()
        self.reader.go_on()

    def expect_posted(self, outcome: str, within_s: float) -> None:
        """The side that asked hears of the end within so long after the fault."""
        got = self.poster.outcome(self.name, max(self.struck_s + within_s + MARGIN_S - time.monotonic(), 0.0))
        assert got == outcome, f"{got or 'not over'}, not {outcome}"

    def expect_failed_there(self, within_s: float) -> None:
        """The side that is written to is rid of it within so long after the fault, and has committed nothing."""
        left_s = max(self.struck_s + within_s + MARGIN_S - time.monotonic(), 0.0)
        assert self.reader.offer("owner", left_s, self.number) == "FAILED"

    def expect_over(self, outcome: str, within_s: float) -> None:
        """The side that copies is rid of it, as the one that asked or the one that was written to."""
        if self.op == "READ":
            self.expect_posted(outcome, within_s)
        else:
            self.expect_failed_there(within_s)

    def take_back(self, party: Remote) -> None:
        """Its memory is its own again, and it writes there at once."""
        assert party.wait_idle() == ""
        party.deregister(0)
        party.paint(PAINT, region=0)

    def look_again(self) -> None:
        time.sleep(0.1)
        assert (self.memory == PAINT).all(), "bytes landed in memory that was taken back"
        assert self.reader.wait_idle() == ""

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


Fixtures = dict[str, Copy]


@pytest.fixture
def limits() -> Mapping[str, float]:
    return GIVES_UP


@pytest.fixture
def is_proxied() -> bool:
    return False


@pytest.fixture
def ops() -> tuple[str, ...]:
    return ("READ", "WRITE")


@pytest.fixture(
    params=[
        pytest.param(ONE_SIDED, id="one-sided"),
        pytest.param([lane for lane in LANES if lane not in ONE_SIDED], id="others", marks=pytest.mark.nightly),
    ]
)
def fixtures(
    request: pytest.FixtureRequest, ops: tuple[str, ...], limits: Mapping[str, float], is_proxied: bool
) -> Iterator[Fixtures]:
    cases = {f"{lane} {op}": (lane, op) for lane in request.param for op in ops}
    made = at_once(lambda case: Copy(*case, limits, is_proxied), cases)
    yield made
    at_once(Copy.close, made)


patient = pytest.mark.parametrize("limits", [PATIENT], ids=["patient"])
proxied = pytest.mark.parametrize("is_proxied", [True], ids=["proxied"])
writes = pytest.mark.parametrize("ops", [("WRITE",)], ids=["write"])


def strike(fixtures: Fixtures, fault: Callable[[Copy], object], deadline_s: float = 60.0) -> None:
    """Every copy is in its middle, one after the other, and meets its fault there."""
    for copy in fixtures.values():
        copy.catch(deadline_s)
        fault(copy)
        copy.struck_s = time.monotonic()


@pytest.mark.nightly
@patient
def test_deadline(fixtures: Fixtures) -> None:
    """It passes in the middle: the asking side hears so when it does, though the copying one hangs, and not later."""
    strike(fixtures, lambda copy: None, DEADLINE_S)

    def check(copy: Copy) -> None:
        by_s = copy.begun_s + DEADLINE_S
        if copy.op == "WRITE":
            copy.struck_s = by_s
            copy.expect_posted("deadline", BY_NOW_S)
            copy.take_back(copy.owner)
        time.sleep(max(by_s - time.monotonic(), 0.0))
        copy.go_on()
        copy.expect_over("deadline", BY_NOW_S)
        copy.take_back(copy.reader)
        if copy.op == "READ":
            copy.take_back(copy.owner)
        copy.look_again()

    at_once(check, fixtures)


def test_killed_owner(fixtures: Fixtures) -> None:
    strike(fixtures, lambda copy: copy.owner.kill())

    def check(copy: Copy) -> None:
        copy.go_on()
        copy.expect_over("peer_gone", RECONNECT_S)
        copy.take_back(copy.reader)
        copy.look_again()

    at_once(check, fixtures)


@pytest.mark.nightly
def test_stopped_owner(fixtures: Fixtures) -> None:
    """SIGSTOP, and SIGCONT when it was given up long ago, and the memory is another owner's."""
    strike(fixtures, lambda copy: copy.owner.stop())

    def check(copy: Copy) -> None:
        copy.go_on()
        copy.expect_over("peer_gone", SILENCE_S)
        copy.take_back(copy.reader)
        copy.owner.go_on()
        if copy.op == "WRITE":
            assert copy.owner.outcome(copy.name) in ("peer_gone", "grant_revoked", "grant_expired")
        copy.take_back(copy.owner)
        copy.look_again()

    at_once(check, fixtures)


@proxied
def test_partition(fixtures: Fixtures) -> None:
    """Both are rid of each other, and their memory is others', before the link is up again."""
    strike(fixtures, lambda copy: copy.owner.proxy(0, "freeze"))

    def check(copy: Copy) -> None:
        if copy.op == "WRITE":  # its patience began when the reader was stopped
            copy.expect_posted("peer_gone", SILENCE_S)
            copy.take_back(copy.owner)
        copy.go_on()
        copy.expect_over("peer_gone", SILENCE_S)
        copy.take_back(copy.reader)
        if copy.op == "READ":
            copy.take_back(copy.owner)
        copy.owner.proxy(0, "resume")
        copy.look_again()

    at_once(check, fixtures)


@pytest.mark.nightly
@patient
@proxied
def test_reset_and_again(fixtures: Fixtures) -> None:
    """A connection that breaks in the middle costs time, and no byte."""
    strike(fixtures, lambda copy: copy.owner.proxy(0, "reset"))

    def check(copy: Copy) -> None:
        copy.go_on()
        assert copy.poster.outcome(copy.name) == "committed"
        assert copy.reader.is_filled(SEED, region=0)
        assert copy.owner.wait_idle() == copy.reader.wait_idle() == ""

    at_once(check, fixtures)


@writes
def test_killed_destination(fixtures: Fixtures) -> None:
    """The side that writes has its memory back when the one that copies it is dead."""
    strike(fixtures, lambda copy: copy.reader.kill())

    def check(copy: Copy) -> None:
        copy.expect_posted("peer_gone", RECONNECT_S)
        copy.take_back(copy.owner)

    at_once(check, fixtures)


@writes
def test_stopped_destination(fixtures: Fixtures) -> None:
    """The side that writes does not wait for one that hangs; what that one reads when it goes on is not committed."""
    strike(fixtures, lambda copy: None)

    def check(copy: Copy) -> None:
        copy.expect_posted("peer_gone", SILENCE_S)
        copy.take_back(copy.owner)
        copy.go_on()
        copy.expect_failed_there(SILENCE_S)
        copy.take_back(copy.reader)
        copy.look_again()
        assert copy.owner.is_painted(PAINT, region=0)

    at_once(check, fixtures)
