"""Two endpoints whose lanes go away in the middle of a transfer: pulls, reads and writes of eight 16-byte elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer._native import _core
from kvxfer._native._core import Code, SessionKind
from kvxfer.testing.sim.virtual_clock import S
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
DATA, MARK = bytes(range(128)), b"\xee" * 32
POOL, SOURCE, TARGET = 2, 7, 9
BEFORE, COUNT, LANDED = 3, 8, 2
"""A pull is of the grant's last 8 positions; the first read brings two elements of 16 bytes."""


def _limits(lanes: Sequence[Any] | None) -> Any:
    limits = endpoint_limits(read_bytes_max=16 * LANDED, data_bytes_max=16 * LANDED)
    if lanes is not None:
        limits.lanes = sum(1 << lane.value for lane in lanes)
    return limits


class LanePair(RegionPair):
    """Pools with bytes too, and lanes that go away. ``asked``: every PULL, and the one in every FETCH, in order."""

    def __init__(self, reads_by: Sequence[Any] | None = None) -> None:
        """``reads_by``: the lanes of ``b``."""
        super().__init__({"a": _limits(None), "b": _limits(reads_by)})
        for name in "ab":
            self.ends[name].add_pool(_core.PoolInfo(POOL, 64, 16, b"d" * 32, True, True))
            self.memory[name][POOL] = bytearray(64 * 16)
        self.closed: set[Any] = set()
        """Kinds of sessions that cannot be dialed."""
        self.dials_fail_as: Any = None
        self.refused: set[Any] = set()
        """Lanes that ``a`` answers with no_lane."""
        self.asked: list[Any] = []
        self.lost: set[type] = set()
        """Frames of these kinds do not arrive."""
        self.filled = 0
        """Bytes that landed at ``b``, those that landed twice counted twice."""

    def _dial(self, name: str, effect: Any) -> None:
        self.reachable = effect.kind not in self.closed
        if self.dials_fail_as is None:
            return super()._dial(name, effect)
        failed = self.ends[name].dial_failed(effect.peer, effect.kind, self.dials_fail_as, "no way", self.now)
        return self.do(name, failed)

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
    """Two of the elements are in place, and are marked: a second read of them would write over the mark."""
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
    """(lane, first, count) of each question, from the first of our own elements."""
    base = BEFORE if verb == "pull" else 0
    return [(pull.lane, pull.first - base, pull.count) for pull in pair.asked]
