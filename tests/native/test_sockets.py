"""What a core asks of its TCP sockets, looked at from this process, where both ends are."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.limits import endpoint_limits
from tests.support.native.nodes import DIGEST, NewId
from tests.support.native.own_sockets import own_sockets, ports
from tests.support.native.rawpeer import KEY, RawPeer

SO_BUF_LOCK, SEND_LOCK = 72, 1
"""asm-generic/socket.h: which buffers were given a size, and are not the kernel's to size any more."""


@contextlib.contextmanager
def both_ends(nodes: Any, transfer: bytes) -> Iterator[list[socket.socket]]:
    """The two ends of a connection between two cores over which a block went."""
    p, d = nodes.pair()
    p.grant(transfer, [1])
    d.pull(transfer, p, [1], lanes=[native.Lane.STREAM])
    assert d.wait_drained(transfer).state == native.TransferState.COMMITTED
    with contextlib.ExitStack() as opened:
        yield [end for end in own_sockets(opened) if p.core.tcp_port in ports(end)]


def test_nodelay_on_both_ends(nodes: Any, new_id: NewId) -> None:
    with both_ends(nodes, new_id()) as ends:
        assert [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends] == [1, 1]


def test_on_loopback_the_send_buffer_is_bounded_and_the_receive_buffer_is_not(nodes: Any, new_id: NewId) -> None:
    with both_ends(nodes, new_id()) as ends:
        try:
            locks = [end.getsockopt(socket.SOL_SOCKET, SO_BUF_LOCK) for end in ends]
        except OSError:
            pytest.skip("this kernel does not tell whose size a buffer has")
        assert locks == [SEND_LOCK, SEND_LOCK]
        sizes = [end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends]
    with open("/proc/sys/net/core/wmem_max") as most:
        assert sizes == [2 * min(2 << 20, int(most.read()))] * 2, "the kernel counts each byte twice"


def test_blocks_that_no_verdict_follows_are_not_held(nodes: Any, new_id: NewId) -> None:
    """The end of a payload waits in the kernel for the verdict. Where none is due yet it goes out with the turn: with
    nothing on its way that is still to be acknowledged, the kernel would send it of its own accord 0.2 s later.
    """
    # Each block is a frame: the first goes out with a READY, the second alone.
    limits = endpoint_limits(data_bytes_max=4096)
    node = nodes("source", block_bytes=4096, blocks=20, limits=limits)
    peer, transfer, waits = RawPeer(), new_id(), []
    node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="")
    with contextlib.closing(peer):
        peer.dial(node.core)
        assert peer.socket is not None
        node.grant(transfer, range(20), ready=1)
        peer.say(native.Pull(transfer, 1, 7, native.Lane.STREAM, 0, 20, 4096, DIGEST, 10_000))
        peer.hear(native.Data)
        for ready in range(3, 20, 2):
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            begin = time.monotonic()
            node.core.ready(transfer, ready, complete=False)
            for _ in range(2):
                peer.hear(native.Data)
            waits.append(time.monotonic() - begin)
    assert statistics.median(waits) < 0.1, waits
