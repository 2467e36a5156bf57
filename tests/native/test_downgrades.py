"""A machine on the way tries to talk two ends out of their encryption, and to play a recorded session again: no end
sends a byte without TLS, none takes an older session for a new one, and the end has a documented code.
"""

from __future__ import annotations

import contextlib
import pathlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvxfer._native import _core as native
from tests.support.certificates import Authority
from tests.support.native.nodes import POISON, Node
from tests.support.native.record_proxy import RECORD_TYPES, TO, RecordProxy

STREAM = [native.Lane.STREAM]
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
KEY = b"k" * 32
BLOCKS, BLOCK_BYTES = 4, 40_000
RECONNECT_NS = 300_000_000
ANSWER_S = 5.0


def node(nodes: Any, name: str, encrypt: str) -> Node:
    limits = nodes.limits(reconnect_ns=RECONNECT_NS, stall_ns=RECONNECT_NS, handshake_ns=RECONNECT_NS)
    shape: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "has_unix": False, "limits": limits}
    made: Node = nodes(name, core={"encrypt": encrypt}, **shape)
    return made


def introduce(p: Node, d: Node, port: int) -> None:
    """Make the two known to each other; the reader dials ``port``."""
    d.core.set_peer(p.ref, KEY, tcp_host="127.0.0.1", tcp_port=port, unix_path="")
    p.core.set_peer(d.ref, KEY, tcp_host="127.0.0.1", tcp_port=0, unix_path="")


