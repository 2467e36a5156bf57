"""A lane lost in the middle: the next one is asked for what is missing, and for nothing that has landed. Of a write it
is the writer who says which comes next, by PUSH; the reader keeps what it has, and what is still under way."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, SessionKind
from kvxfer.testing.clock import MS, S
from kvxfer.testing.region_pair import RegionPair

ID = b"t" * 16
DATA, MARK = bytes(range(128)), b"\xee" * 32
POOL, SOURCE, TARGET = 2, 7, 9
BEFORE, COUNT, LANDED = 3, 8, 2
"""A pull is of the grant's last 8 positions; the first read brings two pieces of 16 bytes."""

ways = pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("stopped", Lane.MAPPED, Lane.CMA),
        ("stopped", Lane.CMA, Lane.STREAM),
        ("stopped", Lane.UCX, Lane.STREAM),
        ("answered", Lane.MAPPED, Lane.STREAM),
        ("answered", Lane.UNIX, Lane.UCX),
        ("answered", Lane.STREAM, Lane.UCX),
        ("unreachable", Lane.MAPPED, Lane.STREAM),
        ("unreachable", Lane.CMA, Lane.UCX),
        ("unreachable", Lane.UNIX, Lane.STREAM),
    ],
)
each_verb = pytest.mark.parametrize("verb", ["pull", "fetch", "push"])
each_read = pytest.mark.parametrize("verb", ["pull", "fetch"])


class LanePair(RegionPair):
    """Pools with bytes too, and lanes that go away. ``asked``: every PULL, and the one in every FETCH, in order."""

    def __init__(self) -> None:
        limits, transfers, grants = _core.EndpointLimits(), _core.TransferLimits(), _core.GrantLimits()
        transfers.read_bytes_max = grants.data_bytes_max = 16 * LANDED
        limits.transfers, limits.grants = transfers, grants
        super().__init__(limits)
        for name in "ab":
            self.ends[name].add_pool(_core.PoolInfo(POOL, 64, 16, b"d" * 32, True, True))
            self.memory[name][POOL] = bytearray(64 * 16)
        self.closed: set[Any] = set()
        """Kinds of sessions that nobody can dial."""
        self.refused: set[Any] = set()
        """Lanes that ``a`` answers with no_lane."""
        self.asked: list[Any] = []
        self.lost: set[type] = set()
        """Frames of these kinds do not arrive."""
        self.filled = 0
        """Bytes that landed at ``b``, those that landed twice counted twice."""

    def _dial(self, name: str, effect: Any) -> None:
        self.reachable = effect.kind not in self.closed
        super()._dial(name, effect)

    def bytes_of(self, name: str, extent: Any) -> list[bytes]:
        if extent.ranges is not None:
            return super().bytes_of(name, extent)
        return [bytes(self.memory[name][POOL][16 * b : 16 * b + 16]) for b in extent.blocks]

    def fill(self, name: str, extent: Any, data: bytes) -> None:
        self.filled += len(data)
        if extent.ranges is not None:
            return super().fill(name, extent, data)
        for i, block in enumerate(extent.blocks):
            self.memory[name][POOL][16 * block : 16 * block + 16] = data[16 * i : 16 * i + 16]
        return None

    def pump(self, fate: Any = None) -> None:
        super().pump(self.fate)

    def fate(self, frame: Any) -> int:
        pull = frame.pull if isinstance(frame, _core.Fetch) else frame
        if isinstance(pull, _core.Pull):
            self.asked.append(pull)
            if pull.lane in self.refused:
                answering = next(session for name, session in self.peer_session if name == "a")
                self.wire.append(("a", answering, _core.ErrorFrame(ID, pull.attempt, Code.no_lane, b"not served")))
                return 0
        return type(frame) not in self.lost

    def start(self, verb: str, lanes: list[Any]) -> None:
        self.poster = "a" if verb == "push" else "b"
        if verb == "pull":
            # Neither side's blocks are in the order of the positions.
            promised = [60, 61, 62, *range(20, 20 - COUNT, -1)]
            for i, block in enumerate(promised[BEFORE:]):
                self.memory["a"][POOL][16 * block : 16 * block + 16] = DATA[16 * i : 16 * i + 16]
            a, b = self.ends["a"], self.ends["b"]
            self.do("a", a.grant(ID, POOL, promised, "b", 60 * S, len(promised), self.now))
            self.do("a", a.ready(ID, len(promised), 0, True, self.now))
            into = list(range(40, 40 + COUNT))
            self.do("b", b.pull(ID, self.refs["a"], POOL, into, BEFORE, lanes, self.now + 60 * S, 7, self.now))
            self.into, self.at = self.memory["b"][POOL], 16 * 40
        else:
            self.add_region("a", SOURCE, DATA, is_shareable=True)
            self.add_region("b", TARGET, bytes(128), is_shareable=True)
            source, target = [(SOURCE, 0, 16, 16, COUNT)], [(TARGET, 0, 16, 16, COUNT)]
            own, peer = (source, target) if verb == "push" else (target, source)
            self.post(self.poster, verb, ID, own, peer, lanes=lanes)
            self.into, self.at = self.memory["b"][TARGET], 0

    def land_one(self) -> None:
        """Everything said arrives, and one read or one payload lands."""
        self.pump()
        assert self.perform("a") ^ self.perform("b")


