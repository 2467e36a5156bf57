"""Unregistered agents that a core admits: known while one of their sessions is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer._native import _core as native
from kvxfer.errors import InvalidArgumentError, PeerGoneError
from tests.support.machines.admissions import ADMISSIONS

NewId = Callable[[], bytes]
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED


@pytest.fixture(params=ADMISSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def meet(peer: Any, host: Any, key: bytes) -> None:
    peer.core.set_peer(host.ref, key, tcp_host="127.0.0.1", tcp_port=host.core.tcp_port, unix_path=host.core.unix_path)


def rows(region: Any, count: int = 8) -> list[tuple[int, int, int, int, int]]:
    return [(region.id, 0, 512, 512, count)]


@pytest.mark.parametrize("lane", [native.Lane.MAPPED, native.Lane.UNIX, native.Lane.STREAM])
def test_an_admitted_peer_reads_and_writes(nodes: Any, new_id: NewId, kind: str, lane: native.Lane) -> None:
    host, peer = nodes("host"), nodes("peer")
    host.core.admit(ADMISSIONS[kind].admission)
    meet(peer, host, ADMISSIONS[kind].key(host.ref, peer.ref))
    theirs, ours = host.register(4096), peer.register(4096)
    theirs.memory[:] = 5
    there, back = new_id(), new_id()
    peer.fetch(there, host, rows(ours), rows(theirs), lanes=[lane])
    assert peer.wait_drained(there).state == COMMITTED
    assert set(ours.memory.tolist()) == {5}
    ours.memory[:] = 6
    peer.push(back, host, rows(ours), rows(theirs), lanes=[lane], notification=b"written")
    assert peer.wait_drained(back).state == COMMITTED
    assert set(theirs.memory.tolist()) == {6}
    assert host.wait_for(native.NotifReceived).sender == peer.ref
    host.core.notify(peer.ref, b"welcome")
    assert peer.wait_for(native.NotifReceived).payload == b"welcome"
    peer.core.close()
    deadline = time.monotonic() + 10
    while host.core.counts().peers and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerGoneError):
        host.core.notify(peer.ref, b"too late")
    assert host.is_idle()


def test_a_peer_with_another_key_is_refused(nodes: Any, new_id: NewId, kind: str) -> None:
    host, peer = nodes("host"), nodes("peer", limits=nodes.limits(reconnect_ns=1_000_000_000))
    host.core.admit(ADMISSIONS[kind].admission)
    with pytest.raises(InvalidArgumentError):
        host.core.admit(next(other.admission for name, other in ADMISSIONS.items() if name != kind))
    meet(peer, host, b"w" * 32)
    theirs, ours = host.register(4096), peer.register(4096)
    transfer = new_id()
    peer.fetch(transfer, host, rows(ours), rows(theirs), lanes=[native.Lane.STREAM])
    final = peer.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.unauthenticated)
    assert host.core.counts().peers == 0


def test_a_registered_peer_that_dials_proves_the_bearer_key_too(nodes: Any, new_id: NewId) -> None:
    """That is the key of the host's metadata; the one a peer was registered with is proven where the host dials."""
    host, bearer = nodes("host"), nodes("bearer")
    host.core.admit(ADMISSIONS["bearer"].admission)
    host.core.set_peer(bearer.ref, b"n" * 32, tcp_host="127.0.0.1", tcp_port=bearer.core.tcp_port, unix_path="")
    meet(bearer, host, ADMISSIONS["bearer"].key(host.ref, bearer.ref))
    theirs, ours = host.register(4096), bearer.register(4096)
    transfer = new_id()
    bearer.fetch(transfer, host, rows(ours), rows(theirs), lanes=[native.Lane.STREAM])
    assert bearer.wait_drained(transfer).state == COMMITTED
    assert host.core.counts().peers == 1
    bearer.core.close()
    time.sleep(0.05)
    assert host.core.counts().peers == 1, "registered, and therefore known without a session"
