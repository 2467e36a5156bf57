"""Writing registered memory: a push is a pull by the one it is for, under a live offer, told once committed."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, TransferState
from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
ZEROS, DATA = bytes(256), bytes(range(256))
FROM, TO = [(7, 0, 16, 16, 8)], [(9, 64, 16, 16, 8)]


def ready_pair(limits: Any = None, **options: Any) -> RegionPair:
    """``a`` holds the bytes, in region 7; ``b`` offers region 9."""
    pair = RegionPair(limits)
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, ZEROS, **options)
    return pair


def told(pair: RegionPair) -> list[tuple[str, bytes | None]]:
    """What ``b``'s owner was told, in order."""
    out: list[tuple[str, bytes | None]] = []
    for effect in pair.told["b"]:
        if isinstance(effect, _core.NotifReceived):
            out.append((f"notified {effect.seq}", effect.payload))
        elif isinstance(effect, _core.OfferEnded):
            out.append((f"{effect.state.name} {effect.code.name} {effect.bytes}", None))
        elif isinstance(effect, (_core.TransferFinal, _core.TransferProgress, _core.TransferDrained)):
            out.append((type(effect).__name__, None))
    return out


def answer_to(pair: RegionPair, push: Any) -> Any:
    """The code of what ``b`` answers at once to a PUSH of its peer."""
    session = next(session for name, session in pair.peer_session if name == "b")
    (answer,) = pair.ends["b"].on_frame(session, push, pair.now)
    return answer.frame.code


def drop(kind: type, times: int = 1) -> Any:
    left = times

    def fate(frame: Any) -> int:
        nonlocal left
        if isinstance(frame, kind) and left:
            left -= 1
            return 0
        return 1

    return fate


@pytest.fixture
def pair() -> RegionPair:
    return ready_pair()


@pytest.mark.parametrize("lane", [Lane.MEMORY, Lane.STREAM, Lane.UNIX, Lane.CMA, Lane.UCX])
@pytest.mark.parametrize("wants_checksums", [False, True])
def test_commits(pair: RegionPair, lane: Any, wants_checksums: bool) -> None:
    pair.post(
        "a",
        "push",
        ID,
        FROM,
        TO,
        lanes=[lane],
        local_ids=[3, 1],
        remote_ids=[0, 7],
        notification=b"n",
        wants_checksums=wants_checksums,
    )
    assert pair.ends["a"].transfer_state(ID) == TransferState.CONNECTING
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state, final.lane, final.blocks_done, final.attempts) == (TransferState.COMMITTED, lane, 2, 1)
    assert len(pair.take("a", _core.TransferDrained)) == 1
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 32", None)]
    assert pair.memory["b"][9][64:80] == DATA[48:64]
    assert pair.memory["b"][9][176:192] == DATA[16:32]
    assert sum(pair.memory["b"][9]) == sum(DATA[48:64]) + sum(DATA[16:32])
    assert pair.ends["a"].transfer_state(ID) == TransferState.COMMITTED
    assert pair.ends["b"].transfer_state(ID) is None
    for name in "ab":
        counts = pair.ends[name].counts()
        assert [(r.grants, r.transfers) for r in counts.regions] == [(0, 0)]
        assert counts.grants.alive == counts.transfers_live == 0
    assert pair.take("a", _core.GrantEnded) == []


def test_an_empty_notification_is_one(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO, notification=b"")
    pair.run()
    assert told(pair) == [("notified 0", b""), ("COMMITTED ok 128", None)]


@pytest.mark.parametrize("what", ["removed", "never", "read only", "past the end"])
def test_no_offer_no_byte(what: str) -> None:
    pair = ready_pair(can_write=what != "read only")
    if what == "removed":
        assert pair.remove_region("b", 9)
    to = {"never": [(8, 0, 16, 16, 8)], "past the end": [(9, 129, 16, 16, 8)]}.get(what, TO)
    pair.post("a", "push", ID, FROM, to, notification=b"n")
    pair.run()
    assert pair.finals("a") == [("FAILED", "refused")]
    assert told(pair) == []
    assert pair.memory["b"][9] == ZEROS
    assert pair.ends["b"].counts().grants.refused == 1


