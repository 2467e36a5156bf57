"""Checksums: which side gives them, which side asks for them, and that bytes that do not match never commit."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.sim.virtual_clock import S
from tests.support.machines.endpoint_pair import KEY
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
DATA = bytes(range(256))


class CheckedPair(RegionPair):
    """Pools with checks, one block of 16 bytes each, beside the regions."""

    def introduce(self, name: str) -> None:
        self.ends[name].set_peer(self.refs[self.other(name)], KEY, _core.SessionKind.MEMORY)
        self.ends[name].add_pool(_core.PoolInfo(2, 64, 16, b"d" * 32, True, True, True))


def ready_pair() -> CheckedPair:
    pair = CheckedPair()
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, bytes(256))
    return pair


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture
def pair() -> CheckedPair:
    return ready_pair()


@pytest.mark.parametrize("op", ["fetch", "push"])
@pytest.mark.parametrize("lane", [Lane.STREAM, Lane.UNIX])
def test_corrupted_bytes_never_commit(pair: CheckedPair, op: str, lane: Any) -> None:
    name, local, remote = ("b", [(9, 0, 16, 16, 4)], [(7, 0, 16, 16, 4)])
    if op == "push":
        name, local, remote = "a", remote, local
    pair.post(name, op, ID, local, remote, lanes=[lane], wants_checksums=True, notification=b"n")
    pair.corrupts = flip
    pair.run()
    assert pair.finals(name) == [("FAILED", "checksum")]
    assert pair.take("b" if op == "push" else "a", _core.NotifReceived) == []
    pair.corrupts = lambda data: data
    pair.post(name, op, b"u" * 16, local, remote, lanes=[lane], wants_checksums=True)
    pair.run()
    assert pair.finals(name) == [("COMMITTED", "ok")]
    for end in pair.ends.values():
        assert [(r.grants, r.transfers) for r in end.counts().regions] == [(0, 0)]


def test_payload_that_must_have_sums_and_has_none_is_thrown_away(pair: CheckedPair) -> None:
    pair.post("b", "fetch", ID, [(9, 0, 16, 16, 4)], [(7, 0, 16, 16, 4)], lanes=[Lane.STREAM], wants_checksums=True)
    pair.pump()
    (send,) = pair.take("a", _core.SendData)
    assert (send.frame.has_checksums, send.frame.payload_bytes, send.checksums) == (True, 4 * 16 + 4 * 4, [])
    session = next(session for name, session in pair.peer_session if name == "b")
    bare = _core.Data(ID, send.frame.attempt, 0, 4, True, 4 * 16)
    assert pair.ends["b"].data_arrives(session, bare, pair.now).token == 0
    short = _core.Data(ID, send.frame.attempt, 0, 4, True, 4 * 16, True)
    assert pair.ends["b"].data_arrives(session, short, pair.now).token == 0
    assert pair.ends["b"].data_arrives(session, send.frame, pair.now).token != 0


CHECKSUMS = [zlib.crc32(bytes([n]) * 16) for n in range(4)]


def pull(pair: CheckedPair, *lanes: Any, pool: int = 2, wants_checksums: bool = False) -> None:
    b = pair.ends["b"]
    spec = (ID, pair.refs["a"], pool, [8, 9, 10, 11], 0, list(lanes), pair.now + 600 * S, 7, pair.now)
    pair.do("b", b.pull(*spec, wants_checksums=wants_checksums))
    pair.pump()


def grant(pair: CheckedPair, *, pool: int = 2) -> None:
    pair.do("a", pair.ends["a"].grant(ID, pool, [0, 1, 2, 3], "b", 10 * S, 0, pair.now))


def test_the_owners_sums_go_beside_the_ids(pair: CheckedPair) -> None:
    """What was given with `ready` reaches the reader with the blocks it is of."""
    a = pair.ends["a"]
    grant(pair)
    pull(pair, Lane.MEMORY)
    for known in (2, 4):
        pair.do("a", a.ready(ID, known, 0, known == 4, pair.now, CHECKSUMS[known - 2 : known]))
        pair.pump()
        (read,) = pair.take("b", _core.ReadBlocks)
        assert (read.from_blocks, read.checksums) == ([known - 2, known - 1], CHECKSUMS[known - 2 : known])
        if known == 2:
            pair.do("b", pair.ends["b"].read_landed(read.id, read.token, pair.now))
    pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, Code.checksum, "block 2", pair.now))
    pair.pump()
    (final,) = pair.take("b", _core.TransferFinal)
    assert (final.code, final.blocks_done, final.blocks_checked) == (Code.checksum, 2, 2)


def test_a_pool_with_checks_takes_nothing_unchecked(pair: CheckedPair) -> None:
    """Where the source gave no checksums, a lane that reads by itself is left for one on which it sends them."""
    a = pair.ends["a"]
    grant(pair)
    pull(pair, Lane.MEMORY, Lane.STREAM)
    pair.do("a", a.ready(ID, 1, 0, False, pair.now, CHECKSUMS[:1]))
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.do("b", pair.ends["b"].read_landed(read.id, read.token, pair.now))
    pair.do("a", a.ready(ID, 4, 0, True, pair.now))
    pair.pump()
    assert pair.take("b", _core.ReadBlocks) == []
    (send,) = pair.take("a", _core.SendData)
    assert (send.frame.has_checksums, send.frame.first, send.frame.count) == (True, 1, 3)
    session = next(theirs for key, (_, theirs) in pair.peer_session.items() if key == ("a", send.session))
    landing = pair.ends["b"].data_arrives(session, send.frame, pair.now)
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    pair.do("a", a.data_sent(send.session, ID, send.frame.attempt, 3, pair.now))
    pair.pump()
    (final,) = pair.take("b", _core.TransferFinal)
    assert (final.state.name, final.lane, final.blocks_checked) == ("COMMITTED", Lane.STREAM, 4)
    assert "no checksums" in final.lane_notes


def test_without_a_lane_that_checks_there_is_none(pair: CheckedPair) -> None:
    grant(pair)
    pull(pair, Lane.MEMORY)
    pair.do("a", pair.ends["a"].ready(ID, 4, 0, True, pair.now))
    pair.pump()
    (final,) = pair.take("b", _core.TransferFinal)
    assert (final.code, final.blocks_done) == (Code.no_lane, 0)


def test_announced_checksums_are_verified_without_a_request(pair: CheckedPair) -> None:
    grant(pair)
    pull(pair, Lane.MEMORY, pool=1)
    pair.do("a", pair.ends["a"].ready(ID, 4, 0, True, pair.now, CHECKSUMS))
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    assert read.checksums == CHECKSUMS


@pytest.mark.parametrize(("lane", "checked"), [(Lane.STREAM, 4), (Lane.MEMORY, 0)])
@pytest.mark.parametrize("op", ["fetch", "push"])
def test_a_post_says_how_much_of_it_was_checked(pair: CheckedPair, op: str, lane: Any, checked: int) -> None:
    """Registered memory that is read by its reader alone has no checksums."""
    name, local, remote = ("b", [(9, 0, 16, 16, 4)], [(7, 0, 16, 16, 4)])
    if op == "push":
        name, local, remote = "a", remote, local
    pair.post(name, op, ID, local, remote, lanes=[lane], wants_checksums=True)
    pair.run()
    (final,) = pair.take(name, _core.TransferFinal)
    assert (final.state.name, final.blocks_done, final.blocks_checked) == ("COMMITTED", 4, checked)


def test_stream_takes_the_owners_sums_or_has_them_computed(pair: CheckedPair) -> None:
    a = pair.ends["a"]
    grant(pair)
    pull(pair, Lane.STREAM)
    pair.do("a", a.ready(ID, 2, 0, False, pair.now, CHECKSUMS[:2]))
    (send,) = pair.take("a", _core.SendData)
    assert (send.frame.has_checksums, send.checksums) == (True, CHECKSUMS[:2])
    pair.do("a", a.ready(ID, 4, 0, True, pair.now))
    pair.do("a", a.data_sent(send.session, ID, 1, 2, pair.now))
    (send,) = pair.take("a", _core.SendData)
    assert (send.frame.has_checksums, send.checksums) == (True, [])


@pytest.mark.parametrize("wants_checksums", [False, True])
def test_a_reader_can_ask_where_the_pool_does_not(pair: CheckedPair, wants_checksums: bool) -> None:
    grant(pair, pool=1)
    pull(pair, Lane.STREAM, pool=1, wants_checksums=wants_checksums)
    pair.do("a", pair.ends["a"].ready(ID, 4, 0, True, pair.now))
    (send,) = pair.take("a", _core.SendData)
    assert send.frame.has_checksums is wants_checksums


def test_ready_takes_checksums_of_the_new_blocks_only(pair: CheckedPair) -> None:
    grant(pair)
    with pytest.raises(InvalidArgumentError, match="checksum"):
        pair.ends["a"].ready(ID, 2, 0, False, pair.now, CHECKSUMS[:3])
    pair.do("a", pair.ends["a"].ready(ID, 2, 0, False, pair.now, CHECKSUMS[:2]))
