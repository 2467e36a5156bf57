"""A session that is hung up on in the middle of a payload: its grant stays, and so what was begun is true."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.nodes import DIGEST, NewId
from tests.support.native.rawpeer import KEY, RawPeer

BLOCK, BLOCKS = 1 << 20, 16


@pytest.mark.parametrize("lane", [native.Lane.STREAM, native.Lane.UNIX])
@pytest.mark.parametrize("is_exposed", [False, True], ids=["copied", "zero-copy"])
def test_the_rest_of_a_payload_is_no_zeros(nodes: Any, new_id: NewId, is_exposed: bool, lane: Any) -> None:
    """Flaw: the rest went out as zeros. A reader that had the frame whole could ask over the next session whether the
    grant was alive. It was, and zeros were committed.
    """
    node = nodes("source", block_bytes=BLOCK, blocks=BLOCKS, is_exposed=is_exposed)
    node.fill(0x55)
    peer, transfer = RawPeer(), new_id()
    is_unix = lane == native.Lane.UNIX
    node.core.set_peer(peer.ref, KEY, tcp_host="127.0.0.1", tcp_port=1, unix_path="/nowhere" if is_unix else "")
    with contextlib.closing(peer):
        peer.dial(node.core, kind=native.SessionKind.UNIX if is_unix else native.SessionKind.TCP)
        assert peer.socket is not None
        peer.socket.settimeout(10)
        node.grant(transfer, range(BLOCKS))
        peer.say(native.Pull(transfer, 1, 7, lane, 0, BLOCKS, BLOCK, DIGEST, 10_000))
        peer.hear(native.Data)
        assert select.select([peer.socket], [], [], 10)[0]
        time.sleep(0.1)  # until more of them fill the socket
        peer.socket.sendall(b"no frame at all" * 10)
        whole, told = 1, None
        with contextlib.suppress(EOFError, ConnectionError):
            while not isinstance(told := peer.hear(object), native.ErrorFrame):
                if isinstance(told, native.Data):
                    assert peer.payload == bytes([0x55]) * BLOCK
                    whole += 1
        assert isinstance(told, native.ErrorFrame)
        assert told.code == native.Code.protocol
    assert 1 < whole < BLOCKS, "it was hung up on in the middle"
    assert node.core.counts().grants.alive == 1
