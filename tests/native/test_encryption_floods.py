"""A peer that proved its key and then sends records without data: it gets a part of the thread, and never all of it."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.native.tls_peer import KEY, TlsPeer

STREAM = [native.Lane.STREAM]
COMMITTED = native.TransferState.COMMITTED
UPDATES = 80_000
"""A turn takes less than 5,000 of them, and a transfer of one block a few turns."""
IN_A_TURN = 4_000
FIRST_BYTES = 1 << 18
"""Of the flood, sent before the transfer begins."""
LONG_NS = 60_000_000_000


@pytest.fixture
def flooder() -> Iterator[TlsPeer]:
    peer = TlsPeer("flooder")
    yield peer
    peer.close()


def flood_of(peer: TlsPeer, has_data: bool) -> bytes:
    """Key updates; with data among them, each turn gives out a byte of a frame. What comes last is no frame, and
    the core answers it."""
    for turn in range(UPDATES // IN_A_TURN):
        peer.update_keys(IN_A_TURN)
        if has_data:
            peer.write(peer.hello[turn : turn + 1])
    peer.write(bytes([0xFF]) * 5000)
    return peer.take()


@pytest.mark.parametrize("has_data", [False, True], ids=["alone", "among-data"])
def test_a_flood_of_key_updates_does_not_hold_the_others(nodes: Any, flooder: TlsPeer, has_data: bool) -> None:
    patient = {"limits": nodes.limits(handshake_ns=LONG_NS)}  # the flooder says no HELLO
    p, d = nodes.pair(core={"encrypt": "always"}, has_unix=False, source=patient)
    p.core.set_peer(flooder.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path="")
    assert d.wait_drained(d.pull_granted(p, [0], [0], lanes=STREAM)).state == COMMITTED
    flooder.dial(p.core)
    flood = flood_of(flooder, has_data)
    assert len(flooder.hello) > UPDATES // IN_A_TURN
    assert flooder.socket is not None
    flooder.socket.sendall(flood[:FIRST_BYTES])
    sending = threading.Thread(target=flooder.socket.sendall, args=(flood[FIRST_BYTES:],))
    sending.start()
    assert d.wait_drained(d.pull_granted(p, [1], [1], lanes=STREAM)).state == COMMITTED
    is_over = bool(select.select([flooder.socket], [], [], 0)[0])
    answered, _, _ = select.select([flooder.socket], [], [], 60)
    sending.join()
    assert answered, "the flood was not read to its end"
    assert p.wait_for(native.SessionRefused).code == native.Code.protocol
    assert not is_over, "the transfer waited until the flood was over"
    assert d.content([1]) == p.content([1])
