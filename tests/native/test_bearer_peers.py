"""Unregistered agents that hold our metadata: known while one of their sessions is up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvxfer._native import _core as native
from kvxfer.errors import PeerGoneError
from tests.support.native.nodes import NewId

KEY = b"g" * 32
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED


def meet(bearer: Any, host: Any, key: bytes = KEY) -> None:
    bearer.core.set_peer(
        host.ref, key, tcp_host="127.0.0.1", tcp_port=host.core.tcp_port, unix_path=host.core.unix_path
    )


def rows(region: Any, count: int = 8) -> list[tuple[int, int, int, int, int]]:
    return [(region.id, 0, 512, 512, count)]


@pytest.mark.parametrize("lane", [native.Lane.MAPPED, native.Lane.UNIX, native.Lane.STREAM])
def test_a_bearer_peer_reads_and_writes(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    host, bearer = nodes("host"), nodes("bearer")
    host.core.accept_bearer_key(KEY)
    meet(bearer, host)
    theirs, ours = host.register(4096), bearer.register(4096)
    theirs.memory[:] = 5
    there, back = new_id(), new_id()
    bearer.fetch(there, host, rows(ours), rows(theirs), lanes=[lane])
    assert bearer.wait_drained(there).state == COMMITTED
    assert set(ours.memory.tolist()) == {5}
    ours.memory[:] = 6
    bearer.push(back, host, rows(ours), rows(theirs), lanes=[lane], notification=b"written")
    assert bearer.wait_drained(back).state == COMMITTED
    assert set(theirs.memory.tolist()) == {6}
    assert host.wait_for(native.NotifReceived).sender == bearer.ref
    host.core.notify(bearer.ref, b"welcome")
    assert bearer.wait_for(native.NotifReceived).payload == b"welcome"
    bearer.core.close()
    deadline = time.monotonic() + 10
    while host.core.counts().peers and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerGoneError):
        host.core.notify(bearer.ref, b"too late")
    assert host.is_idle()


def test_wrong_bearer_key(nodes: Any, new_id: NewId) -> None:
    host, bearer = nodes("host"), nodes("bearer", limits=nodes.limits(reconnect_ns=1_000_000_000))
    host.core.accept_bearer_key(KEY)
    meet(bearer, host, b"w" * 32)
    theirs, ours = host.register(4096), bearer.register(4096)
    transfer = new_id()
    bearer.fetch(transfer, host, rows(ours), rows(theirs), lanes=[native.Lane.STREAM])
    final = bearer.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.unauthenticated)
    assert host.core.counts().peers == 0


def test_a_named_peer_that_dials_proves_the_bearer_key_too(nodes: Any, new_id: NewId) -> None:
    """That is the key of the host's metadata; the one a peer was named with is proven where the host dials."""
    host, bearer = nodes("host"), nodes("bearer")
    host.core.accept_bearer_key(KEY)
    host.core.set_peer(bearer.ref, b"n" * 32, tcp_host="127.0.0.1", tcp_port=bearer.core.tcp_port, unix_path="")
    meet(bearer, host)
    theirs, ours = host.register(4096), bearer.register(4096)
    transfer = new_id()
    bearer.fetch(transfer, host, rows(ours), rows(theirs), lanes=[native.Lane.STREAM])
    assert bearer.wait_drained(transfer).state == COMMITTED
    assert host.core.counts().peers == 1
    bearer.core.close()
    time.sleep(0.05)
    assert host.core.counts().peers == 1, "named, and therefore known without a session"
