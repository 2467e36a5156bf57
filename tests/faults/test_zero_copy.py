"""Every fault amid blocks that are sent zero-copy: large ones that the kernel takes from their owner's pages only when
the reader reads them, on `stream` and `unix`. Bytes that the owner writes there meanwhile may be read, but are
never committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults import posts
from tests.support.faults.fault_proxy import CONFIRM, DATA
from tests.support.faults.lanes import ZERO_COPY_LANES, at_once, on_all_lanes
from tests.support.faults.phase_fixture import MARGIN_S, PAINT
from tests.support.faults.posts import PATIENT, PostFixture, Rule, lose_a_writer

pytestmark = pytest.mark.no_sanitizer

SIZE, ELEMENT = 16 << 20, 64 << 10
"""More than what two sockets hold, and frames of 1 MiB."""
READ_LATER = range(256, 384)
"""Blocks of 4 KiB that a TCP socket holds when the first byte has come: not yet read by the proxy."""
DEADLINE_S = 4.0
MOMENTS = {"first": 1, "middle": SIZE // 2 + 9}

late = pytest.mark.parametrize("deadline_s", [DEADLINE_S], ids=["late"])


def rules_of(op: str) -> dict[str, Rule]:
    """In each of these phases the bytes are sent zero-copy, and their owner has not confirmed them yet."""
    way, back = ("from", "to") if op == "READ" else ("to", "from")
    return {**{name: (way, DATA, count) for name, count in MOMENTS.items()}, "confirming": (back, CONFIRM, 0)}


def make(lane: str, op: str, limits: dict[str, float], deadline_s: float) -> PostFixture:
    fixture = PostFixture(lane, op, limits, deadline_s, rules=rules_of(op), judged=(), size=SIZE, element=ELEMENT)
    referenced = sum(
        zero_copy_bytes(sender) for sender in ([fixture.remote] if op == "READ" else fixture.near.values())
    )
    assert SIZE < referenced < len(fixture.rules) * SIZE, "nothing is held while it is sent"
    return fixture


def zero_copy_bytes(sender: Any) -> int:
    """All that it has sent, in bytes, once its sockets are full."""
    last, end = -1, time.monotonic() + MARGIN_S
    while True:
        sent = sender.statistics()
        if 0 < sent["bytes_streamed_out"] == last:
            assert sent["bytes_spliced_out"] == last, "its blocks are not sent zero-copy"
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
def fixtures(limits: dict[str, float], deadline_s: float) -> Iterator[dict[str, PostFixture]]:
    cases = {f"{lane} {op}": (lane, op) for lane in ZERO_COPY_LANES for op in ("READ", "WRITE")}
    made = at_once(lambda case: make(*case, limits, deadline_s), cases)
    yield made
    at_once(PostFixture.close, made)


test_cancel = on_all_lanes(posts.cancel)
test_deadline = pytest.mark.nightly(late(posts.waits(on_all_lanes(posts.deadline))))
test_reset_and_again = pytest.mark.nightly(on_all_lanes(posts.reset_and_again))
test_partition_that_heals = pytest.mark.nightly(posts.keeps(on_all_lanes(posts.partition_that_heals)))
test_partition = posts.gives_up(on_all_lanes(posts.partition))
test_killed = posts.gives_up(on_all_lanes(posts.killed))
test_stopped = pytest.mark.nightly(posts.gives_up(on_all_lanes(posts.stopped)))


@on_all_lanes
def test_taken_back_there(fixture: PostFixture) -> None:
    """The remote side's memory is its own at once, though the kernel has references to it: what it writes there is
    read, and nothing is committed."""
    for number in range(len(fixture.rules)):
        fixture.remote.deregister(number)
        fixture.remote.paint(PAINT, region=number)
    fixture.resume()
    for number, (phase, party) in enumerate(fixture.near.items()):
        got = party.outcome(phase)
        assert got in ("grant_revoked", "refused"), f"{phase}: {got}: {party.why(phase)}"
        assert fixture.remote.is_painted(PAINT, region=number), phase
        assert party.wait_idle() == ""
        if fixture.op == "READ" and (fixture.lane, phase) == ("stream", "first"):
            assert party.is_painted(PAINT, READ_LATER, region=0), "they were copied"
    assert fixture.remote.wait_idle() == ""


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.nightly)])
def test_a_writer_that_is_gone(fault: str) -> None:
    """The receiver drops a dead or hanging zero-copy sender in bounded time, and gets its memory back."""
    at_once(
        lambda lane: lose_a_writer(lane, fault, rules_of("WRITE"), size=SIZE, element=ELEMENT),
        {lane: lane for lane in ZERO_COPY_LANES},
    )
