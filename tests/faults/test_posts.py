"""Every fault, at every phase of a read and of a write of registered memory, on every lane, through the Poster."""

from __future__ import annotations

from collections.abc import Iterator

import posts
import pytest
from far import Far
from gate import READY, REVOKE
from lanes import LANES, STREAMS, at_once, on_all_lanes
from parties import Party
from posts import PATIENT, PIECE, SEED, SIZE, PostStage, lose_a_writer
from stage import PAINT

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
def stages(
    request: pytest.FixtureRequest, limits: dict[str, float], deadline_s: float
) -> Iterator[dict[str, PostStage]]:
    made = at_once(lambda lane: PostStage(lane, request.param, limits, deadline_s), {lane: lane for lane in LANES})
    yield made
    at_once(PostStage.close, made)


test_cancel = on_all_lanes(posts.cancel)
test_deadline = late(posts.waits(on_all_lanes(posts.deadline)))
test_reset_and_again = on_all_lanes(posts.reset_and_again)
test_partition_that_heals = posts.keeps(on_all_lanes(posts.partition_that_heals))
test_partition = posts.gives_up(on_all_lanes(posts.partition))
test_killed = posts.gives_up(on_all_lanes(posts.killed))
test_stopped = posts.gives_up(on_all_lanes(posts.stopped))


@on_all_lanes
def test_taken_back_there(stage: PostStage) -> None:
    """The far side takes its memory back in every phase: it is not made to wait, and writes there at once."""
    for number in range(len(stage.rules)):
        stage.far.deregister(number)
        stage.far.paint(PAINT, region=number)
    stage.resume()
    for number, (phase, party) in enumerate(stage.near.items()):
        got = party.outcome(phase)
        allowed = {"grant_revoked", "refused"}
        if phase in stage.was_judged and (stage.op == "READ" or phase == "done"):
            allowed.add("committed")
        assert got in allowed, f"{phase}: {got}: {party.why(phase)}"
        if got == "committed" and stage.op == "READ":
            assert party.is_filled(SEED, region=0), phase
        assert stage.far.is_painted(PAINT, region=number), phase
        assert party.wait_idle() == ""
    assert stage.far.wait_idle() == ""


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane not in STREAMS])
def test_taken_back_is_said_first(lane: str) -> None:
    """A reader hears that its grant is revoked before it hears that the memory is not to be read any more."""
    far = Far("far", [lane], blocks=1)
    near = Party("near", [lane], blocks=1)
    try:
        far.meet(near.card())
        far.open_gate()
        near.allocate(SIZE)
        numbers = range(6)  # which of the two was sent first was a race
        for _ in numbers:
            far.allocate(SIZE)
        near.meet(far.card(0))
        for number in numbers:
            far.gate(0, "stop_at", "from", READY, 0)
            near.post(str(number), "READ", "far", 0, number, piece=PIECE)
            assert far.gate(0, "wait_stopped")
            far.deregister(number)
            far.gate(0, "stop_at", "from", REVOKE, 0)
            assert far.gate(0, "wait_stopped")
            assert near.outcome(str(number), 0.1) == "", "it ended before the revocation was heard"
            far.gate(0, "resume")
            assert near.outcome(str(number)) == "grant_revoked"
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_writer_that_is_gone(fault: str) -> None:
    """Whoever is written to is rid of a dead or hanging writer in bounded time, and gets its memory back."""
    at_once(lambda lane: lose_a_writer(lane, fault), {lane: lane for lane in LANES})
