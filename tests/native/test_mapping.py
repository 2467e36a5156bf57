"""What a reader believes of a source that wants its memory mapped. The source here is written in Python, and lies."""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.lying_source import BLOCK, BLOCKS, BYTES, KEY, LyingSource
from tests.support.native.nodes import NewId

F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


def memory(size: int = BYTES, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.pwrite(fd, b"\x5a" * size, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pull_from(source: LyingSource, d: Any, path: pathlib.Path, transfer: bytes) -> Any:
    """How a pull of two blocks by ``d`` ended, which is closed then."""
    source.thread.start()
    source.endpoint.grant(transfer, 3, [1, 2], "", 10**11, 2, 1)
    d.core.set_peer(source.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path=str(path))
    d.pull(transfer, source.ref, [4, 5], lanes=[native.Lane.MAPPED])
    final = d.wait_drained(transfer)
    d.core.close()
    return final


@pytest.fixture
def lie(nodes: Any, new_id: NewId, private_directories: pathlib.Path) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Pulls from a lying source; returns the reader and how its transfer ended."""
    sources: list[LyingSource] = []

    def pull(frame: native.Map | None, descriptors: list[int], ids: list[int] | None = None) -> tuple[Any, Any]:
        d = nodes("reader", block_bytes=BLOCK, blocks=BLOCKS)
        d.fill(0xEE)
        path = private_directories / "sockets" / "liar"
        source = LyingSource(path, d.ref, frame, descriptors, ids)
        sources.append(source)
        final = pull_from(source, d, path, new_id())
        path.unlink()
        return d, final

    yield pull
    for source in sources:
        source.close()


def plain(
    region_bytes: int = BYTES, block_count: int = BLOCKS, segments: list[tuple[int, int, int]] | None = None
) -> native.Map:
    return native.Map(3, region_bytes, block_count, segments or [(0, BLOCK, BLOCK)])


def test_an_honest_source(lie: Any) -> None:
    d, final = lie(plain(), [memory()])
    assert final.state == native.TransferState.COMMITTED
    assert set(d.block(4) + d.block(5)) == {0x5A}
    assert d.core.statistics().mappings == 1


@pytest.mark.parametrize(
    ("frame", "make", "why"),
    [
        (plain(), lambda: [memory(seals=0)], "not sealed"),
        (plain(), lambda: [memory(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)], "not sealed"),
        (plain(), lambda: [memory(seals=fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)], "not sealed"),
        (plain(), lambda: [os.open("/dev/null", os.O_RDONLY)], "not sealed"),
        (plain(), lambda: [memory(BYTES - 1)], "smaller than it says"),
        (plain(region_bytes=1 << 60), lambda: [memory()], "smaller than it says"),
        (plain(region_bytes=0), lambda: [memory()], "cannot share this memory"),
        (plain(), list, "no descriptor"),
        (None, list, "did not share its memory"),
        (plain(block_count=BLOCKS + 1), lambda: [memory()], "leaves the region"),
        (plain(segments=[(1, BLOCK, BLOCK)]), lambda: [memory()], "leaves the region"),
        (plain(segments=[(2**64 - 4096, BLOCK, BLOCK)]), lambda: [memory()], "leaves the region"),
        (plain(segments=[(0, 2**63, BLOCK)]), lambda: [memory()], "leaves the region"),
        (plain(segments=[(0, 0, BLOCK)]), lambda: [memory()], "stride"),
        (plain(segments=[(0, 4, 0)]), lambda: [memory()], "length"),
        (plain(segments=[(0, 2048, 2048)]), lambda: [memory()], "another size"),
        (native.Map(3, BYTES, 0, [(0, BLOCK, BLOCK)]), lambda: [memory()], "at least one block"),
        (native.Map(4, BYTES, BLOCKS, [(0, BLOCK, BLOCK)]), lambda: [memory()], "did not share its memory"),
    ],
)  # fmt: skip
def test_a_lie_costs_the_lane(lie: Any, frame: native.Map | None, make: Callable[[], list[int]], why: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    descriptors = make()
    d, final = lie(frame, descriptors)
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.no_lane)
    assert why in final.lane_notes
    assert set(d.memory.tolist()) == {0xEE}
    assert len(os.listdir("/proc/self/fd")) <= before + len(descriptors) + 5


def test_blocks_outside_of_the_pool(lie: Any) -> None:
    d, final = lie(plain(), [memory()], ids=[1, BLOCKS])
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.no_lane)
    assert "outside of its pool" in final.lane_notes
    assert set(d.memory.tolist()) == {0xEE}


def test_a_heap_of_descriptors(lie: Any) -> None:
    """More descriptors than a MAP could want end the session; none stays open."""
    descriptors = [memory() for _ in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    _, final = lie(plain(), descriptors)
    assert final.state == native.TransferState.FAILED
    assert len(os.listdir("/proc/self/fd")) <= before + 5


GONE = native.Map(3, 0, 0, [], key=b"the source's memory is not registered any more")


class LateSource(LyingSource):
    """Takes its memory back between its promise and the word of how to read it, and says so a moment after both."""

    def perform(self, connection: socket.socket, effect: Any) -> None:
        super().perform(connection, effect)
        if isinstance(getattr(effect, "frame", None), native.Ready):
            time.sleep(0.2)  # the reader looks for the memory
            _, effects = self.endpoint.end_grant(effect.frame.id, native.GrantEvent.REVOKE, 2)
            for more in effects:
                super().perform(connection, more)


def test_memory_that_is_gone_before_it_was_said_how_to_read_it_is_no_fault_of_the_lane(
    nodes: Any, new_id: NewId, private_directories: pathlib.Path
) -> None:
    d = nodes("reader", block_bytes=BLOCK, blocks=BLOCKS)
    path = private_directories / "sockets" / "late"
    source = LateSource(path, d.ref, GONE, [], None)
    final = pull_from(source, d, path, new_id())
    source.close()
    assert (final.state, final.code) == (native.TransferState.FAILED, native.Code.grant_revoked), final.text


class GreedySource(LyingSource):
    """Asks, with its first answer, for more than the reader may owe it; honest when it is asked again."""

    def __init__(self, *lie: Any, wanted: bytes, count: int) -> None:
        super().__init__(*lie)
        self.wanted, self.count = wanted, count
        self.connections = 0

    def serve(self) -> None:
        for self.connections in (1, 2):
            super().serve()
            self.endpoint.closed(self.connections, 100)

    def perform(self, connection: socket.socket, effect: Any) -> None:
        if self.connections == 1 and isinstance(getattr(effect, "frame", None), native.Ready):
            pulls = [
                native.Pull(self.wanted, attempt, attempt, native.Lane.MAPPED, 0, self.count, 64, b"d" * 32, 0)
                for attempt in range(1, 72)
            ]
            connection.sendall(b"".join(map(native.encode, [*pulls, effect.frame])))
        else:
            super().perform(connection, effect)


def test_a_read_on_a_connection_that_just_closed_is_no_fault_of_the_lane(
    nodes: Any, new_id: NewId, private_directories: pathlib.Path
) -> None:
    """The answers that hang it up come before the read, in one go. The transfer connects again, and keeps its lane."""
    count = 65536
    limits = nodes.limits()
    limits.notifications_max = limits.notification_bytes_max = 1
    d = nodes("reader", block_bytes=64, blocks=count, limits=limits)
    wanted, transfer = new_id(), new_id()
    path = private_directories / "sockets" / "greedy"
    frame = native.Map(5, 1024, 16, [(0, 64, 64)])
    source = GreedySource(path, d.ref, frame, [memory(1024)], None, wanted=wanted, count=count - 2)
    source.endpoint.add_pool(native.PoolInfo(5, 16, 64, b"d" * 32, True))
    source.endpoint.grant(transfer, 5, [1, 2], "", 10**11, 2, 1)
    source.thread.start()
    d.core.set_peer(source.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path=str(path))
    d.grant(wanted, range(2, count), ttl_s=60)
    d.pull(transfer, source.ref, [0, 1], lanes=[native.Lane.MAPPED])
    final = d.wait_drained(transfer)
    assert (final.state, final.attempts, final.lane_notes) == (native.TransferState.COMMITTED, 2, "")
    assert source.connections == 2
    assert set(d.block(0) + d.block(1)) == {0x5A}
    d.core.close()
    source.close()


def test_a_new_pool_under_the_id_of_one_that_was_removed(p: Any, d: Any, new_id: NewId) -> None:
    """That the old one is gone is not taken for a word about the new one, however close they follow each other."""
    info = native.PoolInfo(7, p.blocks, p.block_bytes, b"d" * 32, True, False, False)
    for _ in range(60):
        transfer = new_id()
        p.wait(lambda _: p.is_idle())
        d.pull(transfer, p, [1, 2], lanes=[native.Lane.MAPPED])
        time.sleep(0.003)  # it waits at the source
        p.core.remove_pool(7)
        p.core.add_pool(info, p.region, p.segments)
        p.grant(transfer, [1, 2])
        final = d.wait_drained(transfer)
        assert (final.state, final.attempts) == (native.TransferState.COMMITTED, 1), final.text
        p.take()
        d.events.clear()
        p.events.clear()
