"""Sessions through TLS: the bytes are right and no proxy on the way reads or changes them, neither end is talked out of
what it wants, and a session whose key is wrong, or that has no OpenSSL, is refused by name."""

from __future__ import annotations

import ssl
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from tests.support import child
from tests.support.native.bending_proxy import BendingProxy
from tests.support.native.nodes import POISON, NewId

STREAM = [native.Lane.STREAM]
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
ALWAYS, NEVER = {"encrypt": "always"}, {"encrypt": "never"}
BLOCKS, BLOCK_BYTES = 64, 65536
SHAPE: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "has_unix": False}
MARK = b"these bytes are for the reader alone"


def through(proxy: BendingProxy, reader: Any, source: Any, key: bytes = b"k" * 32) -> None:
    """Make the two known to each other; what the reader dials is the proxy."""
    reader.core.set_peer(source.ref, key, tcp_host="127.0.0.1", tcp_port=proxy.port, unix_path="")
    source.core.set_peer(reader.ref, key, tcp_host="127.0.0.1", tcp_port=0, unix_path="")


@pytest.mark.parametrize("block_bytes", [1000, 4096, 65536, 1 << 20])
def test_the_bytes_are_right(nodes: Any, block_bytes: int) -> None:
    p, d = nodes.pair(core=ALWAYS, has_unix=False, blocks=16, block_bytes=block_bytes)
    order = np.random.default_rng(1).permutation(16)
    final = d.wait_drained(d.pull_granted(p, order, range(16), lanes=STREAM))
    assert final.state == COMMITTED
    assert d.content(range(16)) == p.content(order)
    for node in (p, d):
        assert node.core.statistics().sessions_tls == node.core.statistics().sessions_tcp == 1
    assert p.core.statistics().bytes_spliced_out == 0


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_a_listener_on_the_way_reads_nothing(nodes: Any, is_encrypted: bool) -> None:
    p, d = (
        nodes("source", core=ALWAYS if is_encrypted else NEVER, **SHAPE),
        nodes("reader", core=ALWAYS if is_encrypted else NEVER, **SHAPE),
    )
    p.memory[: len(MARK)] = np.frombuffer(MARK, np.uint8)
    with BendingProxy(p.core.tcp_port) as proxy:
        through(proxy, d, p)
        assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
        assert (MARK in proxy.seen) is not is_encrypted


def test_checksums_go_through_too(nodes: Any) -> None:
    p, d = nodes.pair(core=ALWAYS, has_checksums=True, **SHAPE)
    assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
    assert d.content(range(BLOCKS)) == p.content(range(BLOCKS))


@pytest.mark.parametrize("verb", ["fetch", "push"])
@pytest.mark.parametrize("foreign", ["neither", "local", "remote", "both"])
def test_registered_memory(nodes: Any, new_id: NewId, verb: str, foreign: str) -> None:
    size = 3 << 20
    p, d = nodes.pair(core=ALWAYS, has_unix=False)
    local = d.register(size, is_foreign=foreign in ("local", "both"))
    remote = p.register(size, is_foreign=foreign in ("remote", "both"))
    origin, target = (remote, local) if verb == "fetch" else (local, remote)
    origin.memory[:] = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    target.memory[:] = POISON
    for wants_checksums in (False, True):
        transfer = new_id()
        rows = [(local.id, 0, 0, size, 1)], [(remote.id, 0, 0, size, 1)]
        d.post(verb, transfer, p, *rows, lanes=STREAM, wants_checksums=wants_checksums)
        assert d.wait_drained(transfer).state == COMMITTED
        assert (origin.memory == target.memory).all()


def test_both_ends_agree_or_the_transfer_ends_by_name(nodes: Any) -> None:
    for ours, theirs, what in ((NEVER, ALWAYS, "encrypted sessions only"), (ALWAYS, NEVER, "no encrypted sessions")):
        p, d = nodes("source-" + what[:2], core=theirs, **SHAPE), nodes("reader-" + what[:2], core=ours, **SHAPE)
        nodes.join(p, d)
        final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=STREAM))
        assert (final.state, final.code) == (FAILED, native.Code.no_lane)
        assert what in final.text
        assert p.wait_for(native.SessionRefused).code == native.Code.no_lane
        assert p.core.statistics().bytes_streamed_out == 0
        assert d.content(range(4)) == [bytes([0]) * BLOCK_BYTES] * 4