def prefix_landed(verb: str, lanes: list[Any]) -> LanePair:
    """Two of the pieces are in place, and are marked: who asks for them again would write over the mark."""
    pair = LanePair()
    pair.start(verb, lanes)
    pair.land_one()
    assert bytes(pair.into[pair.at : pair.at + 48]) == DATA[:32] + bytes(16)
    pair.into[pair.at : pair.at + 32] = MARK
    return pair


def cut(pair: LanePair) -> list[Any]:
    """The session goes, and what it had not sent yet. Returns the reads that are under way still."""
    pair.take("a", _core.SendData)
    reads = pair.take("b", _core.ReadBlocks)
    pair.wire.clear()
    for session in [key for key in pair.peer_session if key[0] == "b"]:  # not those that are dialed meanwhile
        pair.cut(*session)
    return reads


def lose(pair: LanePair, how: str, lane: Any) -> None:
    """The lane goes, and nothing more of it lands."""
    if how == "stopped":
        pair.unmappable.add(lane)
        return
    if how == "answered":
        pair.refused.add(lane)
    else:
        pair.closed.add(SessionKind.UNIX)
    for read in cut(pair):
        pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, Code.transport, "cut", pair.now))


def asked(pair: LanePair, verb: str) -> list[tuple[Any, int, int]]:
    """(lane, first, count) of each question, from the first of our own pieces."""
    base = BEFORE if verb == "pull" else 0
    return [(pull.lane, pull.first - base, pull.count) for pull in pair.asked]


@ways
@each_verb
def test_only_what_is_missing_is_asked_for(verb: str, how: str, first: Any, second: Any) -> None:
    pair = prefix_landed(verb, [first, second])
    lose(pair, how, first)
    pair.lost.add(_core.Verdict)
    pair.advance(100 * MS)
    pair.run()
    again = [(first, LANDED, COUNT - LANDED)] if how == "answered" else []
    assert asked(pair, verb) == [(first, 0, COUNT), *again, (second, LANDED, COUNT - LANDED)]
    assert [pull.attempt for pull in pair.asked] == list(range(1, len(pair.asked) + 1))
    assert len({pull.nonce for pull in pair.asked}) == len(pair.asked)
    assert bytes(pair.into[pair.at : pair.at + 128]) == MARK + DATA[32:]
    assert pair.filled == len(DATA)

    # All of it is there, by two lanes, and it is worth nothing until the source has confirmed.
    assert pair.finals(pair.poster) == []
    if verb != "push":
        assert pair.ends["b"].transfer_state(ID) == _core.TransferState.CONFIRMING
    pair.lost.clear()
    pair.advance(2 * S)
    (final,) = pair.take(pair.poster, _core.TransferFinal)
    assert (final.state.name, final.lane, final.blocks_done) == ("COMMITTED", second, COUNT)
    assert final.lane_notes != ""
    assert verb == "push" or final.attempts == len(pair.asked)
    assert len(pair.take(pair.poster, _core.TransferDrained)) == 1
    assert [e.bytes for e in pair.take("b", _core.OfferEnded)] == ([len(DATA)] if verb == "push" else [])
    assert len(pair.asked) == 2 + len(again)
    assert pair.filled == len(DATA)
    for name in "ab":
        counts = pair.ends[name].counts()
        assert (counts.grants.alive, counts.transfers_live, counts.transfers_draining) == (0, 0, 0)


