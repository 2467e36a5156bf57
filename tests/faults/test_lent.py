"""Every fault amid blocks that are lent: large ones that the kernel takes from their owner's pages only when the reader
reads them, on `stream` and `unix`. What their owner puts there meanwhile may be read, and is never committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from gate import CONFIRM, DATA
from lanes import LENDING, at_once, on_all_lanes
from posts import GIVES_UP, PATIENT, TTL_S, WAITS, PostStage, Rule, lose_a_writer
from stage import MARGIN_S, PAINT, PATIENT_S, RECONNECT_S, SILENCE_S

pytestmark = pytest.mark.no_sanitizer

SIZE, PIECE = 16 << 20, 64 << 10
"""More than what two sockets hold, and frames of 1 MiB."""
READ_LATER = range(256, 384)
"""Blocks of 4 KiB that a TCP socket holds when the first byte has come: more than the gate has read, and lent."""
DEADLINE_S = 4.0
MOMENTS = {"first": 1, "middle": SIZE // 2 + 9}

gives_up = pytest.mark.parametrize("limits", [GIVES_UP], ids=["gives-up"])


def rules_of(op: str) -> dict[str, Rule]:
    """In each of these phases the bytes are lent, and their owner has not said yet that they are the right ones."""
    way, back = ("from", "to") if op == "READ" else ("to", "from")
    return {**{name: (way, DATA, count) for name, count in MOMENTS.items()}, "confirming": (back, CONFIRM, 0)}


def make(lane: str, op: str, limits: dict[str, float], deadline_s: float) -> PostStage:
    stage = PostStage(lane, op, limits, deadline_s, rules=rules_of(op), judged=(), size=SIZE, piece=PIECE)
    lent = sum(lent_by(sender) for sender in ([stage.far] if op == "READ" else stage.near.values()))
    assert SIZE < lent < len(stage.rules) * SIZE, "nothing is held while it is sent"
    return stage


def lent_by(sender: Any) -> int:
    """All that it has sent, in bytes, once its sockets are full."""
    last, end = -1, time.monotonic() + MARGIN_S
    while True:
        sent = sender.statistics()
        if 0 < sent["bytes_streamed_out"] == last:
            assert sent["bytes_spliced_out"] == last, "its blocks are not lent"
            return last
        assert time.monotonic() < end, "it sends nothing, or does not stop"
        last = sent["bytes_streamed_out"]
        time.sleep(0.01)


@pytest.fixture
def limits() -> dict[str, float]:
    return PATIENT


@pytest.fixture
def deadline_s() -> float:
    return 60.0


@pytest.fixture
def stages(limits: dict[str, float], deadline_s: float) -> Iterator[dict[str, PostStage]]:
    cases = {f"{lane} {op}": (lane, op) for lane in LENDING for op in ("READ", "WRITE")}
    made = at_once(lambda case: make(*case, limits, deadline_s), cases)
    yield made
    at_once(PostStage.close, made)


@on_all_lanes
def test_cancel(stage: PostStage) -> None:
    """Whoever cancels a write has its memory back at once, and what it puts there then may well be read."""
    for phase, party in stage.near.items():
        party.cancel(phase)
    stage.expect("cancelled", time.monotonic())
    stage.resume()
    stage.expect_nothing_later()


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [DEADLINE_S], ids=["late"])
@pytest.mark.parametrize("limits", [WAITS], ids=["waits"])
@on_all_lanes
def test_deadline(stage: PostStage) -> None:
    by_s = stage.posted_s + DEADLINE_S
    stage.expect("deadline", by_s)
    assert time.monotonic() >= by_s
    stage.expect_offers_over(by_s, stage.was_judged)
    stage.resume()
    stage.expect_nothing_later()


@pytest.mark.slow
@on_all_lanes
def test_reset_and_again(stage: PostStage) -> None:
    for phase in stage.rules:
        stage.gate(phase, "reset")
    stage.expect_committed()


@pytest.mark.slow
@pytest.mark.parametrize("limits", [PATIENT | {"grant_ttl_s": PATIENT_S}], ids=["keeps"])
@on_all_lanes
def test_partition_that_heals(stage: PostStage) -> None:
    """What was lent before it is of no session any more; the posts go on over the next."""
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
    stage.expect_over_there(cut_s + max(SILENCE_S, TTL_S), stage.was_judged)
    stage.resume()
    stage.look_again()


@gives_up
@on_all_lanes
def test_killed(stage: PostStage) -> None:
    """The far side: who lends to a read, who borrows of a write."""
    stage.far.kill()
    killed_s = time.monotonic()
    stage.expect("peer_gone", killed_s + RECONNECT_S)
    for party in stage.near.values():
        assert party.is_painted(PAINT, region=0), "bytes landed in memory that was taken back"
        assert party.wait_idle() == ""


@pytest.mark.slow
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
    """The far side's memory is its own at once, though the kernel has references to it: what it writes there is read,
    and nothing is committed."""
    for number in range(len(stage.rules)):
        stage.far.deregister(number)
        stage.far.paint(PAINT, region=number)
    stage.resume()
    for number, (phase, party) in enumerate(stage.near.items()):
        got = party.outcome(phase)
        assert got in ("grant_revoked", "refused"), f"{phase}: {got}: {party.why(phase)}"
        assert stage.far.is_painted(PAINT, region=number), phase
        assert party.wait_idle() == ""
        if stage.op == "READ" and (stage.lane, phase) == ("stream", "first"):
            assert party.is_painted(PAINT, READ_LATER, region=0), "they were copied"
    assert stage.far.wait_idle() == ""


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_writer_that_is_gone(fault: str) -> None:
    """Whoever is lent to is rid of a dead or hanging lender in bounded time, and gets its memory back."""
    at_once(
        lambda lane: lose_a_writer(lane, fault, rules_of("WRITE"), size=SIZE, piece=PIECE),
        {lane: lane for lane in LENDING},
    )
