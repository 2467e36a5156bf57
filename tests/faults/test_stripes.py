"""Posts over several connections: every byte arrives, and what is lost with one, or with all of them, has a name."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.faults.counting_proxy import CountingProxy
from tests.support.faults.lanes import STREAMS
from tests.support.faults.parties import POISON, Party
from tests.support.faults.phase_fixture import MARGIN_S, PAINT, PATIENT_S, RECONNECT_S, STALL_S
from tests.support.faults.remote import Remote

pytestmark = pytest.mark.no_sanitizer

ELEMENT = 65537
PIECES = 515
"""More than 8 MiB for each of four connections, and not as much for each."""
SIZE = ELEMENT * PIECES
STRIPES = 4
SOME = (1 << 20) + 9
"""Of what one connection carries: it ends inside of an element."""
ROUNDS_MAX = 8
"""Posts until each connection is there: a post has another one dialed, and does not wait for it."""
BLOCKS, GUARD = [0, PIECES - 1], [PIECES, PIECES]
TTL_S = 2.0
BYTES_ACKED_AT = 120
"""In tcp_info (linux/tcp.h); the received ones follow."""

each_lane = pytest.mark.parametrize("lane", STREAMS)
each_op = pytest.mark.parametrize("op", ["READ", "WRITE"])


class Striped:
    """The poster and its peer, each with two registered regions and an element to spare, and a proxy between them."""

    def __init__(self, poster: Any, peer: Any, op: str) -> None:
        self.poster, self.peer, self.op = poster, peer, op
        self.source, self.destination = (peer, poster) if op == "READ" else (poster, peer)
        self.way = "from" if op == "READ" else "to"
        self.seeds = itertools.count(31)
        for party in (poster, peer):
            for _ in range(2):
                party.allocate(SIZE + ELEMENT)
        peer.add_peer(poster.metadata())
        metadata = peer.metadata()
        host, port, path, *rest = metadata["address"]
        self.proxy = CountingProxy((host, port), path)
        poster.add_peer({**metadata, "address": [host, self.proxy.tcp_port, self.proxy.unix_path, *rest]})

    def begin(self, name: str, region: int = 0) -> int:
        """Ask for everything, into poison; returns the seed of what is sent."""
        seed = next(self.seeds)
        self.source.fill(seed, region=region)
        self.destination.paint(POISON, region=region)
        self.proxy.forget()
        self.poster.post(name, self.op, "peer", region, region, element=ELEMENT, nbytes=SIZE)
        return seed

    def expect_bytes(self, seed: int, region: int = 0) -> None:
        assert self.destination.is_filled(seed, BLOCKS, region), "other bytes than were sent"
        assert self.destination.is_painted(POISON, GUARD, region), "bytes landed behind what was posted"

    def spread(self) -> None:
        """Posts, until every connection carries its part of one."""
        for number in range(ROUNDS_MAX):
            self.proxy.forget()
            self.poster.post(f"spread-{number}", self.op, "peer", 0, 0, element=ELEMENT, nbytes=SIZE)
            assert self.poster.outcome(f"spread-{number}") == "committed"
            carried = self.proxy.carried(self.way)
            assert sum(carried.values()) == SIZE
            if len(carried) == STRIPES:
                return
        raise AssertionError(f"it was never spread over {STRIPES} connections: {carried}")

    def hold(self) -> tuple[int, list[int]]:
        """A post in whose middle all connections stand; returns the seed of its bytes, and their numbers."""
        self.spread()
        self.proxy.hold_each(self.way, SOME)
        seed = self.begin("held")
        held = self.proxy.wait_held(STRIPES)
        assert self.proxy.carried(self.way) == dict.fromkeys(held, SOME), "not each stands in the middle of its part"
        assert len(held) == STRIPES
        assert self.poster.outcome("held", 0.0) == ""
        return seed, held

    def take_back(self, party: Any) -> None:
        """Its memory is its owner's again, and is written by it at once."""
        party.deregister(0)
        party.paint(PAINT, region=0)

    def expect_nothing_later(self, party: Any) -> None:
        """A post that comes to its end over the same connections has what was under way before it behind it."""
        self.proxy.resume()
        seed = self.begin("after", region=1)
        assert self.poster.outcome("after") == "committed"
        self.expect_bytes(seed, region=1)
        for end in (self.poster, self.peer):
            assert end.wait_idle() == ""
        assert party.is_painted(PAINT, region=0), "bytes landed in memory that was taken back"

    def close(self) -> None:
        self.proxy.shut()
        for end in (self.poster, self.peer):
            end.close()


Make = Callable[..., Striped]


@pytest.fixture
def striped() -> Iterator[Make]:
    """Makes pairs; ``remote``: which of ``poster`` and ``peer`` runs in a process of its own."""
    made: list[Striped] = []

    def make(lane: str, op: str, *, remote: str = "", **limits: float) -> Striped:
        options: dict[str, Any] = {**limits, "blocks": 1, "block_bytes": ELEMENT, "stripes": STRIPES}
        ends = [(Remote if name == remote else Party)(name, [lane], **options) for name in ("poster", "peer")]
        made.append(Striped(*ends, op))
        return made[-1]

    yield make
    for one in made:
        one.close()


@each_op
@each_lane
def test_every_byte_arrives(striped: Make, lane: str, op: str) -> None:
    """Each of the connections carries a part of it, and all parts are of one size."""
    pair = striped(lane, op)
    pair.spread()
    for number in range(3):
        seed = pair.begin(f"post-{number}")
        assert pair.poster.outcome(f"post-{number}") == "committed"
        pair.expect_bytes(seed)
        carried = pair.proxy.carried(pair.way)
        assert len(carried) == STRIPES
        assert sum(carried.values()) == SIZE
        assert max(carried.values()) - min(carried.values()) <= ELEMENT
    assert pair.poster.wait_idle() == pair.peer.wait_idle() == ""