@pytest.mark.parametrize("first", [Lane.MAPPED, Lane.CMA])
@each_verb
def test_a_read_outlives_its_lane_and_counts(verb: str, first: Any) -> None:
    """Two reads into one block are never under way: the next lane waits for the last of the one before."""
    pair = prefix_landed(verb, [first, Lane.STREAM])
    pair.pump()
    pair.closed.add(SessionKind.UNIX)
    (read,) = cut(pair)
    pair.advance(10 * MS)
    pair.run()
    assert asked(pair, verb) == [(first, 0, COUNT)]
    pair.arrive("b", ID, read.token, read.to, pair.bytes_of("a", read.source), [])
    pair.run()
    assert asked(pair, verb)[1:] == [(Lane.STREAM, 2 * LANDED, COUNT - 2 * LANDED)]
    assert bytes(pair.into[pair.at : pair.at + 128]) == MARK + DATA[32:]
    assert (pair.finals(pair.poster), pair.filled) == ([("COMMITTED", "ok")], len(DATA))


@each_verb
def test_what_landed_whole_is_confirmed_by_the_next_lane(verb: str) -> None:
    pair = prefix_landed(verb, [Lane.CMA, Lane.STREAM])
    pair.lost.add(_core.Verdict)
    pair.run()
    pair.closed.add(SessionKind.UNIX)
    assert cut(pair) == []
    pair.lost.clear()
    pair.run()
    assert pair.finals(pair.poster) == [("COMMITTED", "ok")]
    assert asked(pair, verb) == [(Lane.CMA, 0, COUNT)]
    assert (bytes(pair.into[pair.at : pair.at + 128]), pair.filled) == (MARK + DATA[32:], len(DATA))


@each_read
def test_a_grant_that_ended_between_two_lanes_confirms_nothing(verb: str) -> None:
    """What landed by the first one is as good as its grant, and that is over."""
    pair = prefix_landed(verb, [Lane.CMA, Lane.STREAM])
    lose(pair, "stopped", Lane.CMA)
    pair.lost |= {_core.Revoke, _core.ErrorFrame}
    while pair.filled < len(DATA):
        pair.land_one()
    if verb == "pull":
        pair.do("a", pair.ends["a"].end_grant(ID, _core.GrantEvent.REVOKE, pair.now)[1])
    else:
        assert pair.remove_region("a", SOURCE)
    pair.wire.clear()  # the trailer of the second lane among it, whatever it said
    pair.advance(4 * S)
    assert pair.finals("b") == [("FAILED", "grant_revoked")]


def pushing(lanes: list[Any], **options: Any) -> LanePair:
    """``a`` has posted a write, and nothing has arrived yet."""
    pair = LanePair()
    pair.add_region("a", SOURCE, DATA, is_shareable=True)
    pair.add_region("b", TARGET, bytes(128), is_shareable=True)
    pieces = ([(SOURCE, 0, 16, 16, COUNT)], [(TARGET, 0, 16, 16, COUNT)])
    pair.post("a", "push", ID, *pieces, lanes=lanes, notification=b"n", **options)
    pair.poster, pair.into, pair.at = "a", pair.memory["b"][TARGET], 0
    return pair


