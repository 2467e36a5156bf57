"""Clients that send nothing more and wait for their answer, and clients that have left: at first they look alike."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import pathlib
import socket
import ssl
from collections.abc import Callable

import h11
import httptools
import pytest

from kvxfer.serving import half_closed
from kvxfer.serving.exchange import ClientExchange
from kvxfer.serving.server import HttpServer
from kvxfer.serving.tls import ServerTls, TlsFiles
from tests.support.certificates import Authority
from tests.support.serving.exchanges import KINDS, TEXT, ExchangeServer, exchanging, get
from tests.support.serving.servers import ConnectionPhase, eventually, head

pytestmark = pytest.mark.parametrize("kind", KINDS)


def is_half_closed(http: HttpServer) -> bool:
    """Whether the server knows of each connection that its client sends nothing more."""
    return all(getattr(one, "_half_closed", None) is not None for one in http.connections._phases)


class Slow:
    """A handler that answers when ``go`` is set: at once, or in pieces; and says whether its client left."""

    def __init__(self, *, is_stream: bool, pieces: int = 1) -> None:
        self.is_stream = is_stream
        self.pieces = pieces
        self.go = asyncio.Event()
        self.reads = asyncio.Event()
        self.gone = 0

    async def __call__(self, exchange: ClientExchange) -> None:
        left = asyncio.Event()

        def on_gone() -> None:
            self.gone += 1
            left.set()

        exchange.on_gone = on_gone
        body = await exchange.read_body()
        self.reads.set()
        if self.is_stream:
            exchange.start(200, TEXT)
            exchange.write(b"first ")
        waits = asyncio.ensure_future(self.go.wait())
        leaves = asyncio.ensure_future(left.wait())
        await asyncio.wait({waits, leaves}, return_when=asyncio.FIRST_COMPLETED)
        for task in (waits, leaves):
            task.cancel()
        if self.is_stream:
            for number in range(self.pieces):
                exchange.write(b"%d " % number * 20)
                await asyncio.sleep(0.02)
            exchange.write(body)
            exchange.end()
        else:
            exchange.respond(200, TEXT, body)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that may ever be sent to see whether a client is there is sent soon."""
    monkeypatch.setattr(half_closed, "PROBES_S", tuple(0.01 * number for number in range(len(half_closed.PROBES_S))))


async def ask_half(server: ExchangeServer, handler: Slow, data: bytes, *, wait_s: float = 0.0) -> bytes:
    """All that the server sends to a client that sends ``data`` and then nothing more."""
    reader, writer = await server.send(data)
    await asyncio.wait_for(handler.reads.wait(), 20)
    writer.write_eof()
    await eventually(lambda: is_half_closed(server.http))
    await asyncio.sleep(wait_s)
    handler.go.set()
    async with asyncio.timeout(20):
        return await reader.read()


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, mode: str) -> io.BytesIO:
        return self._file


def by_http_client(data: bytes) -> bytes:
    answer = http.client.HTTPResponse(_Bytes(data))  # type: ignore[arg-type]
    answer.begin()
    assert answer.status == 200
    return answer.read()


def by_h11(data: bytes) -> bytes:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, data
        if isinstance(event, h11.Data):
            body += event.data
    return body


def by_llhttp(data: bytes) -> bytes:
    class Reader:
        body = b""
        ends = 0

        def on_body(self, piece: bytes) -> None:
            self.body += piece

        def on_message_complete(self) -> None:
            self.ends += 1

    reader = Reader()
    httptools.HttpResponseParser(reader).feed_data(data)
    assert reader.ends >= 1
    return reader.body


