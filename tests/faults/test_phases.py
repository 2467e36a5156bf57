"""Every fault, at every phase of a pull, on every lane: how it ends, by when, and that no byte lands afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.faults.lanes import LANES, STREAMS, at_once, on_all_lanes
from tests.support.faults.phase_fixture import (
    BLOCKS,
    BYTES,
    BYTEWISE,
    CONFIRMING,
    CONNECTING,
    PATIENT_S,
    RECONNECT_S,
    SEED,
    SILENCE_S,
    STEPS,
    PhaseFixture,
)

pytestmark = pytest.mark.no_sanitizer


@pytest.fixture(scope="module")
def standing() -> Iterator[dict[str, PhaseFixture]]:
    """The fixtures that were used, by lane: the next test goes on with those where nothing is left of before."""
    made: dict[str, PhaseFixture] = {}
    yield made
    at_once(PhaseFixture.close, made)


@pytest.fixture
def reconnect_s() -> float:
    return PATIENT_S


@pytest.fixture
def fixtures(standing: dict[str, PhaseFixture], reconnect_s: float) -> dict[str, PhaseFixture]:
    left = {lane: made for lane, made in standing.items() if not made.is_clean or made.reconnect_s != reconnect_s}
    for lane in left:
        del standing[lane]
    if left:
        at_once(PhaseFixture.close, left)
    missing = {lane: lane for lane in LANES if lane not in standing}
    if missing:
        standing |= at_once(lambda lane: PhaseFixture(lane, reconnect_s), missing)
    return standing


gives_up = pytest.mark.parametrize("reconnect_s", [RECONNECT_S], ids=["gives-up"])


@on_all_lanes
def test_cancel(fixture: PhaseFixture) -> None:
    fixture.begin()
    for phase, reader in fixture.readers.items():
        reader.cancel(fixture.ids[phase])
    fixture.expect("cancelled", time.monotonic())
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.look_again()
    for phase in fixture.phases:
        if phase.ready is not None:
            assert fixture.source.wait_ended(fixture.ids[phase]) == "RELEASED", phase.name


@on_all_lanes
def test_deadline(fixture: PhaseFixture) -> None:
    deadline_s = 2.0
    began_s = fixture.begin(deadline_s)
    fixture.expect("deadline", began_s + deadline_s)
    assert time.monotonic() >= began_s + deadline_s
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.look_again()


@on_all_lanes
def test_revoke(fixture: PhaseFixture) -> None:
    """The source takes its blocks back and writes them at once: what is committed was all read and judged before."""
    fixture.begin()
    is_judged = {CONFIRMING: "committed"}  # the verdict had been given, and was under way
    if fixture.lane in STREAMS:
        is_judged |= dict.fromkeys(BYTEWISE, "committed")  # as the kernel had taken every byte by then
    for phase in fixture.phases:
        if phase.ready is not None:
            assert fixture.source.revoke(fixture.ids[phase]) == "REVOKED"
            fixture.source.paint(0xAA, fixture.own_blocks(phase))
        fixture.proxy(phase, "resume")
    waiting = STEPS[0]
    fixture.readers[waiting].cancel(fixture.ids[waiting])
    fixture.expect("grant_revoked", time.monotonic(), but=is_judged | {waiting: "cancelled"})
    fixture.expect_idle()
    fixture.source.fill(SEED)


@on_all_lanes
def test_reset_and_again(fixture: PhaseFixture) -> None:
    """A connection that breaks costs time; what has landed is not asked for again."""
    before = {phase: moved(fixture, phase) for phase in fixture.phases}
    fixture.begin()
    for phase in fixture.phases:
        fixture.proxy(phase, "reset")
    fixture.go_on()
    fixture.expect("committed", time.monotonic())
    fixture.expect_idle()
    for phase in fixture.phases:
        if phase in STEPS or phase is CONNECTING:
            assert moved(fixture, phase) - before[phase] == BYTES, phase.name
        else:
            assert moved(fixture, phase) - before[phase] <= 2 * BYTES, phase.name


def moved(fixture: PhaseFixture, phase: object) -> int:
    """Bytes that have landed at one reader so remote, by whatever lane."""
    numbers = fixture.readers[phase].statistics()  # type: ignore[index]
    return sum(numbers[name] for name in ("bytes_mapped", "bytes_cma", "bytes_ucx", "bytes_streamed_in"))


@on_all_lanes
def test_partition_that_heals(fixture: PhaseFixture) -> None:
    """Each side has hung up on the other by then; the pulls go on where they were."""
    fixture.begin()
    fixture.proxy(CONNECTING, "resume")
    for phase in fixture.phases[:-1]:
        fixture.proxy(phase, "freeze")
    for phase in fixture.phases[:-1]:
        reader = fixture.readers[phase]
        assert reader.wait_state(fixture.ids[phase], "CONNECTING", phase.done), (
            f"{phase.name}: {reader.state(fixture.ids[phase])}"
        )
        fixture.proxy(phase, "resume")
    fixture.go_on()
    fixture.expect("committed", time.monotonic())
    fixture.expect_idle()


@on_all_lanes
def test_announced_death(fixture: PhaseFixture) -> None:
    """The coordinator says that the incarnation is over: no waiting."""
    fixture.begin()
    fixture.source.kill()
    for reader in fixture.readers.values():
        reader.transport.peer_dead(reader.peers["source"].ref)
    fixture.expect("peer_gone", time.monotonic())
    fixture.replace_source()
    fixture.look_again()


@on_all_lanes
def test_phases_are_what_they_are_called(fixture: PhaseFixture) -> None:
    """Nothing is broken: every pull leaves its phase and commits."""
    fixture.begin()
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.go_on()
    fixture.expect("committed", time.monotonic())
    fixture.expect_idle()
    assert all(len(fixture.own_blocks(phase)) == BLOCKS for phase in fixture.phases)


@gives_up
@on_all_lanes
def test_partition(fixture: PhaseFixture) -> None:
    fixture.begin(ttl_s=2.0)
    cut_s = time.monotonic()
    for phase in fixture.phases:
        fixture.proxy(phase, "freeze")
    fixture.expect("peer_gone", cut_s + SILENCE_S)
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.look_again()


@gives_up
@on_all_lanes
def test_stopped_source(fixture: PhaseFixture) -> None:
    """SIGSTOP, and SIGCONT long after its readers have given up and their blocks are others'."""
    fixture.begin(ttl_s=2.0)
    stopped_s = time.monotonic()
    fixture.source.stop()
    try:
        fixture.expect("peer_gone", stopped_s + SILENCE_S)
        fixture.expect_paint()
    finally:
        fixture.source.go_on()
    for phase in fixture.phases:
        fixture.proxy(phase, "resume")
    fixture.look_again()


@gives_up
@on_all_lanes
def test_killed_source(fixture: PhaseFixture) -> None:
    fixture.begin()
    fixture.source.kill()
    killed_s = time.monotonic()
    fixture.expect("peer_gone", killed_s + RECONNECT_S)
    for reader in fixture.readers.values():
        assert reader.wait_idle() == ""
    fixture.replace_source()
    fixture.look_again()