def test_a_dialer_that_insists_is_served_within_a_host(nodes: Any) -> None:
    p, d = nodes.pair(source={"core": {"encrypt": "auto"}}, reader={"core": ALWAYS}, **SHAPE)
    assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
    assert p.core.statistics().sessions_tls == 1


def test_within_a_host_sessions_are_plain_by_default(nodes: Any) -> None:
    p, d = nodes.pair(**SHAPE)
    assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
    assert (p.core.statistics().sessions_tcp, p.core.statistics().sessions_tls) == (1, 0)


def test_a_wrong_key_is_unauthenticated(nodes: Any) -> None:
    limits = nodes.limits(reconnect_ns=200_000_000)
    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, limits=limits, **SHAPE)
    nodes.join(p, d, key=b"k" * 32, other_key=b"o" * 32)
    final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=STREAM))
    assert (final.state, final.code) == (FAILED, native.Code.unauthenticated)
    assert "proof is wrong" in final.text
    assert p.wait_for(native.SessionRefused).code == native.Code.unauthenticated
    assert p.core.statistics().sessions_tcp == 0


def test_an_unknown_agent_is_unauthenticated(nodes: Any) -> None:
    limits = nodes.limits(reconnect_ns=200_000_000)
    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, limits=limits, **SHAPE)
    d.core.set_peer(p.ref, b"k" * 32, tcp_host="127.0.0.1", tcp_port=p.core.tcp_port, unix_path="")
    final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=STREAM))
    assert (final.state, final.code) == (FAILED, native.Code.unauthenticated)
    assert "not known here" in final.text


def test_another_incarnation_than_the_dialed_one_says_so(nodes: Any) -> None:
    limits = nodes.limits(reconnect_ns=200_000_000)
    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, limits=limits, **SHAPE)
    gone = native.AgentRef("source", 99, b"g" * 16)
    d.core.set_peer(gone, b"k" * 32, tcp_host="127.0.0.1", tcp_port=p.core.tcp_port, unix_path="")
    p.core.set_peer(d.ref, b"k" * 32, tcp_host="127.0.0.1", tcp_port=d.core.tcp_port, unix_path="")
    transfer = b"t" * 16
    d.pull(transfer, gone, range(4), lanes=STREAM)
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.peer_gone)
    assert "not the incarnation that was dialed" in final.text


AFTER_HANDSHAKE = 100_000
"""Bytes that the source sent by then: it is within the blocks."""


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("times", [1, 10_000], ids=["once", "always"])
def test_a_changed_bit_is_noticed_and_never_delivered(nodes: Any, times: int) -> None:
    def bend(connection: int, offset: int, data: bytes) -> bytes:
        at = AFTER_HANDSHAKE - offset
        return flipped(data, at) if connection < times and 0 <= at < len(data) else data

    limits = nodes.limits(reconnect_ns=3_000_000_000 if times == 1 else 200_000_000)
    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, limits=limits, **SHAPE)
    p.fill_random()
    d.fill(POISON)
    with BendingProxy(p.core.tcp_port, bend) as proxy:
        through(proxy, d, p)
        final = d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM))
    assert d.core.statistics().tls_failures >= 1
    assert ((d.memory == p.memory) | (d.memory == POISON)).all()
    if times == 1:
        assert final.state == COMMITTED
        assert d.content(range(BLOCKS)) == p.content(range(BLOCKS))
    else:
        assert (final.state, final.code) == (FAILED, native.Code.peer_gone)
        assert "an encrypted session broke" in final.text


@pytest.mark.parametrize("cut", [0, 3, 200, AFTER_HANDSHAKE])
def test_a_cut_connection_is_dialed_again(nodes: Any, cut: int) -> None:
    def bend(connection: int, offset: int, data: bytes) -> bytes:
        return data[: max(cut - offset, 0)] if connection == 0 and offset + len(data) > cut else data

    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, **SHAPE)
    p.fill_random()
    with BendingProxy(p.core.tcp_port, bend) as proxy:
        through(proxy, d, p)
        final = d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM))
        assert proxy.connections > 1
    assert final.state == COMMITTED
    assert d.content(range(BLOCKS)) == p.content(range(BLOCKS))


