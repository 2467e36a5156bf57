"""The directory among several coordinators: what is told by others, orphans, views that may be old."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import RefusedError
from kvxfer.protocol.directory import CloseStream, Directory, IncarnationEnded, MemberEvent
from kvxfer.types import AgentRef, Incarnation, Load, Member
from tests.support.directory import DEAD_NS, LIMITS, MS, NONCES, hello


def member(number: int = 7, nonce: bytes = NONCES[0], **more: object) -> Member:
    said = hello("a", nonce, number)
    return dataclasses.replace(
        Member(AgentRef("a", Incarnation(number, nonce)), said.info, said.address, said.pools, Load()), **more
    )


@pytest.fixture
def directory() -> Directory:
    return Directory(LIMITS, 0, epoch=bytes(16))


def live(directory: Directory, *, sessions: int, now_ns: int = 0, number: int = 7) -> int:
    said = dataclasses.replace(hello("a", NONCES[0], number), sessions=sessions)
    return directory.register(said, fresh_number=None, now_ns=now_ns).stream


def only(directory: Directory) -> Member:
    (found,) = directory.change_since(None).members
    return found


def quiet(directory: Directory, from_ns: int, to_ns: int) -> list[object]:
    return [effect for now_ns in range(from_ns, to_ns, 250 * MS) for effect in directory.tick(now_ns)]


def test_another_coordinators_member_is_listed_and_not_judged(directory: Directory) -> None:
    assert directory.told(member(), 1, is_judged=True, now_ns=0) == ()
    assert quiet(directory, 0, 10 * DEAD_NS) == []
    assert not only(directory).is_suspect
    directory.told(member(is_suspect=True), 1, is_judged=True, now_ns=0)
    assert only(directory).is_suspect


def test_an_agent_that_comes_here_keeps_its_pair_and_what_is_older_is_dropped(directory: Directory) -> None:
    directory.told(member(), 1, is_judged=True, now_ns=0)
    live(directory, sessions=2)
    assert directory.told(member(is_suspect=True), 1, is_judged=True, now_ns=0) == ()
    assert directory.ended("a", now_ns=0) == ()
    assert not only(directory).is_suspect


def test_an_agent_that_went_elsewhere_is_let_go_and_not_ended(directory: Directory) -> None:
    stream = live(directory, sessions=1)
    (effect,) = directory.told(member(), 2, is_judged=True, now_ns=0)
    assert isinstance(effect, CloseStream)
    assert effect.stream == stream
    assert directory.stream_ended(stream, now_ns=0) == ()
    assert quiet(directory, 0, 10 * DEAD_NS) == []
    with pytest.raises(RefusedError, match="another session since"):
        live(directory, sessions=1)


def test_a_dead_coordinators_member_has_grace_and_then_ends(directory: Directory) -> None:
    directory.told(member(), 1, is_judged=True, now_ns=0)
    directory.orphan("a", now_ns=0)
    assert not only(directory).is_suspect
    assert quiet(directory, 0, LIMITS.dead_after_ns - 250 * MS) == []
    assert only(directory).is_suspect
    (effect,) = quiet(directory, LIMITS.dead_after_ns - 250 * MS, DEAD_NS * 3)
    assert effect == IncarnationEnded(member().ref, MemberEvent.LOST)


def test_an_orphan_is_not_ended_by_hearing_of_it_again_and_again(directory: Directory) -> None:
    for now_ns in range(0, LIMITS.dead_after_ns - 250 * MS, 250 * MS):
        directory.told(member(), 1, is_judged=False, now_ns=now_ns)
        assert directory.tick(now_ns) == ()
    live(directory, sessions=2, now_ns=LIMITS.dead_after_ns - 250 * MS)
    assert not only(directory).is_suspect


def test_a_coordinator_that_seemed_dead_has_its_member_back(directory: Directory) -> None:
    directory.told(member(), 1, is_judged=False, now_ns=0)
    quiet(directory, 0, LIMITS.dead_after_ns - 250 * MS)
    assert only(directory).is_suspect
    directory.told(member(), 1, is_judged=True, now_ns=0)
    assert not only(directory).is_suspect
    assert quiet(directory, DEAD_NS, 10 * DEAD_NS) == []


def test_a_higher_number_wins_wherever_it_comes_from(directory: Directory) -> None:
    stream = live(directory, sessions=9, number=7)
    ended, close = directory.told(member(8, NONCES[1]), 1, is_judged=True, now_ns=0)
    assert ended == IncarnationEnded(member().ref, MemberEvent.OUTRANKED)
    assert isinstance(close, CloseStream)
    assert close.stream == stream
    assert directory.told(member(), 10, is_judged=True, now_ns=0) == ()
    assert only(directory).ref == member(8, NONCES[1]).ref


def test_a_fresh_process_replaces_only_a_suspect_elsewhere(directory: Directory) -> None:
    directory.told(member(), 1, is_judged=True, now_ns=0)
    with pytest.raises(RefusedError, match="in use"):
        directory.register(hello("a", NONCES[1]), fresh_number=8, now_ns=0)
    directory.told(member(is_suspect=True), 1, is_judged=True, now_ns=0)
    assert directory.register(hello("a", NONCES[1]), fresh_number=8, now_ns=0).ref.incarnation.number == 8


def test_while_the_view_may_be_old_nobody_ends_for_silence(directory: Directory) -> None:
    stream = live(directory, sessions=1)
    quiet(directory, 0, DEAD_NS // 2)
    directory.set_current(False, now_ns=DEAD_NS // 2)
    directory.stream_ended(stream, now_ns=DEAD_NS // 2)
    assert quiet(directory, DEAD_NS // 2, 5 * DEAD_NS) == []
    assert only(directory).is_suspect
    assert not directory.change_since(None).is_settled
    directory.set_current(True, now_ns=5 * DEAD_NS)
    assert directory.is_settled
    assert quiet(directory, 5 * DEAD_NS, 5 * DEAD_NS + LIMITS.dead_after_ns - 250 * MS) == []
    assert quiet(directory, 6 * DEAD_NS, 8 * DEAD_NS) == [IncarnationEnded(member().ref, MemberEvent.LOST)]


def test_a_drain_ordered_at_another_coordinator_reaches_the_agent(directory: Directory) -> None:
    live(directory, sessions=1)
    (order,) = directory.told(member(is_draining=True), 1, is_judged=True, now_ns=0)
    assert order.reason == "ordered through another coordinator"
    assert only(directory).is_draining


@given(st.lists(st.tuples(st.sampled_from(["session", "tell", "cut"]), st.integers(0, 2), st.integers(0, 99))))
@settings(deadline=None)
def test_records_in_any_order_end_no_agent_and_all_agree_at_last(steps: list[tuple[str, int, int]]) -> None:
    """One agent goes from coordinator to coordinator, and each hears of the others' records late, twice or in another
    order."""
    coordinators = [Directory(LIMITS, 0, epoch=bytes([number]) * 16) for number in range(3)]
    written: list[tuple[Member, int]] = []
    streams: list[tuple[int, int]] = []
    effects: list[object] = []
    for kind, at, which in [*steps, ("session", 0, 0)]:
        directory = coordinators[at]
        if kind == "session":
            streams.append((at, live(directory, sessions=len(streams) + 1)))
        elif kind == "cut" and streams:
            place, stream = streams[which % len(streams)]
            effects += coordinators[place].stream_ended(stream, now_ns=0)
        elif kind == "tell" and written:
            effects += directory.told(*written[which % len(written)], is_judged=bool(which % 3), now_ns=0)
        known = directory.known("a")
        if known is not None and known[2]:
            written.append((known[0], known[1]))
    for directory in coordinators:
        for record in written:
            effects += directory.told(*record, is_judged=True, now_ns=0)
    assert not [effect for effect in effects if isinstance(effect, IncarnationEnded)]
    assert [only(directory).is_suspect for directory in coordinators] == [False] * 3
    assert [directory.known("a") for directory in coordinators[1:]] == [
        (only(coordinators[0]), len(streams), False)
    ] * 2
    assert quiet(coordinators[1], 0, 10 * DEAD_NS) == []