@each_lane
def test_both_ways_at_once_between_two_processes(striped: Make, lane: str) -> None:
    """Without a proxy, as fast as they can: a read and a write share the connections."""
    pair = striped(lane, "READ", remote="peer")
    near, remote = pair.poster, pair.peer
    near.add_peer(remote.metadata())
    for number in range(ROUNDS_MAX):
        read, written = next(pair.seeds), next(pair.seeds)
        remote.fill(read, region=0)
        near.fill(written, region=1)
        near.paint(POISON, region=0)
        remote.paint(POISON, region=1)
        for region, op in enumerate(("READ", "WRITE")):
            near.post(f"{op}-{number}", op, "peer", region, region, element=ELEMENT, nbytes=SIZE)
        assert near.outcome(f"READ-{number}") == near.outcome(f"WRITE-{number}") == "committed"
        assert near.is_filled(read, BLOCKS, 0)
        assert near.is_painted(POISON, GUARD, 0)
        assert remote.is_filled(written, BLOCKS, 1)
        assert remote.is_painted(POISON, GUARD, 1)
    assert near.transport.counts().sessions_up == STRIPES
    if lane == "stream":
        moved = moved_over_tcp()
        assert len(moved) == STRIPES
        # A connection that comes late carries a part of one only: more than half of an even share is a part.
        assert min(map(min, moved)) > SIZE // STRIPES // 2, "each carries a part"
    assert near.wait_idle() == remote.wait_idle() == ""
    assert pair.proxy.carried("from") == pair.proxy.carried("to") == {}


@each_op
@each_lane
def test_one_is_reset(striped: Make, lane: str, op: str) -> None:
    """In the middle of what it carries: another connection carries that part."""
    pair = striped(lane, op, reconnect_s=PATIENT_S)
    seed, held = pair.hold()
    pair.proxy.cut(held[1])
    assert pair.proxy.wait_gone(held[1])
    pair.proxy.resume()
    assert pair.poster.outcome("held") == "committed"
    pair.expect_bytes(seed)
    carried = pair.proxy.carried(pair.way)
    assert carried.pop(held[1]) == SOME
    assert SIZE - SOME < sum(carried.values()) <= SIZE, "what had come by the lost one need not come again"
    pair.take_back(pair.destination)
    pair.expect_nothing_later(pair.destination)


@each_op
@each_lane
def test_one_falls_silent(striped: Make, lane: str, op: str) -> None:
    """It is given up, and another carries its part; what it still held comes when the memory is another owner's."""
    pair = striped(lane, op, stall_s=STALL_S, reconnect_s=PATIENT_S)
    seed, held = pair.hold()
    pair.proxy.go_on_but(held[1])
    assert pair.poster.outcome("held") == "committed"
    pair.expect_bytes(seed)
    assert pair.proxy.carried(pair.way)[held[1]] == SOME
    pair.take_back(pair.destination)
    pair.proxy.resume()
    assert pair.proxy.wait_gone(held[1])
    pair.expect_nothing_later(pair.destination)


@each_op
@each_lane
def test_cancelled(striped: Make, lane: str, op: str) -> None:
    """All parts of it, at once, while every connection stands in the middle of one."""
    pair = striped(lane, op)
    pair.hold()
    pair.poster.cancel("held")
    assert pair.poster.outcome("held", MARGIN_S) == "cancelled"
    pair.take_back(pair.poster)
    pair.proxy.resume()
    if op == "WRITE":
        assert pair.peer.wait_idle() == ""
        ended = [offer.state.name for offer in pair.peer.offers]
        assert sorted(ended[-STRIPES:]) == ["FAILED"] * STRIPES
        pair.take_back(pair.peer)
    pair.expect_nothing_later(pair.destination)


@each_op
@each_lane
def test_the_peer_is_killed(striped: Make, lane: str, op: str) -> None:
    """The poster is told so in the time that it may try to reach it again, and has its memory back."""
    pair = striped(lane, op, remote="peer", reconnect_s=RECONNECT_S)
    _, held = pair.hold()
    pair.peer.kill()
    pair.proxy.resume()
    assert pair.poster.outcome("held", RECONNECT_S + MARGIN_S) == "peer_gone"
    assert pair.poster.wait_idle() == ""
    pair.take_back(pair.poster)
    for number in held:
        assert pair.proxy.wait_gone(number)
    assert pair.poster.is_painted(PAINT, region=0)


@each_op
@each_lane
def test_who_posted_is_killed(striped: Make, lane: str, op: str) -> None:
    """Its peer ends every part, and has its memory back."""
    pair = striped(lane, op, remote="poster", reconnect_s=RECONNECT_S, grant_ttl_s=TTL_S)
    _, held = pair.hold()
    pair.poster.kill()
    pair.proxy.resume()
    bound_s = RECONNECT_S if op == "WRITE" else TTL_S
    assert pair.peer.wait_idle(bound_s + MARGIN_S) == ""
    if op == "WRITE":
        ended = [offer.state.name for offer in pair.peer.offers]
        assert ended[-STRIPES:] == ["FAILED"] * STRIPES
    pair.take_back(pair.peer)
    for number in held:
        assert pair.proxy.wait_gone(number)
    assert pair.peer.is_painted(PAINT, region=0)


def moved_over_tcp() -> list[tuple[int, int]]:
    """Of each TCP connection of this process that carried any blocks: bytes sent, and received."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            one.getpeername()  # raises where it listens
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            moved = struct.unpack_from("<QQ", info, BYTES_ACKED_AT)
            if max(moved) > ELEMENT:
                found.append(moved)
    return found
