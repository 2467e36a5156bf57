"""Every fault, at every phase of a pull, on every lane: how it ends, by when, and that no byte lands afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from lanes import LANES, STREAMS, at_once, on_all_lanes
from stage import (
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
    Stage,
)

pytestmark = pytest.mark.no_sanitizer


@pytest.fixture(scope="module")
def standing() -> Iterator[dict[str, Stage]]:
    """The stages that were used, by lane: the next test goes on with those where nothing is left of before."""
    made: dict[str, Stage] = {}
    yield made
    at_once(Stage.close, made)


@pytest.fixture
def reconnect_s() -> float:
    return PATIENT_S


@pytest.fixture
def stages(standing: dict[str, Stage], reconnect_s: float) -> dict[str, Stage]:
    left = {lane: made for lane, made in standing.items() if not made.is_clean or made.reconnect_s != reconnect_s}
    for lane in left:
        del standing[lane]
    if left:
        at_once(Stage.close, left)
    missing = {lane: lane for lane in LANES if lane not in standing}
    if missing:
        standing |= at_once(lambda lane: Stage(lane, reconnect_s), missing)
    return standing


gives_up = pytest.mark.parametrize("reconnect_s", [RECONNECT_S], ids=["gives-up"])


@on_all_lanes
def test_cancel(stage: Stage) -> None:
    stage.begin()
    for phase, reader in stage.readers.items():
        reader.cancel(stage.ids[phase])
    stage.expect("cancelled", time.monotonic())
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.look_again()
    for phase in stage.phases:
        if phase.ready is not None:
            assert stage.source.wait_ended(stage.ids[phase]) == "RELEASED", phase.name


@on_all_lanes
def test_deadline(stage: Stage) -> None:
    deadline_s = 2.0
    began_s = stage.begin(deadline_s)
    stage.expect("deadline", began_s + deadline_s)
    assert time.monotonic() >= began_s + deadline_s
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.look_again()


@on_all_lanes
def test_revoke(stage: Stage) -> None:
    """The source takes its blocks back and writes them at once: what is committed was all read and judged before."""
    stage.begin()
    is_judged = {CONFIRMING: "committed"}  # the verdict had been given, and was under way
    if stage.lane in STREAMS:
        is_judged |= dict.fromkeys(BYTEWISE, "committed")  # as the kernel had taken every byte by then
    for phase in stage.phases:
        if phase.ready is not None:
            assert stage.source.revoke(stage.ids[phase]) == "REVOKED"
            stage.source.paint(0xAA, stage.own_blocks(phase))
        stage.gate(phase, "resume")
    waiting = STEPS[0]
    stage.readers[waiting].cancel(stage.ids[waiting])
    stage.expect("grant_revoked", time.monotonic(), but=is_judged | {waiting: "cancelled"})
    stage.expect_idle()
    stage.source.fill(SEED)


@on_all_lanes
def test_reset_and_again(stage: Stage) -> None:
    """A connection that breaks costs time; what has landed is not asked for again."""
    before = {phase: moved(stage, phase) for phase in stage.phases}
    stage.begin()
    for phase in stage.phases:
        stage.gate(phase, "reset")
    stage.go_on()
    stage.expect("committed", time.monotonic())
    stage.expect_idle()
    for phase in stage.phases:
        if phase in STEPS or phase is CONNECTING:
            assert moved(stage, phase) - before[phase] == BYTES, phase.name
        else:
            assert moved(stage, phase) - before[phase] <= 2 * BYTES, phase.name


def moved(stage: Stage, phase: object) -> int:
    """Bytes that have landed at one reader so far, by whatever lane."""
    numbers = stage.readers[phase].statistics()  # type: ignore[index]
    return sum(numbers[name] for name in ("bytes_mapped", "bytes_cma", "bytes_ucx", "bytes_streamed_in"))


@on_all_lanes
def test_partition_that_heals(stage: Stage) -> None:
    """Each side has hung up on the other by then; the pulls go on where they were."""
    stage.begin()
    stage.gate(CONNECTING, "resume")
    for phase in stage.phases[:-1]:
        stage.gate(phase, "freeze")
    for phase in stage.phases[:-1]:
        reader = stage.readers[phase]
        assert reader.wait_state(stage.ids[phase], "CONNECTING", phase.done), (
            f"{phase.name}: {reader.state(stage.ids[phase])}"
        )
        stage.gate(phase, "resume")
    stage.go_on()
    stage.expect("committed", time.monotonic())
    stage.expect_idle()


@on_all_lanes
def test_announced_death(stage: Stage) -> None:
    """The coordinator says that the life is over: no waiting."""
    stage.begin()
    stage.source.kill()
    for reader in stage.readers.values():
        reader.transport.peer_dead(reader.peers["source"].ref)
    stage.expect("peer_gone", time.monotonic())
    stage.replace_source()
    stage.look_again()


@on_all_lanes
def test_phases_are_what_they_are_called(stage: Stage) -> None:
    """Nothing is broken: every pull leaves its phase and commits."""
    stage.begin()
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.go_on()
    stage.expect("committed", time.monotonic())
    stage.expect_idle()
    assert all(len(stage.own_blocks(phase)) == BLOCKS for phase in stage.phases)


@gives_up
@on_all_lanes
def test_partition(stage: Stage) -> None:
    stage.begin(ttl_s=2.0)
    cut_s = time.monotonic()
    for phase in stage.phases:
        stage.gate(phase, "freeze")
    stage.expect("peer_gone", cut_s + SILENCE_S)
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.look_again()


@gives_up
@on_all_lanes
def test_stopped_source(stage: Stage) -> None:
    """SIGSTOP, and SIGCONT long after its readers have given up and their blocks are others'."""
    stage.begin(ttl_s=2.0)
    stopped_s = time.monotonic()
    stage.source.stop()
    try:
        stage.expect("peer_gone", stopped_s + SILENCE_S)
        stage.expect_paint()
    finally:
        stage.source.go_on()
    for phase in stage.phases:
        stage.gate(phase, "resume")
    stage.look_again()


@gives_up
@on_all_lanes
def test_killed_source(stage: Stage) -> None:
    stage.begin()
    stage.source.kill()
    killed_s = time.monotonic()
    stage.expect("peer_gone", killed_s + RECONNECT_S)
    for reader in stage.readers.values():
        assert reader.wait_idle() == ""
    stage.replace_source()
    stage.look_again()
