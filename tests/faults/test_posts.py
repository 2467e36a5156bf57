"""Every fault, at every phase of a read and of a write of registered memory, on every lane, through the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.faults import posts
from tests.support.faults.fault_proxy import READY, REVOKE
from tests.support.faults.lanes import LANES, STREAMS, at_once, on_all_lanes
from tests.support.faults.parties import Party
from tests.support.faults.phase_fixture import PAINT
from tests.support.faults.posts import ELEMENT, PATIENT, SEED, SIZE, PostFixture, lose_a_writer
from tests.support.faults.remote import Remote

pytestmark = pytest.mark.no_sanitizer

DEADLINE_S = 2.0

late = pytest.mark.parametrize("deadline_s", [DEADLINE_S], ids=["late"])


@pytest.fixture
def limits() -> dict[str, float]:
    return PATIENT


@pytest.fixture
def deadline_s() -> float:
    return 60.0


@pytest.fixture(params=["READ", "WRITE"], ids=["read", "write"])
def fixtures(
    request: pytest.FixtureRequest, limits: dict[str, float], deadline_s: float
) -> Iterator[dict[str, PostFixture]]:
    made = at_once(lambda lane: PostFixture(lane, request.param, limits, deadline_s), {lane: lane for lane in LANES})
    yield made
    at_once(PostFixture.close, made)


test_cancel = on_all_lanes(posts.cancel)
test_deadline = late(posts.waits(on_all_lanes(posts.deadline)))
test_reset_and_again = on_all_lanes(posts.reset_and_again)
test_partition_that_heals = posts.keeps(on_all_lanes(posts.partition_that_heals))
test_partition = posts.gives_up(on_all_lanes(posts.partition))
test_killed = posts.gives_up(on_all_lanes(posts.killed))
test_stopped = posts.gives_up(on_all_lanes(posts.stopped))


@on_all_lanes
def test_taken_back_there(fixture: PostFixture) -> None:
    """The remote side takes its memory back in every phase: it is not made to wait, and writes there at once."""
    for number in range(len(fixture.rules)):
        fixture.remote.deregister(number)
        fixture.remote.paint(PAINT, region=number)
    fixture.resume()
    for number, (phase, party) in enumerate(fixture.near.items()):
        got = party.outcome(phase)
        allowed = {"grant_revoked", "refused"}
        if phase in fixture.was_judged and (fixture.op == "READ" or phase == "done"):
            allowed.add("committed")
        assert got in allowed, f"{phase}: {got}: {party.why(phase)}"
        if got == "committed" and fixture.op == "READ":
            assert party.is_filled(SEED, region=0), phase
        assert fixture.remote.is_painted(PAINT, region=number), phase
        assert party.wait_idle() == ""
    assert fixture.remote.wait_idle() == ""


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane not in STREAMS])
def test_taken_back_is_said_first(lane: str) -> None:
    """A reader hears that its grant is revoked before it hears that the memory is not to be read any more."""
    remote = Remote("remote", [lane], blocks=1)
    near = Party("near", [lane], blocks=1)
    try:
        remote.add_peer(near.metadata())
        remote.open_proxy()
        near.allocate(SIZE)
        numbers = range(6)  # which of the two was sent first was a race
        for _ in numbers:
            remote.allocate(SIZE)
        near.add_peer(remote.metadata(0))
        for number in numbers:
            remote.proxy(0, "stop_at", "from", READY, 0)
            near.post(str(number), "READ", "remote", 0, number, element=ELEMENT)
            assert remote.proxy(0, "wait_stopped")
            remote.deregister(number)
            remote.proxy(0, "stop_at", "from", REVOKE, 0)
            assert remote.proxy(0, "wait_stopped")
            assert near.outcome(str(number), 0.1) == "", "it ended before the revocation was heard"
            remote.proxy(0, "resume")
            assert near.outcome(str(number)) == "grant_revoked"
    finally:
        near.close()
        remote.close()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_writer_that_is_gone(fault: str) -> None:
    """The side that is written to is rid of a dead or hanging writer in bounded time, and gets its memory back."""
    at_once(lambda lane: lose_a_writer(lane, fault), {lane: lane for lane in LANES})