def say(port: int, *pieces: bytes) -> bytes:
    """Dial, send the pieces, and return all that is answered until the other end hangs up."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as dialed, contextlib.suppress(OSError):
        for piece in pieces:
            dialed.sendall(piece)
            if select.select([dialed], [], [], 0.05)[0]:
                answer += dialed.recv(1 << 20)
        while data := dialed.recv(1 << 20):
            answer += data
    return answer


def client_hello(highest: ssl.TLSVersion) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = highest
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="source").do_handshake()
    return outgoing.read()


def frames_in(data: bytes) -> list[Any]:
    decoder = native.Decoder()
    decoder.feed(data)
    return list(iter(decoder.next, None))


@pytest.mark.parametrize("highest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls-1.2", "without-secret"])
def test_a_client_of_an_older_tls_or_without_the_secret_is_no_peer(nodes: Any, highest: ssl.TLSVersion) -> None:
    p = node(nodes, "source", "always")
    answer = say(p.core.tcp_port, client_hello(highest))
    assert answer[0] in RECORD_TYPES or [frame.code for frame in frames_in(answer)] == [native.Code.protocol]
    assert p.wait_for(native.SessionRefused).code == native.Code.protocol
    assert p.core.statistics().sessions_tcp == 0


def test_a_plain_hello_where_tls_is_due_is_refused(nodes: Any) -> None:
    p, d = node(nodes, "source", "always"), node(nodes, "reader", "always")
    introduce(p, d, p.core.tcp_port)
    hello = native.Hello(native.HelloStep.DIAL, d.ref, p.ref, bytes(32), bytes(32))
    (answer,) = frames_in(say(p.core.tcp_port, native.encode(hello)))
    assert (answer.code, b"encrypted sessions only" in answer.text) == (native.Code.no_lane, True)
    assert p.core.statistics().sessions_tcp == 0


class FalseSource:
    """Listens in the source's place, and answers each dialer in its own way; keeps what the dialers sent."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer = answer
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                dialer, _ = self._listener.accept()
            except OSError:
                return
            with dialer, contextlib.suppress(OSError):
                dialer.settimeout(0.5)
                first = dialer.recv(1 << 16, socket.MSG_PEEK)
                self.heard.append(first)
                self._answer(dialer, first)
                while data := dialer.recv(1 << 16):
                    self.heard[-1] += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def false_source() -> Iterator[Callable[[Callable[[socket.socket, bytes], None]], FalseSource]]:
    made: list[FalseSource] = []

    def make(answer: Callable[[socket.socket, bytes], None]) -> FalseSource:
        made.append(FalseSource(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_reader_gave_nothing(p: Node, d: Node, source: FalseSource) -> None:
    """The reader ends by a documented code, has written to no block, and said nothing but TLS."""
    d.fill(POISON)
    transfer = b"t" * 16
    d.pull(transfer, p, range(BLOCKS), lanes=STREAM)
    final = d.wait_drained(transfer)
    assert (final.state, final.code in (native.Code.no_lane, native.Code.peer_gone)) == (FAILED, True), final.text
    assert (d.memory == POISON).all()
    assert d.core.statistics().sessions_tcp == 0
    assert source.heard
    assert all(heard[:1] == b"\x16" for heard in source.heard), "a byte went out without TLS"


@pytest.mark.parametrize("says", ["no_lane", "protocol", "hello"])
def test_an_answer_without_tls_gets_no_plain_byte(nodes: Any, false_source: Any, says: str) -> None:
    p, d = node(nodes, "source", "always"), node(nodes, "reader", "always")

    def answer(dialer: socket.socket, first: bytes) -> None:
        accept = native.Hello(native.HelloStep.ACCEPT, p.ref, d.ref, bytes(32), bytes(32))
        code = native.Code.no_lane if says == "no_lane" else native.Code.protocol
        error = native.ErrorFrame(bytes(16), 0, code, b"this end does not encrypt")
        dialer.sendall(native.encode(accept if says == "hello" else error))

    source = false_source(answer)
    introduce(p, d, source.port)
    assert_reader_gave_nothing(p, d, source)
    assert len(source.heard) > 1, "the reader believed the first answer, which had no proof"


@pytest.mark.parametrize("highest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["tls-1.2", "certificate"])
def test_a_tls_server_without_the_secret_is_no_peer(
    nodes: Any, false_source: Any, tmp_path: pathlib.Path, highest: ssl.TLSVersion
) -> None:
    """Its certificate is signed by some CA: nothing here believes one."""
    identity = Authority(tmp_path).issue("source")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = highest
    context.load_cert_chain(identity.cert, identity.key)
    p, d = node(nodes, "source", "always"), node(nodes, "reader", "always")

    def answer(dialer: socket.socket, first: bytes) -> None:
        with contextlib.suppress(ssl.SSLError):
            context.wrap_socket(dialer.dup(), server_side=True).close()

    source = false_source(answer)
    introduce(p, d, source.port)
    assert_reader_gave_nothing(p, d, source)


class VersionStripper(RecordProxy):
    """Each ClientHello offers TLS 1.2 in place of 1.3."""

    hits = 0

    def _pass(self, way: str, one: bytes) -> tuple[list[bytes], str, bool]:
        offered = b"\x00\x2b\x00\x03\x02\x03\x04"
        if way == TO and offered in one:
            self.hits += 1
            return [one.replace(offered, offered[:-1] + b"\x03")], "", False
        return [one], "", False


def test_an_offer_that_is_changed_to_an_older_tls_is_no_session(nodes: Any) -> None:
    p, d = node(nodes, "source", "always"), node(nodes, "reader", "always")
    p.fill_random()
    d.fill(POISON)
    with VersionStripper(p.core.tcp_port) as proxy:
        introduce(p, d, proxy.port)
        final = d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM))
    assert proxy.hits > 1
    assert (final.state, final.code in (native.Code.no_lane, native.Code.peer_gone)) == (FAILED, True), final.text
    assert (d.memory == POISON).all()
    assert p.core.statistics().bytes_streamed_out == 0


@pytest.mark.parametrize("encrypt", ["always", "never"])
def test_a_recorded_session_that_is_replayed_is_no_session(nodes: Any, false_source: Any, encrypt: str) -> None:
    """To the source in the reader's place and to the reader in the source's, with and without encryption."""
    p, d = node(nodes, "source", encrypt), node(nodes, "reader", encrypt)
    p.fill_random()
    recorded: dict[str, list[bytes]] = {"to": [], "from": []}
    with RecordProxy(p.core.tcp_port) as proxy:
        proxy.watched = lambda way, data: recorded[way].append(data)
        introduce(p, d, proxy.port)
        assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
        p.wait(lambda _: p.is_idle(), "the release")
    again = b"g" * 16
    p.grant(again, range(BLOCKS))
    sent = p.core.statistics().bytes_streamed_out
    say(p.core.tcp_port, *recorded["to"])
    say(p.core.tcp_port, b"".join(recorded["to"]))
    p.wait(lambda _: len(p.find(native.SessionRefused)) > 1, "both replays to be refused")
    assert {event.code for event in p.find(native.SessionRefused)} == {native.Code.unauthenticated}
    assert p.core.statistics().bytes_streamed_out == sent
    assert p.core.statistics().sessions_tcp == 0

    source = false_source(lambda dialer, first: dialer.sendall(b"".join(recorded["from"])))
    introduce(p, d, source.port)
    d.fill(POISON)
    d.pull(again, p, range(BLOCKS), lanes=STREAM)
    final = d.wait_drained(again)
    assert (final.state, final.code in (native.Code.unauthenticated, native.Code.peer_gone)) == (FAILED, True)
    assert (d.memory == POISON).all()
    assert d.core.statistics().sessions_tcp == 0
    introduce(p, d, p.core.tcp_port)
    p.core.end_grant(again, native.GrantEvent.REVOKE)
    p.wait(lambda _: p.is_idle(), "the blocks of the grant that was not read")
    assert d.wait_drained(d.pull_granted(p, range(BLOCKS), range(BLOCKS), lanes=STREAM)).state == COMMITTED