def test_a_push_that_comes_again_is_taken_once(pair: RegionPair) -> None:
    """While it is live, and when its answer was lost: DONE again, and neither bytes nor notification twice."""
    pushes: list[Any] = []

    def twice(frame: Any) -> int:
        if isinstance(frame, _core.Push):
            pushes.append(frame)
            return 2
        return not (isinstance(frame, _core.Done) and len(pushes) == 1)

    pair.post("a", "push", ID, FROM, TO, notification=b"n")
    pair.pump(twice)
    while pair.perform("b"):
        pair.pump(twice)
    assert pair.finals("a") == []
    pair.advance(3 * S, twice)
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert len(pushes) == 2
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 128", None)]
    session = next(session for name, session in pair.peer_session if name == "b")
    (again,) = pair.ends["b"].on_frame(session, pushes[0], pair.now)
    assert (type(again.frame), again.frame.code) == (_core.Done, Code.ok)


def test_a_lost_push_is_asked_again(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO)
    pair.pump(drop(_core.Push))
    pair.advance(2 * S)
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state, final.attempts) == (TransferState.COMMITTED, 2)


def test_another_peers_id_is_refused(pair: RegionPair) -> None:
    """A push under an id that this agent uses itself, for something else."""
    pair.post("b", "fetch", ID, [(9, 0, 16, 16, 1)], [(7, 0, 16, 16, 1)], lanes=[Lane.STREAM])
    pair.pump(drop(_core.Fetch))
    session = next(session for name, session in pair.peer_session if name == "b")
    push = _core.Push(ID, Lane.MEMORY, _core.WireList(FROM), _core.WireList(TO))
    (answer,) = pair.ends["b"].on_frame(session, push, pair.now)
    assert answer.frame.code == Code.refused
    pair.advance(2 * S)
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    (answer,) = pair.ends["b"].on_frame(session, push, pair.now)
    assert answer.frame.code == Code.refused


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ([(7, 0, 16, 16, 8)], [(9, 0, 16, 16, 7)]),
        ([(7, 0, 16, 16, 8)], [(9, 0, 16, 8, 8)]),
        ([], []),
        ([(7, 0, 16, 16, 2**32 - 1)] * 2, [(9, 0, 16, 16, 2**32 - 1)] * 2),
    ],
    ids=["count", "length", "nothing", "too many"],
)
def test_a_push_that_makes_no_sense_is_refused(pair: RegionPair, source: Any, to: Any) -> None:
    pair.post("a", "push", ID, FROM, TO)
    pair.run()
    push = _core.Push(b"p" * 16, Lane.MEMORY, _core.WireList(source), _core.WireList(to))
    assert answer_to(pair, push) == Code.refused


def test_a_lane_that_this_session_cannot_have_is_refused(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO)
    pair.run()
    push = _core.Push(b"p" * 16, Lane.STREAM, _core.WireList(FROM), _core.WireList(TO))
    assert answer_to(pair, push) == Code.refused


@pytest.mark.parametrize("where", ["here", "there"])
def test_no_lane_is_the_next_lane_under_the_same_id(pair: RegionPair, where: str) -> None:
    """What the source cannot have mapped it knows itself; what the destination cannot read it says by DONE."""
    pair.unmappable.add(Lane.UCX)
    pushes: list[Any] = []
    pair.post(
        "a", "push", ID, FROM, TO, lanes=[Lane.MAPPED if where == "here" else Lane.UCX, Lane.STREAM], notification=b"n"
    )
    for _ in range(20):
        pair.pump(lambda frame: pushes.append(frame) or 1 if isinstance(frame, _core.Push) else 1)
        pair.perform("a")
        pair.perform("b")
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.id, final.state, final.lane) == (ID, TransferState.COMMITTED, Lane.STREAM)
    said = [(frame.id, frame.turn, frame.is_last) for frame in pushes]
    assert said == ([(ID, 1, True)] if where == "here" else [(ID, 0, False), (ID, 1, True)])
    assert ("cannot be mapped" if where == "here" else "no map") in final.lane_notes
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 128", None)]
    assert pair.ends["a"].counts().grants.alive == 0


def test_no_lane_at_all(pair: RegionPair) -> None:
    pair.unmappable |= {Lane.UCX, Lane.CMA}
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.MAPPED, Lane.CMA, Lane.UCX], notification=b"n")
    pair.run()
    assert pair.finals("a") == [("FAILED", "no_lane")]
    assert ("notified 0", b"n") not in told(pair)


