"""The directory, one rule at a time; all of them together are in test_directory_model.py."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from kvxfer.errors import InvalidArgumentError, OverloadedError, ProtocolError, RefusedError
from kvxfer.protocol import directory as module
from kvxfer.protocol.directory import (
    TABLE,
    CloseStream,
    Directory,
    IncarnationEnded,
    MemberEvent,
    MemberState,
    OrderDrain,
)
from kvxfer.protocol.mirror import Mirror
from kvxfer.types import Load
from tests.support.directory import DEAD_NS, LIMITS, MS, NONCES, hello


def new_directory(now_ns: int = 0, **more: Any) -> Directory:
    return Directory(LIMITS, now_ns, epoch=bytes(16), **more)


def pass_time(directory: Directory, start_ns: int, duration_ns: int) -> tuple[int, list[module.Effect]]:
    effects: list[module.Effect] = []
    for now_ns in range(start_ns + 250 * MS, start_ns + duration_ns + 1, 250 * MS):
        effects += directory.tick(now_ns)
    return start_ns + duration_ns, effects


@pytest.fixture
def directory() -> Directory:
    return new_directory()


def test_registration_gives_a_number_and_a_stream(directory: Directory) -> None:
    registration = directory.register(hello(), fresh_number=7, now_ns=0)
    assert (registration.ref.agent_id, registration.ref.incarnation.number) == ("a", 7)
    assert registration.effects == ()
    change = directory.change_since(None)
    assert change.is_whole
    assert [member.ref for member in change.members] == [registration.ref]
    assert directory.statistics().members == {
        "live": 1,
        "suspect": 0,
        "adrift": 0,
        "elsewhere": 0,
        "orphan": 0,
        "draining": 0,
    }
    assert repr(directory) == f"<Directory revision 1: {directory.statistics().members}>"


def test_a_lost_answer_gives_the_same_number_again(directory: Directory) -> None:
    first = directory.register(hello(), fresh_number=7, now_ns=0)
    again = directory.register(hello(), fresh_number=8, now_ns=0)
    assert again.ref == first.ref
    assert again.effects == (CloseStream(first.stream, "a newer stream speaks for this agent"),)
    assert directory.stream_ended(first.stream, now_ns=0) == ()
    assert not directory.change_since(None).members[0].is_suspect
    with pytest.raises(RefusedError, match="no member any more"):
        directory.heartbeat(first.stream, Load(), is_draining=False, now_ns=0)
    with pytest.raises(RefusedError, match="was given the number 7, not 8"):
        directory.register(hello(number=8), fresh_number=None, now_ns=0)


def test_second_process_with_a_live_id_is_refused(directory: Directory) -> None:
    first = directory.register(hello(), fresh_number=1, now_ns=0)
    with pytest.raises(RefusedError, match=r"'a' is in use by the live agent a#1\.01010101 at 127\.0\.0\.1:1"):
        directory.register(hello(nonce=NONCES[1]), fresh_number=2, now_ns=0)
    directory.stream_ended(first.stream, now_ns=0)
    second = directory.register(hello(nonce=NONCES[1]), fresh_number=3, now_ns=0)
    assert second.effects == (IncarnationEnded(first.ref, MemberEvent.REPLACED),)
    change = directory.change_since(1)
    assert change.gone == (first.ref,)
    assert [member.ref for member in change.members] == [second.ref]


def test_silent_incarnation_is_replaced_and_its_stream_closed(directory: Directory) -> None:
    first = directory.register(hello(), fresh_number=1, now_ns=0)
    now_ns, _ = pass_time(directory, 0, 1500 * MS)
    assert directory.change_since(None).members[0].is_suspect
    second = directory.register(hello(nonce=NONCES[1]), fresh_number=3, now_ns=now_ns)
    assert IncarnationEnded(first.ref, MemberEvent.REPLACED) in second.effects
    assert any(isinstance(effect, CloseStream) and effect.stream == first.stream for effect in second.effects)


def test_higher_number_wins_over_a_live_incarnation(directory: Directory) -> None:
    older = directory.register(hello(number=5), fresh_number=None, now_ns=0)
    newer = directory.register(hello(nonce=NONCES[1], number=6), fresh_number=None, now_ns=0)
    assert IncarnationEnded(older.ref, MemberEvent.OUTRANKED) in newer.effects
    with pytest.raises(RefusedError, match="belongs to the newer incarnation"):
        directory.register(hello(number=5), fresh_number=None, now_ns=0)


def test_numbers_never_go_back(directory: Directory) -> None:
    first = directory.register(hello(number=50), fresh_number=None, now_ns=0)
    directory.stream_ended(first.stream, now_ns=0)
    with pytest.raises(RefusedError, match="newer incarnation"):
        directory.register(hello(nonce=NONCES[1]), fresh_number=9, now_ns=0)
    assert [member.ref for member in directory.change_since(None).members] == [first.ref]
    with pytest.raises(InvalidArgumentError):
        directory.register(hello("b"), fresh_number=None, now_ns=0)


def test_silence_makes_suspect_then_gone_and_the_stream_closes(directory: Directory) -> None:
    registration = directory.register(hello(), fresh_number=1, now_ns=0)
    now_ns, effects = pass_time(directory, 0, 2750 * MS)
    assert effects == []
    _, effects = pass_time(directory, now_ns, 250 * MS)
    assert effects[0] == IncarnationEnded(registration.ref, MemberEvent.LOST)
    assert isinstance(effects[1], CloseStream)
    assert directory.change_since(None).members == ()


def test_coordinator_that_slept_declares_no_member_gone(directory: Directory) -> None:
    directory.register(hello(), fresh_number=1, now_ns=0)
    now_ns, _ = pass_time(directory, 0, 1000 * MS)
    assert directory.tick(now_ns + 60_000 * MS) == ()
    assert len(directory.change_since(None).members) == 1


def test_a_coordinator_settles_after_dead_after_and_says_so(directory: Directory) -> None:
    now_ns, _ = pass_time(directory, 0, 2750 * MS)
    revision = directory.revision
    assert not directory.change_since(None).is_settled
    pass_time(directory, now_ns, 250 * MS)
    assert directory.is_settled
    assert directory.revision == revision + 1 == directory.shape_revision


def test_drain_is_ordered_once_known_and_stays(directory: Directory) -> None:
    registration = directory.register(hello(), fresh_number=1, now_ns=0)
    assert directory.drain("a", "upgrade", now_ns=0) == (OrderDrain(registration.stream, "upgrade"),)
    directory.heartbeat(registration.stream, Load(), is_draining=False, now_ns=0)
    assert directory.change_since(None).members[0].is_draining
    directory.stream_ended(registration.stream, now_ns=0)
    assert directory.drain("a", "upgrade", now_ns=0) == ()
    assert directory.register(hello(number=1), fresh_number=None, now_ns=0).is_return
    assert directory.change_since(None).members[0].is_draining
    with pytest.raises(RefusedError, match="no member 'z'"):
        directory.drain("z", "", now_ns=0)


def test_only_watchers_hear_of_loads(directory: Directory) -> None:
    registration = directory.register(hello(), fresh_number=1, now_ns=0)
    revision, shape = directory.revision, directory.shape_revision
    directory.heartbeat(registration.stream, Load(queued_requests=3), is_draining=False, now_ns=0)
    assert directory.shape_revision == shape
    assert directory.change_since(revision).members == ()
    assert directory.change_since(revision, with_load=True).members[0].load.queued_requests == 3
    revision = directory.revision
    directory.heartbeat(registration.stream, Load(queued_requests=3), is_draining=False, now_ns=0)
    assert directory.revision == revision


def test_members_are_bounded_and_a_seat_is_free_again() -> None:
    directory = new_directory(members_max=1)
    registration = directory.register(hello("a"), fresh_number=1, now_ns=0)
    with pytest.raises(OverloadedError, match="members_max=1"):
        directory.register(hello("b"), fresh_number=2, now_ns=0)
    assert directory.deregister(registration.stream, now_ns=0)[0] == IncarnationEnded(
        registration.ref, MemberEvent.LEFT
    )
    directory.register(hello("b"), fresh_number=2, now_ns=0)


def test_a_receiver_too_far_behind_gets_everything() -> None:
    directory = new_directory(gone_max=2)
    revisions = []
    for number in range(1, 5):
        registration = directory.register(hello("a", NONCES[0], number), fresh_number=None, now_ns=0)
        revisions.append(directory.revision)
        directory.deregister(registration.stream, now_ns=0)
    assert directory.change_since(revisions[0]).is_whole
    late = directory.change_since(revisions[-1])
    assert not late.is_whole
    assert [ref.incarnation.number for ref in late.gone] == [4]


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("event", MemberEvent)
def test_the_table_is_total(state: MemberState, event: MemberEvent) -> None:
    if event in TABLE[state]:
        assert module.next_state(state, event) in MemberState
    else:
        with pytest.raises(ProtocolError, match=f"{state.value} incarnation .* {event.value!r}"):
            module.next_state(state, event)


def diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> live: register"]
    for state, row in TABLE.items():
        for after in MemberState:
            events = [event.value for event, target in row.items() if target is after]
            if events:
                lines.append(f"    {state.value} --> {after.value}: {', '.join(events)}")
    return "\n".join([*lines, "    gone --> [*]"])


@pytest.mark.checkout
def test_the_diagram_in_the_docs_is_made_from_the_table(root: pathlib.Path) -> None:
    assert diagram() in (root / "docs" / "control-plane.md").read_text()


def test_a_mirror_holds_the_missing_until_the_new_coordinator_settles() -> None:
    mirror = Mirror()
    before = new_directory()
    kept = before.register(hello("a"), fresh_number=1, now_ns=0)
    lost = before.register(hello("b"), fresh_number=2, now_ns=0)
    assert mirror.apply(before.change_since(None)) is not None
    after = Directory(LIMITS, 0, epoch=bytes([1]) * 16, first_revision=before.revision)
    view = mirror.apply(after.change_since(None))
    assert view is not None
    assert [member.ref for member in view.members] == [kept.ref, lost.ref]
    assert view.gone == ()
    back = after.register(hello("a", number=1), fresh_number=None, now_ns=0)
    assert back.ref == kept.ref
    revision = after.revision
    for change in (after.change_since(before.revision), after.change_since(None)):
        view = mirror.apply(change)
        assert view is not None
        assert view.gone == (), "a reconnect to the same unsettled coordinator says nothing new of the missing"
        assert len(view.members) == 2
    for now_ns in range(0, DEAD_NS + 1, 250 * MS):
        after.heartbeat(back.stream, Load(), is_draining=False, now_ns=now_ns)
        after.tick(now_ns)
    view = mirror.apply(after.change_since(revision))
    assert view is not None
    assert (view.gone, [member.ref for member in view.members]) == ((lost.ref,), [kept.ref])


def test_a_mirror_refuses_what_cannot_follow() -> None:
    directory = new_directory(first_revision=5)
    with pytest.raises(ProtocolError, match="no whole one"):
        Mirror().apply(dataclasses.replace(directory.change_since(5), epoch=bytes([9]) * 16))
    mirror = Mirror()
    mirror.apply(directory.change_since(None))
    assert mirror.apply(directory.change_since(5)) is None
    with pytest.raises(ProtocolError, match="went back"):
        mirror.apply(dataclasses.replace(directory.change_since(5), revision=4))
    directory.register(hello("a"), fresh_number=1, now_ns=0)
    directory.register(hello("b"), fresh_number=2, now_ns=0)
    with pytest.raises(ProtocolError, match="members_max=1"):
        Mirror(members_max=1).apply(directory.change_since(None))