def is_written_once(pair: LanePair) -> bool:
    """All of it arrived, was told once at both ends, and neither holds anything of it."""
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == [b"n"]
    assert [e.state.name for e in pair.take("b", _core.OfferEnded)] == ["COMMITTED"]
    counts = [pair.ends[name].counts() for name in "ab"]
    assert [(c.grants.alive, c.transfers_live, c.transfers_draining) for c in counts] == [(0, 0, 0)] * 2
    return bytes(pair.into) == DATA


@pytest.mark.parametrize("is_read_whole", [True, False], ids=["landed", "stopped"])
def test_a_write_waits_for_the_read_of_its_last_lane(is_read_whole: bool) -> None:
    """Its next PUSH comes while that one is under way. Nothing else is read before it is over, and it counts."""
    pair = pushing([Lane.CMA, Lane.STREAM])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    for _ in range(3):
        pair.advance(2 * S)
        pair.run()
    assert (pair.finals("a"), pair.filled) == ([], 0)
    assert pair.take("b", _core.NotifReceived) == []
    assert pair.ends["b"].is_landing(read.id, read.token)
    if is_read_whole:
        pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), [])
    else:
        pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, Code.transport, "cut", pair.now))
    pair.run()
    landed = LANDED if is_read_whole else 0
    assert asked(pair, "push") == [(Lane.CMA, 0, COUNT), (Lane.STREAM, landed, COUNT - landed)]
    assert is_written_once(pair)
    assert pair.filled == len(DATA)


def test_a_write_whose_last_read_lands_after_its_next_lane_was_named() -> None:
    """All of it is there then, by the old lane: only the word for it is asked for over the new one."""
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    for _ in range(2):
        pair.land_one()
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    session = next(session for name, session in pair.peer_session if name == "a")
    pair.do("a", pair.ends["a"].on_frame(session, _core.Done(ID, Code.no_lane, b"", 0), pair.now))
    pair.pump()
    assert pair.filled == len(DATA) - 32
    pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), [])
    pair.run()
    assert asked(pair, "push") == [(Lane.CMA, 0, COUNT)]
    assert (pair.finals("a"), pair.filled) == ([("COMMITTED", "ok")], len(DATA))


@pytest.mark.parametrize("is_over", [False, True], ids=["live", "ended"])
def test_an_earlier_lane_of_a_write_that_comes_late_is_nothing_new(is_over: bool) -> None:
    """The PUSH of the first lane lay in its socket while that of the second was served: ``b`` has not heard that the
    session of it went.
    """
    pair = pushing([Lane.CMA, Lane.STREAM])
    while not any(isinstance(frame, _core.Push) for _, _, frame in pair.wire):
        name, session, frame = pair.wire.pop(0)
        other, theirs = pair.peer_session[name, session]
        pair.do(other, pair.ends[other].on_frame(theirs, frame, pair.now))
    late = [frame for name, _, frame in pair.wire if name == "a"]  # what proves the session, and PUSH
    pair.closed.add(SessionKind.UNIX)
    pair.wire.clear()
    (_, mine), (_, unix) = sorted(pair.peer_session)
    pair.peer_session.clear()
    pair.do("a", pair.ends["a"].closed(mine, pair.now))
    pair.pump()
    if is_over:
        pair.run()
        assert is_written_once(pair)
    effects = [effect for frame in late for effect in pair.ends["b"].on_frame(unix, frame, pair.now)]
    said = [effect.frame for effect in effects if isinstance(effect, _core.SendFrame)]
    assert [(type(frame), frame.code, frame.turn) for frame in said] == ([(_core.Done, Code.ok, 1)] if is_over else [])
    pair.run()
    assert is_over or is_written_once(pair)
    assert asked(pair, "push") == [(Lane.STREAM, 0, COUNT)]


