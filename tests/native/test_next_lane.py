"""The Unix socket gone in the middle of a transfer: TCP brings what is missing, and no more."""

from __future__ import annotations

import array
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.limits import endpoint_limits
from tests.support.native.nodes import NewId, needs_cma

KEY = b"k" * 32
MAPPED, CMA, UNIX, STREAM = native.Lane.MAPPED, native.Lane.CMA, native.Lane.UNIX, native.Lane.STREAM
WINDOW_BYTES = 128 * 1024
FDS_MAX = 16
MARK = 0x55


class UnixProxy:
    """Forwards the first connection of a Unix socket, descriptors too, until it goes: with all that it has under way,
    and with the path itself. ``limit``: it goes by itself after so many bytes one way.
    """

    def __init__(self, path: pathlib.Path, to: str, limit: int | None = None) -> None:
        self.path, self.limit = path, limit
        self.listener = self.make()
        self.listener.bind(str(path))
        self.listener.listen()
        self.near = self.far = self.listener
        self.threads = [threading.Thread(target=self.serve, args=(to,))]
        self.threads[0].start()

    def make(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
        return made

    def serve(self, to: str) -> None:
        try:
            self.near, _ = self.listener.accept()
        except OSError:
            return
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
        self.far = self.make()
        self.far.connect(to)
        for origin, there in ((self.near, self.far), (self.far, self.near)):
            self.threads.append(threading.Thread(target=self.forward, args=(origin, there, self.limit)))
            self.threads[-1].start()

    def forward(self, origin: socket.socket, to: socket.socket, limit: int | None) -> None:
        room = array.array("i").itemsize * FDS_MAX
        try:
            while True:
                data, ancillary, _, _ = origin.recvmsg(min(65536, limit) if limit else 65536, socket.CMSG_SPACE(room))
                if not data:
                    break
                fds = array.array("i", b"".join(rights for _, _, rights in ancillary))
                to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [])
                for fd in fds:
                    socket.close(fd)
                if limit is not None and (limit := limit - len(data)) <= 0:
                    break
        except OSError:
            pass
        self.go()

    def go(self) -> None:
        self.path.unlink(missing_ok=True)
        for end in (self.near, self.far, self.listener):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self.go()
        for thread in self.threads:
            thread.join(10)
        for end in (self.near, self.far, self.listener):
            end.close()


Between = Callable[..., UnixProxy]


@pytest.fixture
def between(nodes: Any) -> Iterator[Between]:
    """Makes ``dialer`` know ``peer`` by a proxy before its Unix socket, and by TCP; ``peer`` then knows ``dialer``
    too, but for ``is_bearer``."""
    made: list[UnixProxy] = []

    def make(dialer: Any, peer: Any, limit: int | None = None, *, is_bearer: bool = False) -> UnixProxy:
        made.append(UnixProxy(nodes.directory / "between", peer.core.unix_path, limit))
        dialer.core.set_peer(
            peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=peer.core.tcp_port, unix_path=str(made[0].path)
        )
        if is_bearer:
            peer.core.admit(native.PeerAdmission.bearer_key(KEY))
        else:
            peer.core.set_peer(dialer.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path="")
        return made[0]

    yield make
    for node in nodes.made:
        node.core.close()
    for proxy in made:
        proxy.close()


