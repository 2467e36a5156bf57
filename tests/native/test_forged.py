"""What a proven but dishonest peer, written in Python, may say of registered memory, and what it gets by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import DIGEST, NewId
from tests.support.native.rawpeer import KEY, RawPeer

Lane = native.Lane
STREAM = Lane.STREAM
TCP, UNIX = native.SessionKind.TCP, native.SessionKind.UNIX
SIZE = 65536
Dial = Callable[..., tuple[Any, RawPeer, Any]]


@pytest.fixture
def met(nodes: Any) -> Iterator[Dial]:
    """A core with one region, full of 0x5A or random, and a raw peer with a session to it."""
    peers: list[RawPeer] = []

    def meet(*, seed: int | None = None, kind: Any = native.SessionKind.TCP, **info: Any) -> tuple[Any, RawPeer, Any]:
        node = nodes("honest")
        region = node.register(SIZE, **info)
        region.memory[:] = 0x5A if seed is None else np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        peer = RawPeer()
        peers.append(peer)
        node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="")
        peer.dial(node.core, kind=kind)
        return node, peer, region

    yield meet
    for peer in peers:
        peer.close()


def fetch(
    transfer: bytes, rows: Any, indices: Any = (), *, count: int | None = None, lane: Any = STREAM
) -> native.Fetch:
    total = sum(row[4] for row in rows) if not len(indices) else len(indices)
    pull = native.Pull(transfer, 1, 7, lane, 0, total if count is None else count, 0, bytes(32), 0)
    return native.Fetch(pull, native.WireList(rows, list(indices)))


def test_an_honest_fetch(met: Dial, new_id: NewId) -> None:
    node, peer, region = met(seed=1)
    transfer = new_id()
    peer.say(fetch(transfer, [(region.id, 100, 1000, 50, 3), (region.id, 5, 7, 7, 1)], [3, 0, 2]))
    data = peer.hear(native.Data)
    assert (data.id, data.first, data.count, data.payload_bytes) == (transfer, 0, 3, 107)
    assert peer.payload == region.element(5, 7) + region.element(100, 50) + region.element(2100, 50)
    assert peer.hear(native.Verdict).code == native.Code.ok
    peer.say(native.Release(transfer))
    node.wait(lambda _: node.is_idle(), "the end of the read")


@pytest.mark.parametrize(
    "rows",
    [
        [(0, SIZE - 63, 64, 64, 1)],
        [(0, 0, 64, 64, SIZE // 64 + 1)],
        [(0, SIZE, 1, 1, 1)],
        [(0, 2**62, 64, 64, 1)],
        [(0, 0, 64, 64, 1), (1, 0, 64, 64, 1)],
        [(77, 0, 64, 64, 1)],
    ],
    ids=["end", "row-end", "after", "far", "one-unknown", "unknown"],
)
@pytest.mark.parametrize("lane", [STREAM, Lane.UCX])
def test_out_of_bounds(met: Dial, new_id: NewId, rows: Any, lane: native.Lane) -> None:
    """Refused by the source, counted, and not a byte goes out."""
    node, peer, region = met()
    moved = [(region.id + row[0], *row[1:]) for row in rows]
    transfer = new_id()
    peer.say(fetch(transfer, moved, lane=lane))
    with pytest.raises(AssertionError, match=r"Code\.refused"):
        peer.hear(native.Data)
    assert node.core.statistics().bytes_streamed_out == 0
    assert node.core.counts().grants.refused == 1
    assert node.is_idle()


@pytest.mark.parametrize("rights", [{"can_read": False}])
def test_not_readable(met: Dial, new_id: NewId, rights: dict[str, bool]) -> None:
    node, peer, region = met(**rights)
    peer.say(fetch(new_id(), [(region.id, 0, 64, 64, 1)]))
    with pytest.raises(AssertionError, match=r"Code\.refused"):
        peer.hear(native.Data)
    assert node.core.statistics().bytes_streamed_out == 0


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        (TCP, [STREAM, Lane.UCX], [Lane.UNIX, Lane.MAPPED, Lane.CMA, Lane.MEMORY]),
        (UNIX, [Lane.UNIX, Lane.MAPPED, Lane.CMA], [STREAM, Lane.UCX, Lane.MEMORY]),
    ],
    ids=["tcp", "unix"],
)
@pytest.mark.parametrize("verb", ["fetch", "pull"])
def test_a_lane_of_another_kind_of_session(
    met: Dial, new_id: NewId, verb: str, kind: Any, own: list[Any], others: list[Any]
) -> None:
    node, peer, region = met(kind=kind)

    def ask(lane: native.Lane) -> Any:
        transfer = new_id()
        if verb == "pull":
            node.grant(transfer, [0])
            peer.say(native.Pull(transfer, 1, 7, lane, 0, 1, node.block_bytes, DIGEST, 0))
        else:
            peer.say(fetch(transfer, [(region.id, 0, 64, 64, 1)], lane=lane))
        return peer.hear(native.Data, native.Map, native.Ready)

    for lane in others:
        with pytest.raises(AssertionError, match=r"Code\.refused.*this kind of session"):
            ask(lane)
    assert node.core.statistics().bytes_streamed_out == 0
    assert node.core.counts().grants.refused == len(others)
    for lane in own:
        ask(lane)


@pytest.mark.parametrize("is_index", [False, True], ids=["overlapping", "no-such-index"])
def test_a_list_that_is_none(met: Dial, new_id: NewId, is_index: bool) -> None:
    """Elements over each other, or indices of none, which our own encoder never says: refused, nothing goes out."""
    node, peer, region = met()
    frame = fetch(new_id(), [(region.id, 0, 64, 64, 5)], [0] if is_index else [])
    good = native.encode(frame)
    stride = (64).to_bytes(8, "little")
    bad = good[:-4] + b"\x09\0\0\0" if is_index else good.replace(stride + stride, bytes([1]) + bytes(7) + stride)
    assert bad != good
    assert peer.socket is not None
    peer.socket.sendall(bad)
    with pytest.raises((AssertionError, EOFError)):
        peer.hear(native.Data)
    assert node.core.statistics().bytes_streamed_out == 0
    assert node.is_idle()


def push(transfer: bytes, to: Any, *, length: int = 64, count: int = 4) -> native.Push:
    return native.Push(transfer, STREAM, native.WireList([(1, 0, length, length, count)]), native.WireList(to), 5000)


@pytest.mark.parametrize(
    ("to", "info"),
    [
        ([(0, SIZE - 255, 64, 64, 4)], {}),
        ([(77, 0, 64, 64, 4)], {}),
        ([(0, 0, 64, 64, 3)], {}),
        ([(0, 0, 65, 65, 4)], {}),
        ([(0, 0, 64, 64, 4)], {"can_write": False}),
    ],
    ids=["end", "unknown", "fewer", "longer", "not-writable"],
)
def test_a_push_that_is_not_offered(met: Dial, new_id: NewId, to: Any, info: dict[str, bool]) -> None:
    """DONE says no, no PULL is sent, and nothing is filled."""
    node, peer, region = met(**info)
    transfer = new_id()
    peer.say(push(transfer, [(region.id + row[0], *row[1:]) for row in to]))
    done = peer.hear(native.Done)
    assert (done.id, done.code) == (transfer, native.Code.refused)
    assert set(region.memory.tolist()) == {0x5A}
    assert not node.find(native.OfferEnded, state=native.TransferState.COMMITTED)
    assert node.is_idle()


def test_a_push_commits_once(met: Dial, new_id: NewId) -> None:
    """Said again while it is live it changes nothing; said again after its end it is only answered again."""
    node, peer, region = met()
    transfer = new_id()
    asked = push(transfer, [(region.id, 0, 64, 64, 4)])
    peer.say(asked)
    pull = peer.hear(native.Pull)
    assert (pull.id, pull.lane, pull.first, pull.count) == (transfer, STREAM, 0, 4)
    peer.say(asked)
    peer.say(native.Ready(transfer, pull.attempt, 1, 4, 0, 4, True, 5000, 0, 0, []))
    peer.say(native.Data(transfer, pull.attempt, 0, 4, True, 256), b"\x11" * 256)
    node.wait(lambda _: region.memory[255] == 0x11, "the bytes")
    assert not node.find(native.OfferEnded)
    peer.say(native.Verdict(transfer, pull.nonce, native.Code.ok))
    assert peer.hear(native.Done).code == native.Code.ok
    node.wait_for(native.OfferEnded, id=transfer, state=native.TransferState.COMMITTED, bytes=256)
    peer.say(asked)
    assert peer.hear(native.Done).code == native.Code.ok
    peer.say(native.Data(transfer, pull.attempt, 0, 4, True, 256), b"\x22" * 256)
    peer.say(native.Ping(native.PingKind.ASK, 9))
    assert peer.hear(native.Ping).token == 9
    assert bytes(region.memory[:256]) == b"\x11" * 256
    assert node.core.statistics().bytes_discarded == 256
    node.take()
    assert len(node.find(native.OfferEnded)) == 1


def test_no_verdict_no_commit(met: Dial, new_id: NewId) -> None:
    node, peer, region = met()
    transfer = new_id()
    peer.say(push(transfer, [(region.id, 0, 64, 64, 4)]))
    pull = peer.hear(native.Pull)
    peer.say(native.Ready(transfer, pull.attempt, 1, 4, 0, 4, True, 5000, 0, 0, []))
    peer.say(native.Data(transfer, pull.attempt, 0, 4, True, 256), b"\x11" * 256)
    peer.say(native.Verdict(transfer, pull.nonce, native.Code.grant_revoked))
    assert peer.hear(native.Done).code == native.Code.grant_revoked
    ended = node.wait_for(native.OfferEnded, id=transfer)
    assert ended.state == native.TransferState.FAILED


def test_no_two_reads_are_confirmed_by_one_nonce(met: Dial, new_id: NewId) -> None:
    """Their seeds are drawn many at a time."""
    node, peer, region = met()
    asked = []
    for _ in range(100):
        node.fetch(new_id(), peer.ref, [(region.id, 0, 64, 64, 1)], [(1, 0, 64, 64, 1)], lanes=[STREAM])
        asked.append(peer.hear(native.Fetch).pull.nonce)
    assert len(set(asked)) == 100
    assert 0 not in asked


def test_maps_of_a_peer_are_bounded(met: Dial) -> None:
    """In bytes: a peer may not fill our memory with keys that are never used."""
    node, peer, _ = met()
    for pool in range(1024):
        peer.say(native.Map(pool + 1000, 0, 0, [], STREAM, 0, bytes(16 * 1024)))
    peer.say(native.Ping(native.PingKind.ASK, 1))
    peer.hear(native.Ping)
    assert node.core.statistics().mappings_refused == 512
    for _ in range(2000):  # said again of the same pool it takes the place of what was said before
        peer.say(native.Map(1000, 0, 0, [], STREAM, 0, bytes(16 * 1024)))
    peer.say(native.Ping(native.PingKind.ASK, 2))
    peer.hear(native.Ping)
    assert node.core.statistics().mappings_refused == 2512