CLIENTS: tuple[Callable[[bytes], bytes], ...] = (by_http_client, by_h11, by_llhttp)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_sends_nothing_more_gets_its_answer(kind: str, is_stream: bool) -> None:
    handler = Slow(is_stream=is_stream)
    async with exchanging(kind, handler) as server:
        data = await ask_half(server, handler, head(2) + b"ok")
        for read in CLIENTS:
            assert read(data).endswith(b"ok")
        assert is_stream or b"connection: close" in data  # that head was out before
        assert handler.gone == 0
        await eventually(lambda: len(server.http.connections) == 0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_all_that_is_sent_meanwhile_changes_nothing_of_the_answer(
    kind: str, is_stream: bool, often: None
) -> None:
    handler = Slow(is_stream=is_stream, pieces=5)
    async with exchanging(kind, handler) as server:
        data = await ask_half(server, handler, head(2) + b"ok", wait_s=0.2)
        expected = b"first " + b"".join(b"%d " % number * 20 for number in range(5)) + b"ok" if is_stream else b"ok"
        for read in CLIENTS:
            assert read(data) == expected
        assert handler.gone == 0


async def test_a_client_of_http_1_0_is_sent_its_answer_alone(kind: str, often: None) -> None:
    for is_stream in (False, True):
        handler = Slow(is_stream=is_stream)
        async with exchanging(kind, handler) as server:
            sent = b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nok"
            data = await ask_half(server, handler, sent, wait_s=0.1)
            assert data.startswith(b"HTTP/1.1 200")
            assert data.partition(b"\r\n\r\n")[2] in (b"ok", b"first " + b"0 " * 20 + b"ok")


async def test_head_is_answered_too(kind: str, often: None) -> None:
    handler = Slow(is_stream=True)
    async with exchanging(kind, handler) as server:
        data = await ask_half(server, handler, get(method="HEAD"), wait_s=0.1)
        assert data.endswith(b"\r\n\r\n")
        assert data.count(b"HTTP/1.1 200") == 1
        assert b"first" not in data


async def test_all_requests_that_were_sent_ahead_are_answered(kind: str) -> None:
    handler = Slow(is_stream=False)
    async with exchanging(kind, handler) as server:
        data = await ask_half(server, handler, b"".join(head(2) + b"%02d" % number for number in range(5)))
        answers = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [answer[-2:] for answer in answers[:-1]] == [b"00", b"01", b"02", b"03"]
        assert answers[-1].endswith(b"04")
        assert [b"connection: close" in answer for answer in answers] == [False] * 4 + [True]
        assert handler.gone == 0


@pytest.mark.parametrize("rest", [b"POST / HT", head(5) + b"x", b"\r\n\r\n"])
async def test_what_is_not_whole_is_not_waited_for(kind: str, rest: bytes) -> None:
    handler = Slow(is_stream=False)
    handler.go.set()
    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(head(2) + b"ok" + rest)
        writer.write_eof()
        async with asyncio.timeout(10):
            data = await reader.read()
        assert data.count(b"HTTP/1.1 200") == 1
        await eventually(lambda: len(server.http.connections) == 0)


async def test_a_client_that_ends_amid_its_request_has_left(kind: str) -> None:
    handler = Slow(is_stream=False)
    async with exchanging(kind, handler) as server:
        _, writer = await server.send(head(1000) + b"x")
        await server.wait_phase(ConnectionPhase.BODY, 1)
        writer.write_eof()
        await eventually(lambda: len(server.http.connections) == 0)
        await server.wait_ended(1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_waited_and_then_left_is_noticed(
    kind: str, is_stream: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next thing that is sent finds out; nothing more need come of the answer."""
    monkeypatch.setattr(half_closed, "PROBES_S", (0.0, 0.2, 0.4, 0.6))
    handler = Slow(is_stream=is_stream)
    async with exchanging(kind, handler) as server:
        _, writer = await server.send(head(2) + b"ok")
        await asyncio.wait_for(handler.reads.wait(), 20)
        writer.write_eof()
        await eventually(lambda: is_half_closed(server.http))
        await asyncio.sleep(0.05)
        assert handler.gone == 0
        if way == "reset":
            writer.transport.abort()
        else:
            writer.close()
        await eventually(lambda: handler.gone == 1, within_s=5)
        await eventually(lambda: len(server.http.connections) == 0)


async def test_a_client_that_takes_nothing_is_hung_up_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.WRITE_STALL_S", 0.3)
    handler = Slow(is_stream=False)
    async with exchanging(kind, handler, max_body_bytes=64 << 20) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        with contextlib.closing(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(sock.sendall, head(16 << 20) + bytes(16 << 20))
            sock.shutdown(socket.SHUT_WR)
            handler.go.set()
            await eventually(lambda: len(server.http.connections) == 0)


@pytest.fixture
def tls(tmp_path: pathlib.Path) -> tuple[ServerTls, ssl.SSLContext]:
    authority = Authority(tmp_path, "ca")
    issued = authority.issue("server")
    return ServerTls(TlsFiles(issued.cert, issued.key)), authority.client_context()


async def test_a_client_that_ends_tls_has_left(kind: str, tls: tuple[ServerTls, ssl.SSLContext]) -> None:
    """Both loops close a connection whose client ended TLS, whatever there is to send: TLS 1.2 demands it."""
    handler = Slow(is_stream=False)
    async with exchanging(kind, handler, tls=tls[0]) as server:

        def leave() -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as plain:
                sock = tls[1].wrap_socket(plain, server_hostname="127.0.0.1")
                sock.sendall(head(2) + b"ok")
                asyncio.run_coroutine_threadsafe(handler.reads.wait(), loop).result(20)
                sock.unwrap().close()

        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(asyncio.to_thread(leave), 20)
        await eventually(lambda: handler.gone == 1)
        await eventually(lambda: len(server.http.connections) == 0)