def test_a_handshake_that_is_changed_on_the_way_is_no_session(nodes: Any) -> None:
    def bend(connection: int, offset: int, data: bytes) -> bytes:
        return flipped(data, 60) if offset == 0 and len(data) > 60 else data

    limits = nodes.limits(reconnect_ns=200_000_000)
    p, d = nodes("source", core=ALWAYS, **SHAPE), nodes("reader", core=ALWAYS, limits=limits, **SHAPE)
    with BendingProxy(p.core.tcp_port, bend) as proxy:
        through(proxy, d, p)
        final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=STREAM))
    assert (final.state, final.code) == (FAILED, native.Code.peer_gone)
    assert "TLS" in final.text
    assert d.core.statistics().sessions_tcp == 0


def test_keys_change_while_a_session_is_used(nodes: Any) -> None:
    p, d = nodes.pair(core={**ALWAYS, "records_per_key": 16}, **SHAPE)
    for _ in range(3):
        d.fill(POISON)
        assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
        assert d.content(range(BLOCKS)) == p.content(range(BLOCKS))
    assert p.core.statistics().tls_key_updates >= 3 * BLOCKS * BLOCK_BYTES // (16 * 16384)
    assert p.core.statistics().tls_failures == d.core.statistics().tls_failures == 0


def python_fails_as_it_should() -> None:
    """Python's own TLS, most often by the same library: its error is the one that its own bytes cause."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        ours.do_handshake()
    incoming.write(b"this is no record of TLS")
    with pytest.raises(ssl.SSLError, match=r"WRONG_VERSION_NUMBER|wrong version number"):
        ours.do_handshake()


def test_pythons_own_tls_works_beside_it(nodes: Any) -> None:
    python_fails_as_it_should()
    peers = [nodes(f"source-{number}", core=ALWAYS, **SHAPE) for number in range(4)]
    d = nodes("reader", core=ALWAYS, limits=nodes.limits(reconnect_ns=2_000_000_000), **SHAPE)
    for number, p in enumerate(peers):
        nodes.join(p, d, other_key=b"w" * 32 if number == 3 else None, key=b"k" * 32)
        p.fill(number + 1)
    pulls = [d.pull_granted(p, range(4), range(4 * n, 4 * n + 4), lanes=STREAM) for n, p in enumerate(peers)]
    states = []
    for pull in pulls:
        python_fails_as_it_should()
        states.append(d.wait_drained(pull).state)
    python_fails_as_it_should()
    assert states == [COMMITTED] * 3 + [FAILED]
    assert [int(d.block(4 * number)[0]) for number in range(3)] == [1, 2, 3]


def test_without_openssl_nothing_plain_goes_out() -> None:
    """In a process of its own: what is loaded stays."""
    source = """
        import os, pathlib, tempfile
        from kvxfer._native import _core as native
        from tests.support.native.nodes import Nodes
        with tempfile.TemporaryDirectory() as directory:
            nodes = Nodes(pathlib.Path(directory), [])
            core = {"encrypt": "always", "openssl_library": "libssl-is-not-here.so.3"}
            p, d = nodes.pair(source={"core": {"encrypt": "never"}}, reader={"core": core}, has_unix=False)
            final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=[native.Lane.STREAM]))
            print(final.code.name, final.text)
            assert p.core.statistics().frames_in == 0, "the dialer said something without TLS"
            p, d = nodes.pair(source={"core": core}, reader={"core": {"encrypt": "never"}}, has_unix=False)
            final = d.wait_drained(d.pull_granted(p, range(4), range(4), lanes=[native.Lane.STREAM]))
            print(final.code.name, final.text)
            assert p.core.statistics().bytes_streamed_out == 0
            for node in nodes.made:
                node.core.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=60,
        env=child.environment(),
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("no_lane")
    assert "OpenSSL cannot be used" in first
    assert "insecure" in first
    assert second.startswith("no_lane")
    assert "encrypted sessions only" in second
