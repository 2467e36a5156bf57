"""Sessions come up between proven agents only, and what breaks them costs a transfer no more than time."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import ClosedError, InvalidArgumentError, PeerGoneError, TransportError
from tests.support.native.cutting_proxy import CuttingProxy
from tests.support.native.nodes import NewId

MAPPED, STREAM = native.Lane.MAPPED, native.Lane.STREAM
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
each_lane = pytest.mark.parametrize("lane", [MAPPED, STREAM], ids=["mapped", "stream"])
KEY = b"k" * 32


def test_cut_in_the_middle_goes_on(nodes: Any) -> None:
    """A session cut inside payloads and inside headers: each attempt asks for the rest, and the whole commits."""
    p, d = nodes.pair(block_bytes=8192, blocks=400)
    proxy = CuttingProxy(p.core.tcp_port, [100, 150, 300_000, 301_111, 1_500_001, 5])
    try:
        d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=proxy.address, unix_path="")
        p.core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=d.core.tcp_port, unix_path="")
        transfer = d.pull_granted(p, np.arange(400), np.arange(400), lanes=[STREAM])
        final = d.wait_drained(transfer)
        assert (final.state, final.code) == (COMMITTED, native.Code.ok), final.text
        assert proxy.cut >= 3
        assert final.attempts >= 3
        assert d.memory.tobytes() == p.memory.tobytes()
    finally:
        d.core.close()
        proxy.close()


@each_lane
def test_source_closes_in_the_middle(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair(block_bytes=65536, blocks=256, reader={"limits": nodes.limits(reconnect_ns=1_000_000_000)})
    transfer = new_id()
    p.grant(transfer, np.arange(256), ready=200)
    d.pull(transfer, p, np.arange(256), lanes=[lane])
    d.wait_for(native.TransferProgress, id=transfer)
    p.core.close()
    final = d.wait_drained(transfer)
    assert final.state == FAILED
    assert final.code == native.Code.peer_gone
    assert d.is_idle()
    with pytest.raises(ClosedError):
        p.core.end_grant(transfer, native.GrantEvent.REVOKE)


@each_lane
def test_the_known_death_of_a_peer(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    p, d = nodes.pair()
    q = nodes("another-source")
    nodes.join(q, d)
    reader_dies, source_dies = new_id(), new_id()
    p.grant(reader_dies, [1, 2], ready=1)
    q.grant(source_dies, [3, 4], ready=1)
    d.pull(reader_dies, p, [1, 2], lanes=[lane])
    d.pull(source_dies, q, [3, 4], lanes=[lane])
    d.wait_for(native.TransferProgress, id=reader_dies)
    d.wait_for(native.TransferProgress, id=source_dies)
    p.core.peer_dead(d.ref)
    assert p.wait_for(native.GrantEnded, id=reader_dies).state == native.GrantState.READER_GONE
    d.core.peer_dead(q.ref)
    final = d.wait_drained(source_dies)
    assert (final.state, final.code) == (FAILED, native.Code.peer_gone)
    d.core.peer_dead(p.ref)
    assert d.wait_drained(reader_dies).state == FAILED
    with pytest.raises(PeerGoneError):
        d.pull(new_id(), p, [5])
    with pytest.raises(PeerGoneError):
        d.core.notify(p.ref, b"hello")


@each_lane
def test_wrong_key(nodes: Any, lane: native.Lane) -> None:
    limits = nodes.limits(reconnect_ns=1_000_000_000)
    p, d = nodes("source"), nodes("reader", limits=limits)
    nodes.join(p, d, key=b"1" * 32, other_key=b"2" * 32)
    transfer = d.pull_granted(p, [1], [1], lanes=[lane])
    final = d.wait_drained(transfer)
    assert final.state == FAILED
    assert final.code == native.Code.unauthenticated
    refused = d.wait_for(native.SessionRefused, code=native.Code.unauthenticated)
    assert refused.peer == p.ref
    assert "proof" in refused.text
    assert p.core.counts().sessions_up == 0


def test_an_unregistered_peer_is_told_why(nodes: Any, new_id: NewId) -> None:
    p, d = nodes("source"), nodes("reader", limits=nodes.limits(reconnect_ns=1_000_000_000))
    d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=p.core.tcp_port, unix_path="")
    transfer = new_id()
    d.pull(transfer, p, [1], lanes=[STREAM])
    assert d.wait_drained(transfer).state == FAILED
    assert "not known here" in d.wait_for(native.SessionRefused).text
    told = p.wait_for(native.SessionRefused, code=native.Code.unauthenticated)
    assert told.peer is None


def test_another_incarnation_is_another_peer(nodes: Any, new_id: NewId) -> None:
    p, d = nodes("source"), nodes("reader", limits=nodes.limits(reconnect_ns=1_000_000_000))
    before = native.AgentRef("source", 1, b"x" * 16)
    d.core.set_peer(before, KEY, tcp_host="127.0.0.1", tcp_port=p.core.tcp_port, unix_path=p.core.unix_path)
    transfer = new_id()
    d.pull(transfer, before, [1])
    final = d.wait_drained(transfer)
    assert final.state == FAILED
    assert "not the incarnation that was dialed" in d.wait_for(native.SessionRefused).text


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", native.encode(native.Ping(native.PingKind.ASK, 1)), b"KX\x01\x01\xff\xff\xff\xff"],
)
def test_noise_at_the_door(nodes: Any, kind: str, said: bytes) -> None:
    """A connection that is no peer is closed; the handshake has a time limit."""
    limits = nodes.limits()
    limits.handshake_ns = 200_000_000
    p = nodes("source", limits=limits)
    family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as noise:
        noise.settimeout(10)
        noise.connect(("127.0.0.1", p.core.tcp_port) if kind == "tcp" else p.core.unix_path)
        noise.sendall(said)
        heard = b""
        while data := noise.recv(4096):
            heard += data
    if said:
        decoder = native.Decoder()
        decoder.feed(heard)
        error = decoder.next()
        assert isinstance(error, native.ErrorFrame)
        assert error.code == native.Code.protocol
    assert p.wait_for(native.SessionRefused).peer is None
    deadline = time.monotonic() + 10
    while p.core.statistics().connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert p.core.statistics().connections == 0


def test_unreachable_source(nodes: Any, new_id: NewId) -> None:
    d = nodes("reader", limits=nodes.limits(reconnect_ns=1_000_000_000))
    gone = native.AgentRef("gone", 1, os.urandom(16))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    d.core.set_peer(gone, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path="/nowhere/at/all")
    transfer = new_id()
    d.pull(transfer, gone, [1])
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.peer_gone)
    assert "nowhere" in final.lane_notes
    assert "refused" in final.text


def test_silent_source(nodes: Any, new_id: NewId) -> None:
    """A listener that never answers: the dial has a time limit, and the transfer a bound."""
    limits = nodes.limits(reconnect_ns=500_000_000)
    limits.handshake_ns = 150_000_000
    d = nodes("reader", limits=limits)
    mute = native.AgentRef("mute", 1, os.urandom(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        d.core.set_peer(mute, KEY, tcp_host="127.0.0.1", tcp_port=listener.getsockname()[1], unix_path="")
        transfer = new_id()
        d.pull(transfer, mute, [1], lanes=[STREAM])
        final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.peer_gone)


def test_notification_after_the_peer_came_back(nodes: Any) -> None:
    limits = nodes.limits(stall_ns=100_000_000)
    p, d = nodes("source", limits=limits), nodes("reader")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    p.core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path="")
    p.core.notify(d.ref, b"early")
    time.sleep(0.1)
    nodes.join(p, d, key=KEY)
    assert d.wait_for(native.NotifReceived).payload == b"early"
    p.wait_for(native.NotifDelivered, seq=1)


def test_port_and_path_taken(nodes: Any, private_directories: pathlib.Path) -> None:
    p = nodes("source")
    ref = native.AgentRef("other", 1, os.urandom(16))

    def other(port: int, path: str, host: str = "127.0.0.1") -> native.Core:
        return native.Core(ref, native.EndpointLimits(), bind_host=host, bind_port=port, unix_path=path)

    with pytest.raises(TransportError, match=r"127\.0\.0\.1:\d+.*in use"):
        other(p.core.tcp_port, "").start()
    with pytest.raises(TransportError, match="another process"):
        other(0, p.core.unix_path).start()
    with pytest.raises(InvalidArgumentError, match="107 bytes"):
        other(0, "/" + "x" * 200).start()
    with pytest.raises(InvalidArgumentError, match="numeric"):
        other(0, "", "localhost").start()
    stale = private_directories / "sockets" / "stale"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
    assert stale.exists()
    core = other(0, str(stale))
    core.start()
    core.close()
    core.close()
    assert not stale.exists()
    with pytest.raises(ClosedError):
        core.start()


def test_loopback_of_the_other_family(nodes: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    d = nodes("reader")
    ref = native.AgentRef("six", 1, os.urandom(16))
    core = native.Core(ref, native.EndpointLimits(), bind_host="::1", bind_port=0, unix_path="")
    core.start()
    try:
        core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=d.core.tcp_port, unix_path="")
        d.core.set_peer(ref, KEY, tcp_host="::1", tcp_port=core.tcp_port, unix_path="")
        d.core.notify(ref, b"over six")
        d.wait_for(native.NotifDelivered)
    finally:
        core.close()
