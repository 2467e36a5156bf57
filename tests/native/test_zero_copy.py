"""What goes to a peer under this kernel without a copy: when, and whose verdict it needs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support.kernel import has_zero_copy_on_unix
from tests.support.native.nodes import DIGEST, NewId
from tests.support.native.own_sockets import own_sockets, ports
from tests.support.native.rawpeer import KEY, RawPeer

STREAM, UNIX = native.Lane.STREAM, native.Lane.UNIX
LANES = [
    STREAM,
    pytest.param(
        UNIX,
        marks=pytest.mark.skipif(not has_zero_copy_on_unix(), reason="Unix sockets send zero-copy from Linux 6.5 on"),
    ),
]
BOTH = pytest.mark.parametrize("lane", LANES)
TOTAL = 8 << 20
OFFERED = 256 << 10
"""To the socket at a time."""


def move(nodes: Any, transfer: bytes, block_bytes: int, lane: Any, **options: Any) -> tuple[Any, Any, Any]:
    """All blocks of one node to another, in a random order; both, and how it ended."""
    count = TOTAL // block_bytes
    p, d = nodes.pair(block_bytes=block_bytes, blocks=count, **options)
    p.fill_random()
    d.fill(0xEE)
    order = np.random.default_rng(3).permutation(count)
    p.grant(transfer, order)
    d.pull(transfer, p, np.arange(count), lanes=[lane])
    final = d.wait_drained(transfer)
    assert final.state == native.TransferState.COMMITTED, final.text
    assert d.content(range(count)) == p.content(order)
    return p, d, final


def spliced(node: Any) -> int:
    return int(node.core.statistics().bytes_spliced_out)


@BOTH
@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20, 2 << 20])
def test_blocks_go_out_without_a_copy(nodes: Any, new_id: NewId, block_bytes: int, lane: Any) -> None:
    p, d, _ = move(nodes, new_id(), block_bytes, lane, is_exposed=True)
    assert spliced(p) == p.core.statistics().bytes_streamed_out == TOTAL
    assert p.core.counts().grants.verdicts_ok == 1
    assert spliced(d) == 0


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"block_bytes": 65536, "is_exposed": False}, id="exposure-is-grant"),
        pytest.param({"block_bytes": 65536, "is_exposed": True, "has_checksums": True}, id="with-checksums"),
        pytest.param({"block_bytes": 1024, "is_exposed": True}, id="too-small"),
        pytest.param(
            {"block_bytes": 4096, "is_exposed": True, "segments": [(512, 4096, 4096)], "region_bytes": TOTAL + 4096},
            id="half-of-each-page",
        ),
    ],
)
def test_small_checksummed_or_unexposed_blocks_are_copied(
    nodes: Any, new_id: NewId, options: dict[str, Any], lane: Any
) -> None:
    p, _, _ = move(nodes, new_id(), lane=lane, **options)
    assert (spliced(p), p.core.statistics().bytes_streamed_out) == (0, TOTAL)


@BOTH
@pytest.mark.parametrize("is_exposed", [True, False])
@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_registered_memory(p: Any, d: Any, new_id: NewId, verb: str, is_exposed: bool, lane: Any) -> None:
    source, target = p.register(TOTAL, is_foreign=True, is_exposed=is_exposed), d.register(TOTAL, is_foreign=True)
    source.memory[:] = np.random.default_rng(4).integers(0, 256, TOTAL, dtype=np.uint8)
    target.memory[:] = 0xEE
    ours, theirs = ([(one.id, 0, 65536, 65536, TOTAL // 65536)] for one in (source, target))
    transfer = new_id()
    if verb == "fetch":
        d.fetch(transfer, p, theirs, ours, lanes=[lane])
    else:
        p.push(transfer, d, ours, theirs, lanes=[lane])
    final = (d if verb == "fetch" else p).wait_drained(transfer)
    assert final.state == native.TransferState.COMMITTED, final.text
    assert np.array_equal(source.memory, target.memory)
    assert spliced(p) == (TOTAL if is_exposed else 0)


@BOTH
def test_a_pipe_that_is_not_to_be_had(nodes: Any, new_id: NewId, lane: Any) -> None:
    """Blocks are copied, then: the peer was told to ask for its verdict, and does."""
    p, d = nodes.pair(block_bytes=65536, blocks=64, is_exposed=True)
    p.fill_random()
    d.fill(0xEE)
    first, second = new_id(), new_id()
    p.grant(first, [0])  # 64 KiB are not sent zero-copy: no pipe is there yet
    d.pull(first, p, [0], lanes=[lane])
    assert d.wait_drained(first).state == native.TransferState.COMMITTED
    p.grant(second, np.arange(1, 64))
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with contextlib.ExitStack() as full:
            with contextlib.suppress(OSError):
                while True:
                    full.callback(os.close, os.dup(0))
            d.pull(second, p, np.arange(1, 64), lanes=[lane])
            final = d.wait_drained(second)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    assert final.state == native.TransferState.COMMITTED, final.text
    assert d.content(range(64)) == p.content(range(64))
    assert spliced(p) == 0


def narrow(node: Any) -> None:
    """A Unix socket takes chunks of 64 KiB: with the buffer that it has as a rule, all of what it is offered."""
    with contextlib.ExitStack() as opened:
        for end in own_sockets(opened):
            if end.family == socket.AF_UNIX and end.getsockname() == node.core.unix_path:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)


@pytest.fixture(params=LANES)
def asking(nodes: Any, new_id: NewId, request: pytest.FixtureRequest) -> Iterator[tuple[Any, RawPeer, bytes]]:
    """A source with 8 MiB granted, a raw peer that has asked for them and taken nothing, the transfer."""
    core = {"progress": "caller"}
    node = nodes("source", block_bytes=65536, blocks=TOTAL // 65536, is_exposed=True, core=core)
    node.fill_random()
    lane, peer, transfer = request.param, RawPeer(), new_id()
    is_unix = lane == UNIX
    node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="/nowhere" if is_unix else "")
    with contextlib.closing(peer):
        peer.dial(node.core, kind=native.SessionKind.UNIX if is_unix else native.SessionKind.TCP)
        assert peer.socket is not None
        peer.socket.settimeout(10)
        if is_unix:
            narrow(node)
        node.grant(transfer, range(TOTAL // 65536))
        peer.say(native.Pull(transfer, 1, 7, lane, 0, TOTAL // 65536, 65536, DIGEST, 10_000))
        peer.lane = lane
        yield node, peer, transfer


def take_all(peer: RawPeer) -> bytes:
    payload = b""
    while len(payload) < TOTAL:
        assert peer.hear(native.Data).is_zero_copy
        payload += peer.payload
    return payload


def test_the_reader_has_to_ask(asking: tuple[Any, RawPeer, bytes]) -> None:
    node, peer, transfer = asking
    assert take_all(peer) == node.memory.tobytes()
    assert peer.socket is not None
    peer.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peer.hear(native.Verdict)
    peer.socket.settimeout(10)
    peer.say(native.Confirm(transfer, 5))
    assert peer.hear(native.Verdict).code == native.Code.ok


@pytest.mark.parametrize("asking", LANES[1:], indirect=True)
def test_a_descriptor_behind_zero_copy_blocks(asking: tuple[Any, RawPeer, bytes], new_id: NewId) -> None:
    """What has to be said with a descriptor waits for the blocks that are under way, and loses neither them nor it."""
    node, peer, _ = asking
    other = new_id()
    node.wait(lambda _: spliced(node) > 0, "blocks are under way")
    node.grant(other, [3])
    peer.say(native.Pull(other, 2, 7, native.Lane.MAPPED, 0, 1, 65536, DIGEST, 0))
    payload, maps = b"", []
    while len(payload) < TOTAL or not maps:
        frame = peer.hear(native.Data, native.Map)
        if isinstance(frame, native.Map):
            maps.append(frame)
        else:
            payload += peer.payload
    assert payload == node.memory.tobytes()
    (descriptor,) = peer.descriptors
    assert os.pread(descriptor, node.memory.size, 0) == node.memory.tobytes()


def test_read_after_the_grant_ended_is_not_confirmed(asking: tuple[Any, RawPeer, bytes]) -> None:
    """The kernel has references to megabytes whose grant ends, and whose owner puts other blocks there."""
    node, peer, transfer = asking
    wait_until(lambda: spliced(node) != 0)
    time.sleep(0.1)
    granted = node.memory.tobytes()
    node.core.end_grant(transfer, native.GrantEvent.REVOKE)
    node.fill(0x55)
    assert 0 < spliced(node) < TOTAL
    read = b""
    while not isinstance(frame := peer.hear(object), native.Revoke):
        read += peer.payload if isinstance(frame, native.Data) else b""
    assert read[:65536] == b"\x55" * 65536 != granted[:65536], (
        "zero-copy bytes are those that are there when they are read"
    )
    peer.say(native.Confirm(transfer, 5))
    assert peer.hear(native.Verdict).code == native.Code.grant_revoked


def test_a_connection_that_takes_no_more_raises_no_signal(asking: tuple[Any, RawPeer, bytes]) -> None:
    """splice() raises SIGPIPE, where send() is asked not to: in a caller that runs the loop. The core's threads block
    it."""
    node, peer, _ = asking
    wait_until(lambda: spliced(node) != 0)
    time.sleep(0.1)  # until no more goes
    assert spliced(node) < TOTAL
    raised: list[int] = []

    def cut() -> None:
        assert peer.socket is not None
        time.sleep(0.1)
        if peer.socket.family == socket.AF_UNIX:
            peer.socket.shutdown(socket.SHUT_RD)
        else:
            port = peer.socket.getsockname()[1]
            with contextlib.ExitStack() as opened:
                ends = [one for one in own_sockets(opened) if ports(one) == {port, node.core.tcp_port}]
                next(one for one in ends if one.getpeername()[1] == port).shutdown(socket.SHUT_WR)
        with contextlib.suppress(EOFError, ConnectionError):
            peer.hear(native.Revoke)

    cuts = threading.Thread(target=cut)
    before = signal.signal(signal.SIGPIPE, lambda number, _: raised.append(number))
    try:
        cuts.start()
        end = time.monotonic() + 10
        while node.core.statistics().connections:
            assert time.monotonic() < end
            node.core.wait(10**9)
            node.take()
    finally:
        cuts.join()
        signal.signal(signal.SIGPIPE, before)
    assert raised == []


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.no_sanitizer  # it measures processor time
def test_a_reader_that_is_slow_or_still_takes_no_processor_from_its_source(
    asking: tuple[Any, RawPeer, bytes],
) -> None:
    """The IO thread sleeps while a socket is full, and is up only when the reader has made room."""
    node, peer, _ = asking
    wait_until(lambda: spliced(node) != 0)
    time.sleep(0.1)
    begun_s = thread_seconds()
    time.sleep(0.5)
    assert thread_seconds() - begun_s < 0.005
    assert peer.socket is not None
    begun_s, taken = thread_seconds(), 0
    while taken < TOTAL:
        taken += len(peer.socket.recv(65536))
        time.sleep(0.002)
    assert thread_seconds() - begun_s < TOTAL / 131072 * 100e-6, "the socket was full some 64 times"


def thread_seconds() -> float:
    """Processor time of all IO threads of this process."""
    tasks = [one for one in pathlib.Path("/proc/self/task").iterdir() if (one / "comm").read_text() == "kvxfer-io\n"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_revoked_zero_copy_blocks_are_not_sent_with_the_next_grant(asking: tuple[Any, RawPeer, bytes]) -> None:
    """Part of a frame waits behind a full socket when its grant ends; then another goes over that connection."""
    node, peer, transfer = asking
    wait_until(lambda: spliced(node) != 0)
    time.sleep(0.1)
    wait_until(lambda: spliced(node) % OFFERED != 0)  # the socket took part of what it was offered
    node.core.end_grant(transfer, native.GrantEvent.REVOKE)
    while not isinstance(peer.hear(object), native.Revoke):
        pass
    node.fill_random(9)
    following = transfer[:-1] + bytes([transfer[-1] ^ 1])
    node.grant(following, range(TOTAL // 65536))
    peer.say(native.Pull(following, 1, 8, peer.lane, 0, TOTAL // 65536, 65536, DIGEST, 10_000))
    assert take_all(peer) == node.memory.tobytes()
    peer.say(native.Confirm(following, 6))
    assert peer.hear(native.Verdict).code == native.Code.ok


def test_a_connection_that_is_reset_leaves_no_descriptor(nodes: Any, new_id: NewId) -> None:
    node = nodes("source", block_bytes=65536, blocks=TOTAL // 65536, is_exposed=True)
    held = []
    for _ in range(12):
        peer, transfer = RawPeer(), new_id()
        node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="")
        with contextlib.closing(peer):
            peer.dial(node.core)
            assert peer.socket is not None
            before = spliced(node)
            node.grant(transfer, range(TOTAL // 65536))
            peer.say(native.Pull(transfer, 1, 7, STREAM, 0, TOTAL // 65536, 65536, DIGEST, 10_000))
            wait_until(lambda before=before: spliced(node) != before)
            time.sleep(0.05)
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: node.core.statistics().connections == 0)
        node.core.end_grant(transfer, native.GrantEvent.REVOKE)
        held.append(len(os.listdir("/proc/self/fd")))
    assert held[-1] <= held[1]
