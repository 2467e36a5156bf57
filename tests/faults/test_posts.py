"""Every fault, at every phase of a read and of a write of registered memory, on every lane, through the Poster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from far import Far
from gate import READY, REVOKE
from lanes import LANES, STREAMS, at_once, on_all_lanes
from parties import Party
from posts import GIVES_UP, PATIENT, PIECE, SEED, SIZE, TTL_S, WAITS, PostStage, lose_a_writer
from stage import PAINT, PATIENT_S, RECONNECT_S, SILENCE_S

pytestmark = pytest.mark.no_sanitizer

DEADLINE_S = 2.0

gives_up = pytest.mark.parametrize("limits", [GIVES_UP], ids=["gives-up"])


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


@on_all_lanes
def test_cancel(stage: PostStage) -> None:
    for phase, party in stage.near.items():
        party.cancel(phase)
    stage.expect("cancelled", time.monotonic())
    stage.resume()
    stage.expect_nothing_later()


@pytest.mark.parametrize("deadline_s", [DEADLINE_S], ids=["late"])
@pytest.mark.parametrize("limits", [WAITS], ids=["waits"])
@on_all_lanes
def test_deadline(stage: PostStage) -> None:
    """Nobody loses patience before it passes, so that it finds every post in its phase."""
    by_s = stage.posted_s + DEADLINE_S
    stage.expect("deadline", by_s)
    assert time.monotonic() >= by_s
    stage.expect_offers_over(by_s, ["done"])  # also where the word that it is over is held
    stage.resume()
    stage.expect_nothing_later()


@on_all_lanes
def test_reset_and_again(stage: PostStage) -> None:
    for phase in stage.rules:
        stage.gate(phase, "reset")
    stage.expect_committed()


@pytest.mark.parametrize("limits", [PATIENT | {"grant_ttl_s": PATIENT_S}], ids=["keeps"])
@on_all_lanes
def test_partition_that_heals(stage: PostStage) -> None:
    """Each side has hung up on the other by then; the posts go on, and what was held is of no session any more."""
    stage.cut()
    stage.expect_hung_up()
    stage.resume()
    stage.expect_committed()


@gives_up
@on_all_lanes
def test_partition(stage: PostStage) -> None:
    """Both sides are rid of each other, and their memory is others', before the link is up again."""
    cut_s = stage.cut()
    stage.expect("peer_gone", cut_s + SILENCE_S)
    stage.expect_over_there(cut_s + max(SILENCE_S, TTL_S), ["done"])
    stage.resume()
    stage.look_again()


@gives_up
@on_all_lanes
def test_killed(stage: PostStage) -> None:
    stage.far.kill()
    killed_s = time.monotonic()
    stage.expect("peer_gone", killed_s + RECONNECT_S)
    assert all(party.is_painted(PAINT, region=0) for party in stage.near.values())


@gives_up
@on_all_lanes
def test_stopped(stage: PostStage) -> None:
    """SIGSTOP of the far side, and SIGCONT long after everything was given up here."""
    stage.far.stop()
    stopped_s = time.monotonic()
    try:
        stage.expect("peer_gone", stopped_s + SILENCE_S)
    finally:
        stage.far.go_on()
    stage.resume()
    stage.expect_nothing_later()


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