def test_removing_the_offer_drains_first(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO, notification=b"n")
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    end = pair.ends["b"]
    assert not pair.remove_region("b", 9)
    assert not end.is_landing(read.id, read.token)
    assert told(pair) == []  # not ended while it may land
    pair.pump()
    pair.post("a", "push", b"u" * 16, FROM, TO)  # nothing new comes in
    pair.run()
    assert pair.finals("a") == [("FAILED", "refused")]
    assert not pair.remove_region("b", 9)
    pair.do("b", end.read_stopped(read.id, read.token, Code.cancelled, "", pair.now))
    assert told(pair) == [("FAILED grant_revoked 0", None)]
    assert pair.remove_region("b", 9)
    pair.run()
    assert pair.finals("a") == [("FAILED", "grant_revoked")]


@pytest.mark.parametrize("how", ["cancel", "remove", "deadline"])
def test_whatever_ends_a_push_ends_its_grant_first(pair: RegionPair, how: str) -> None:
    """So the destination, which has read everything by then, is told no."""
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.CMA], notification=b"n", deadline_s=1)
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    a, b = pair.ends["a"], pair.ends["b"]
    if how == "cancel":
        pair.do("a", a.cancel(ID, pair.now))
    elif how == "remove":
        assert pair.remove_region("a", 7)
    else:
        pair.now += S
        pair.do("a", a.tick(pair.now))
    state, code = {
        "cancel": ("CANCELLED", "cancelled"),
        "remove": ("FAILED", "grant_revoked"),
        "deadline": ("FAILED", "deadline"),
    }[how]
    assert pair.finals("a") == [(state, code)]
    assert len(pair.take("a", _core.TransferDrained)) == 1
    pair.wire.clear()  # the notice that the grant ended is lost: safety does not depend on it
    if b.is_landing(read.id, read.token):
        pair.fill("b", read.to, b"".join(pair.bytes_of("a", read.source)) if how != "remove" else bytes(128))
    pair.do("b", b.read_landed(read.id, read.token, pair.now))
    pair.run()
    ends = told(pair)
    assert len(ends) == 1
    assert ends[0][0].split()[0] == "FAILED"


def test_done_without_a_verdict_ok_is_not_believed(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO)
    pair.pump(drop(_core.Push))
    session = next(session for name, session in pair.peer_session if name == "a")
    pair.do("a", pair.ends["a"].on_frame(session, _core.Done(ID, Code.ok, b""), pair.now))
    assert pair.finals("a") == [("FAILED", "protocol")]


def test_a_cut_is_resumed_with_what_is_missing() -> None:
    pair = ready_pair(endpoint_limits(data_bytes_max=32))
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.STREAM], notification=b"n")
    pair.pump()
    pair.perform("a")
    pair.cut_all()
    pair.run()
    pair.advance(200 * MS)
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 128", None)]
    assert pair.memory["b"][9][64:192] == DATA[:128]


def test_another_lane_is_no_second_push(pair: RegionPair) -> None:
    """Flaw: the destination had committed, its answer was lost with the session, and the socket of that lane did not
    take another one. The next lane went by another id: the bytes came twice, and the notification.
    """
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.CMA, Lane.STREAM], notification=b"n")
    pair.pump()
    pair.perform("b")
    pair.pump(drop(_core.Done))
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 128", None)]
    pair.reachable = False
    pair.cut_all()
    pair.advance(500 * MS)
    assert pair.finals("a") == []
    pair.reachable = True
    pair.advance(2 * S)
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert told(pair) == [("notified 0", b"n"), ("COMMITTED ok 128", None)]


def test_a_destination_that_goes_silent_is_given_up(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.STREAM])
    pair.pump()
    pair.reachable = False
    pair.cut_all()
    pair.advance(10 * S)
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert told(pair) == [("FAILED peer_gone 0", None)]


def test_the_death_of_the_initiator_ends_what_it_offered(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.STREAM], notification=b"n")
    pair.pump()
    pair.do("b", pair.ends["b"].peer_dead(pair.refs["a"], pair.now))
    assert told(pair) == [("FAILED peer_gone 0", None)]


def test_the_death_of_the_destination_ends_a_push(pair: RegionPair) -> None:
    pair.post("a", "push", ID, FROM, TO, lanes=[Lane.STREAM])
    pair.pump()
    pair.do("a", pair.ends["a"].peer_dead(pair.refs["b"], pair.now))
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert pair.ends["a"].counts().grants.alive == 0
    assert pair.remove_region("a", 7)


def test_a_push_of_one_peer_leaves_room_for_others() -> None:
    pair = ready_pair(endpoint_limits(transfers_max=40))
    for n in range(20):
        pair.post("a", "push", bytes([n * 8]) * 16, FROM, TO)
    pair.pump()
    assert pair.ends["b"].counts().transfers_live == 16
    assert [code for _, code in pair.finals("a")] == ["overloaded"] * 4
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")] * 16