def test_a_lane_that_is_refused_twice_costs_one_lane() -> None:
    """PUSH was said again before its answer came: the second DONE is of a lane that was left with the first."""
    pair = pushing([Lane.UCX, Lane.STREAM])
    pair.unmappable.add(Lane.UCX)
    pair.lost.add(_core.Done)
    pair.run()
    pair.lost.clear()
    assert pair.finals("a") == []
    answers: list[Any] = []

    def twice(frame: Any) -> int:
        if isinstance(frame, _core.Done) and frame.code == Code.no_lane:
            answers.append(frame)
            return 2
        return pair.fate(frame)

    pair.now += 2 * S
    for name in "ab":
        pair.do(name, pair.ends[name].tick(pair.now))
    super(LanePair, pair).pump(twice)
    pair.run()
    assert [(answer.code, answer.turn) for answer in answers] == [(Code.no_lane, 0)]
    assert is_written_once(pair)


def test_a_write_whose_last_lane_is_refused_ends_at_once() -> None:
    """Nobody waits for another that will not come, and what had landed is worth nothing."""
    pair = prefix_landed("push", [Lane.MAPPED, Lane.CMA])
    pair.unmappable |= {Lane.MAPPED, Lane.CMA}
    pair.run()
    assert pair.finals("a") == [("FAILED", "no_lane")]
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "no_lane")]
    assert pair.remove_region("b", TARGET)


def test_a_write_that_never_names_another_lane_ends() -> None:
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    pair.unmappable.add(Lane.CMA)
    pair.land_one()
    pair.lost.add(_core.Push)
    pair.pump()
    cut(pair)
    pair.reachable = False
    pair.closed |= {SessionKind.UNIX, SessionKind.TCP}
    for _ in range(8):
        pair.advance(S)
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "peer_gone")]
    assert pair.remove_region("b", TARGET)


def test_a_grant_that_ended_between_two_lanes_of_a_write_confirms_nothing() -> None:
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    lose(pair, "stopped", Lane.CMA)
    pair.lost |= {_core.Revoke, _core.ErrorFrame}
    while pair.filled < len(DATA):
        pair.land_one()
    assert pair.remove_region("a", SOURCE)
    pair.wire.clear()  # the trailer of the second lane among it, whatever it said
    pair.advance(4 * S)
    assert pair.finals("a") == [("FAILED", "grant_revoked")]
    assert [e.code.name for e in pair.take("b", _core.OfferEnded)] == ["grant_revoked"]
    assert pair.take("b", _core.NotifReceived) == []


def test_what_was_compared_is_what_the_reader_says() -> None:
    """The lane that served in the end may check, and the one before did not."""
    pair = pushing([Lane.CMA, Lane.STREAM], wants_sums=True)
    pair.pump()
    pair.perform("b")
    lose(pair, "stopped", Lane.CMA)
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state.name, final.blocks_done, final.blocks_checked) == ("COMMITTED", COUNT, COUNT - LANDED)


def test_posts_with_neighbouring_ids_are_not_taken_for_one() -> None:
    pair = LanePair()
    pair.add_region("a", SOURCE, DATA, is_shareable=True)
    pair.add_region("b", TARGET, bytes(128), is_shareable=True)
    for i in range(4):
        at = 32 * i
        id_ = ID[:-1] + bytes([ID[-1] ^ i])
        pair.post("a", "push", id_, [(SOURCE, at, 16, 16, 2)], [(TARGET, at, 16, 16, 2)], lanes=[Lane.STREAM])
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")] * 4
    assert pair.memory["b"][TARGET] == DATA


def test_what_was_read_before_the_source_knew_of_it_is_not_sent_again() -> None:
    """A region that is mapped is read at once, and the FETCH was lost: the next lane is told of all of it, and has to
    send but one piece."""
    pair = LanePair()
    pair.start("fetch", [Lane.CMA, Lane.STREAM])
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]  # the map is here now
    pair.asked.clear()
    second = b"s" * 16
    pieces = ([(TARGET, 0, 16, 16, COUNT)], [(SOURCE, 0, 16, 16, COUNT)])
    pair.post("b", "fetch", second, *pieces, lanes=[Lane.CMA, Lane.STREAM])
    while pair.perform("b"):
        pass
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    pair.advance(10 * MS)
    pair.run()
    assert asked(pair, "fetch") == [(Lane.STREAM, COUNT - 1, 1)]
    assert pair.finals("b") == [("COMMITTED", "ok")]