@pytest.mark.parametrize("lane", [MAPPED, pytest.param(CMA, marks=needs_cma), UNIX], ids=["mapped", "cma", "unix"])
def test_a_pull_goes_on_by_tcp(nodes: Any, between: Between, new_id: NewId, lane: native.Lane) -> None:
    size, count, landed = 65536, 64, 24
    p = nodes("source", block_bytes=size, blocks=count, is_exposed=True)
    d = nodes("reader", block_bytes=size, blocks=count)
    p.fill_random()
    d.fill(0xEE)
    proxy, transfer, order = between(d, p), new_id(), np.random.default_rng(5).permutation(count)
    p.grant(transfer, order, ready=landed)
    d.pull(transfer, p, np.arange(count), lanes=[lane, STREAM])
    d.wait_for(native.TransferProgress, id=transfer, done=landed)
    assert d.content(range(landed)) == p.content(order[:landed])
    d.memory[: landed * size] = MARK  # a second read of these would write over it
    proxy.go()
    p.core.ready(transfer, count, complete=True)
    final = d.wait_drained(transfer)
    assert (final.state, final.lane, final.blocks_done) == (native.TransferState.COMMITTED, STREAM, count), final.text
    assert (final.attempts, final.lane_notes == "") == (2, False)
    assert set(d.memory[: landed * size].tolist()) == {MARK}
    assert d.content(range(landed, count)) == p.content(order[landed:])
    moved, rest = d.core.statistics(), (count - landed) * size
    by_first = {MAPPED: moved.bytes_mapped, CMA: moved.bytes_cma, UNIX: moved.bytes_streamed_in - rest}
    assert by_first[lane] == landed * size
    assert moved.bytes_mapped + moved.bytes_cma + moved.bytes_streamed_in == count * size
    assert p.core.statistics().bytes_streamed_out == rest + (landed * size if lane == UNIX else 0)


@pytest.mark.parametrize("is_bearer", [False, True], ids=["named", "bearer"])
@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_cut_while_bytes_are_under_way(nodes: Any, between: Between, new_id: NewId, verb: str, is_bearer: bool) -> None:
    size, count, cut = 32768, 1024, 12_000_000
    p, d = nodes("source"), nodes("reader")
    source, target = p.register(size * count), d.register(size * count)
    source.memory[:] = np.random.default_rng(6).integers(0, 256, size * count, dtype=np.uint8)
    target.memory[:] = 0xEE
    own, peer = (p, d) if verb == "push" else (d, p)
    between(own, peer, cut, is_bearer=is_bearer)
    transfer, rows = new_id(), [[(region.id, 0, size, size, count)] for region in (source, target)]
    local, remote = rows if verb == "push" else rows[::-1]
    own.post(verb, transfer, peer, local, remote, lanes=[UNIX, STREAM])
    final = own.wait_drained(transfer)
    assert (final.state, final.blocks_done) == (native.TransferState.COMMITTED, count), final.text
    assert np.array_equal(target.memory, source.memory)
    assert final.lane == STREAM
    # The frame that the cut tore comes twice.
    twice = d.core.statistics().bytes_streamed_in - size * count
    assert 0 <= twice <= 1 << 20


@pytest.mark.parametrize("lane", [MAPPED, pytest.param(CMA, marks=needs_cma)], ids=["mapped", "cma"])
@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_cut_amid_the_reads(nodes: Any, between: Between, new_id: NewId, verb: str, lane: native.Lane) -> None:
    """Thousands of reads, and the session goes after some. Where the host let them all end before, once more."""
    size, count = 4096, 16384
    limits = endpoint_limits(read_bytes_max=4 * size)
    for attempt in range(10):
        p, d = nodes(f"source{attempt}", limits=limits), nodes(f"reader{attempt}", limits=limits)
        source, target = p.register(size * count), d.register(size * count)
        source.memory[:] = np.random.default_rng(7).integers(1, 255, size * count, dtype=np.uint8)
        target.memory[:] = 0
        own, peer = (p, d) if verb == "push" else (d, p)
        proxy, transfer = between(own, peer), new_id()
        rows = [[(region.id, 0, size, size, count)] for region in (source, target)]
        local, remote = rows if verb == "push" else rows[::-1]
        own.post(verb, transfer, peer, local, remote, lanes=[lane, STREAM])
        watched = target.memory[64 * size :]
        while watched[0] == 0:
            pass
        proxy.go()
        final = own.wait_drained(transfer)
        assert (final.state, final.blocks_done) == (native.TransferState.COMMITTED, count), final.text
        assert np.array_equal(target.memory, source.memory)
        moved = d.core.statistics()
        assert moved.bytes_mapped + moved.bytes_cma + moved.bytes_streamed_in == size * count
        if final.lane == STREAM and moved.bytes_streamed_in > 0:
            return
    raise AssertionError("the session never went amid the reads")