def test_post_with_invalid_arguments_is_refused(pair: RegionPair) -> None:
    with pytest.raises(InvalidArgumentError, match="notification"):
        pair.post("a", "push", ID, FROM, TO, notification=bytes(65537))
    with pytest.raises(InvalidArgumentError, match="deadline"):
        pair.post("a", "push", ID, FROM, TO, deadline_s=0)
    with pytest.raises(InvalidArgumentError, match="not registered"):
        pair.post("a", "push", ID, [(6, 0, 16, 16, 8)], TO)
    pair.post("a", "push", ID, FROM, TO)
    with pytest.raises(InvalidArgumentError, match="used before"):
        pair.post("a", "push", ID, FROM, TO)
    pair.run()
    with pytest.raises(InvalidArgumentError, match="used before"):
        pair.post("a", "push", ID, FROM, TO)


@pytest.mark.parametrize("lane", [Lane.MAPPED, Lane.CMA, Lane.UCX])
def test_memory_that_readers_may_not_have_is_not_laid_open_by_a_push(lane: Any) -> None:
    """Flaw: a one-sided lane gave the destination the whole region, and only elements of it were pushed."""
    pair = RegionPair()
    pair.add_region("a", 7, DATA, can_read=False, is_shareable=True)
    pair.add_region("b", 9, ZEROS)
    pair.post("a", "push", ID, FROM, TO, lanes=[lane, Lane.STREAM])
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state, final.lane) == (TransferState.COMMITTED, Lane.STREAM)
    assert "not offered to readers" in final.lane_notes
    assert pair.mapped == set()


def short_lived() -> RegionPair:
    return ready_pair(endpoint_limits(lifetime_max_ns=5 * S))


def test_an_offer_without_a_deadline_ends() -> None:
    pair = short_lived()
    pair.post("a", "push", b"0" * 16, FROM, TO, lanes=[Lane.STREAM])
    pair.run()
    assert told(pair) == [("COMMITTED ok 128", None)]
    pair.told["b"].clear()
    session = next(session for name, session in pair.peer_session if name == "b")
    push = _core.Push(ID, Lane.STREAM, _core.WireList(FROM), _core.WireList(TO))
    pair.ends["b"].on_frame(session, push, pair.now)
    pair.advance(4 * S, drop(_core.Pull, 1000))
    assert told(pair) == []
    pair.advance(2 * S, drop(_core.Pull, 1000))
    assert told(pair) == [("FAILED deadline 0", None)]


def test_a_push_ends_with_the_lifetime_of_its_grant() -> None:
    """Flaw: a destination that only answers pings was asked for ever."""
    pair = short_lived()
    pair.post("a", "push", ID, FROM, TO)
    pair.advance(4 * S, drop(_core.Push, 1000))
    assert pair.finals("a") == []
    pair.advance(2 * S, drop(_core.Push, 1000))
    assert pair.finals("a") == [("FAILED", "grant_expired")]
    assert len(pair.take("a", _core.TransferDrained)) == 1
    assert pair.remove_region("a", 7)


def test_room_is_asked_before_the_lists_of_a_push_are_looked_at() -> None:
    pair = ready_pair(endpoint_limits(transfers_max=40))
    for n in range(16):
        pair.post("a", "push", bytes([n * 8]) * 16, FROM, TO)
    pair.pump()
    nonsense = _core.WireList([(8, 0, 16, 8, 2)])
    assert answer_to(pair, _core.Push(b"z" * 16, Lane.MEMORY, nonsense, nonsense)) == Code.overloaded


@pytest.mark.parametrize("lengths", [(16, 8, 8), (8, 16, 8), (8, 8, 16)])
def test_lists_that_go_whole_are_compared_element_by_element(pair: RegionPair, lengths: tuple[int, int, int]) -> None:
    pair.post("a", "push", b"0" * 16, FROM, TO)
    pair.run()
    session = next(session for name, session in pair.peer_session if name == "b")
    source = _core.WireList([(7, 0, 8, 8, 2), (7, 16, 16, 16, 1)])
    to = _core.WireList([(9, 32 * i, 0, length, 1) for i, length in enumerate(lengths)])
    effects = pair.ends["b"].on_frame(session, _core.Push(ID, Lane.MEMORY, source, to), pair.now)
    if lengths == (8, 8, 16):
        assert isinstance(effects[0].frame, _core.Pull)
    else:
        assert [e.frame.code for e in effects] == [Code.refused]
