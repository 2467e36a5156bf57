"""TLS below both ways of serving: what is spoken, whose certificates are taken, and what a handshake may cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import ssl
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from kvxfer.errors import ConfigError
from kvxfer.serving import accepting
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.exchange import ClientExchange
from kvxfer.serving.limits import ServingLimits
from kvxfer.serving.server import listening, ready_line, serving
from kvxfer.serving.tls import ServerTls, TlsFiles
from tests.support.certificates import Authority, Identity, common_name
from tests.support.serving.exchanges import (
    KINDS,
    TEXT,
    echo,
    exchanging,
    get,
    read_any,
    read_chunk,
    read_head,
    stream,
)
from tests.support.serving.servers import ConnectionPhase, eventually, hang_up, head, is_closed, logged

MIB = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def identity(authority: Authority) -> Identity:
    return authority.issue("server")


@pytest.fixture
def tls(identity: Identity) -> ServerTls:
    return ServerTls(TlsFiles(identity.cert, identity.key))


@pytest.fixture
def client(authority: Authority) -> ssl.SSLContext:
    return authority.client_context()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake has its time after a moment."""
    monkeypatch.setattr(accepting, "HANDSHAKE_FAIR_S", 0.1)


def shown(writer: asyncio.StreamWriter) -> str:
    """Common name of the certificate that the server showed."""
    return common_name(writer.get_extra_info("peercert"))


# What is spoken.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_answers_are_as_without_tls(
    kind: str, version: ssl.TLSVersion, tls: ServerTls, client: ssl.SSLContext
) -> None:
    client.maximum_version = version
    async with exchanging(kind, echo, tls=tls, client_context=client) as server:
        reader, writer = await server.send(head(5) + b"hello")
        assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
        for body in (b"hello", b"again"):
            status, headers, found = await read_any(reader)
            assert (status, headers["content-length"], found) == (200, "5", body)
            await server.wait_phase(ConnectionPhase.IDLE, 1)
            writer.write(head(5) + b"again")
        assert (await read_any(reader))[2] == b"again"
        assert (await server.ask(get("/asgi")))[2] == b"over ASGI"


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_come_in_chunks(kind: str, tls: ServerTls, client: ssl.SSLContext) -> None:
    async with exchanging(kind, stream, tls=tls, client_context=client) as server:
        reader, writer = await server.send(get())
        for _ in range(2):
            status, headers, body = await read_any(reader)
            assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"onetwo")
            writer.write(get())
        _, _, body = await server.ask(get(version="1.0"))  # its end is the connection's
        assert body == b"onetwo"


async def test_application_sees_https(tls: ServerTls, client: ssl.SSLContext) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(scope["scheme"])(scope, receive, send)

    settings = ServingLimits()
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        async with serving(app, listener, settings, Bodies(settings), connections_max=9, name="test http", tls=tls):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            writer.write(get())
            assert (await read_any(reader))[2] == b"https"
            await hang_up(writer)


def test_older_versions_are_not_spoken(tls: ServerTls) -> None:
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert tls.context.options & ssl.OP_NO_RENEGOTIATION


def test_ready_line_names_the_scheme() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert ready_line("x", "127.0.0.1", listener)["http_url"] == f"http://127.0.0.1:{port}"
        assert ready_line("x", "127.0.0.1", listener, scheme="https")["http_url"] == f"https://127.0.0.1:{port}"


@pytest.mark.parametrize("kind", KINDS)
async def test_large_bodies_go_both_ways(kind: str, tls: ServerTls, client: ssl.SSLContext) -> None:
    body = os.urandom(3 * MIB)
    limits = {"max_body_bytes": 4 * MIB}
    async with exchanging(kind, echo, tls=tls, client_context=client, **limits) as server:
        status, _, found = await server.ask(head(len(body)) + body)
        assert (status, found == body) == (200, True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_does_not_read_pauses_the_handler(
    kind: str, tls: ServerTls, client: ssl.SSLContext
) -> None:
    paused, resumed, written = asyncio.Event(), asyncio.Event(), 0

    async def flood(exchange: ClientExchange) -> None:
        nonlocal written
        exchange.on_pause, exchange.on_resume = paused.set, resumed.set
        exchange.start(200, TEXT)
        while not paused.is_set():
            exchange.write(b"x" * 65536)
            written += 65536
            assert written < 512 * MIB
            await asyncio.sleep(0)
        await resumed.wait()
        exchange.end()

    async with exchanging(kind, flood, tls=tls, client_context=client) as server:
        reader, _ = await server.send(get())
        await asyncio.wait_for(paused.wait(), 20)
        await read_head(reader)
        size = 0
        while chunk := await read_chunk(reader):
            size += len(chunk)
        assert size == written


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_is_told_of(kind: str, tls: ServerTls, client: ssl.SSLContext) -> None:
    gone, began = asyncio.Event(), asyncio.Event()

    async def wait(exchange: ClientExchange) -> None:
        exchange.on_gone = gone.set
        exchange.start(200, TEXT)
        exchange.write(b"some")
        began.set()
        await gone.wait()

    async with exchanging(kind, wait, tls=tls, client_context=client) as server:
        for way in ("close", "abort"):
            gone.clear()
            began.clear()
            _, writer = await server.send(get())
            await asyncio.wait_for(began.wait(), 20)
            writer.close() if way == "close" else writer.transport.abort()
            await asyncio.wait_for(gone.wait(), 20)


async def test_an_early_answer_reaches_a_client_that_is_still_sending(tls: ServerTls, client: ssl.SSLContext) -> None:
    async def refuse(exchange: ClientExchange) -> None:
        exchange.respond(413, TEXT, b"too long")

    async with exchanging("direct", refuse, tls=tls, client_context=client) as server:
        reader, writer = await server.send(head(8 * MIB) + b"x" * MIB)
        writer.write(b"x" * MIB)
        status, headers, body = await read_any(reader)
        assert (status, headers["connection"], body) == (413, "close", b"too long")
        await eventually(lambda: len(server.http.connections) == 0)
        assert await is_ended(reader)


async def is_ended(reader: asyncio.StreamReader) -> bool:
    """As ``is_closed``; TLS has an error of its own for an end without a word."""
    try:
        return await is_closed(reader)
    except ssl.SSLError:
        return True


# Certificates.


async def test_clients_without_a_certificate_are_refused_where_one_is_needed(
    authority: Authority, identity: Identity, tmp_path: pathlib.Path
) -> None:
    tls = ServerTls(TlsFiles(identity.cert, identity.key, authority.cert))
    other = Authority(tmp_path, "other")
    foreign = other.issue("client")
    own = authority.client_context(authority.issue("client"))
    strange = authority.client_context(foreign)
    with logged(logging.WARNING) as records:
        async with exchanging("direct", echo, tls=tls, client_context=own) as server:
            assert (await server.ask(head(2) + b"ok"))[0] == 200
            for wrong in (authority.client_context(), strange):
                server.client_context = wrong
                with pytest.raises((OSError, asyncio.IncompleteReadError)):  # TLS 1.3 tells it with the first read
                    await server.ask(head(2) + b"ok")
            server.client_context = own
            assert (await server.ask(head(2) + b"ok"))[0] == 200
            assert len(server.exchanges) == 2
    assert not records


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLObject:
    """The client's end of a connection on which it has read some data. Raises SSLError where there is none."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (end, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    other.write(b"data")
    assert end.read() == b"data"
    return end


@pytest.mark.parametrize("asks", [True, False])
def test_a_session_is_resumed_only_where_no_certificate_is_judged(
    authority: Authority, identity: Identity, asks: bool
) -> None:
    """A resumed handshake would let a certificate in that has ended."""
    server = TlsFiles(identity.cert, identity.key, authority.cert if asks else "").context()
    client = authority.client_context(authority.issue("client"))
    first = shaken(server, client)
    assert (first.version(), first.session_reused) == ("TLSv1.3", False)
    assert shaken(server, client, first.session).session_reused is not asks
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    if asks:
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
            shaken(server, client)
    else:
        assert shaken(server, client).version() == "TLSv1.2"


async def test_changed_files_are_for_new_connections(authority: Authority, tmp_path: pathlib.Path) -> None:
    first, second = authority.issue("first"), authority.issue("second")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def put(identity: Identity) -> None:
        for source, target in ((identity.cert, cert), (identity.key, key)):
            fresh = target.with_suffix(".new")
            fresh.write_bytes(pathlib.Path(source).read_bytes())
            os.replace(fresh, target)

    put(first)
    tls = ServerTls(TlsFiles(str(cert), str(key)), poll_s=0.02)
    async with tls.watched, exchanging("direct", echo, tls=tls, client_context=authority.client_context()) as server:
        old_reader, old_writer = await server.send(head(2) + b"ok")
        assert shown(old_writer) == "ca-first"
        assert (await read_any(old_reader))[0] == 200
        before = tls.context
        put(second)
        await eventually(lambda: tls.context is not before)
        _, writer = await server.send(head(2) + b"ok")
        assert shown(writer) == "ca-second"
        old_writer.write(head(2) + b"ok")
        assert (await read_any(old_reader))[0] == 200


def test_bad_files_change_nothing_and_are_told_once(authority: Authority, tmp_path: pathlib.Path) -> None:
    identity = authority.issue("kept")
    cert = tmp_path / "both.pem"
    cert.write_bytes(pathlib.Path(identity.cert).read_bytes() + pathlib.Path(identity.key).read_bytes())
    tls = ServerTls(TlsFiles(str(cert)))
    before = tls.context
    with logged(logging.WARNING) as records:
        cert.write_text("no certificate")
        for _ in range(3):
            tls.watched.poll()
        assert tls.context is before
        [record] = records
        assert "tls_cert_file" in record.getMessage()
        cert.unlink()
        for _ in range(3):
            tls.watched.poll()
        assert tls.context is before
        assert len(records) == 2


def test_files_that_do_not_do_are_named(authority: Authority, identity: Identity, tmp_path: pathlib.Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for files in (
        TlsFiles(str(tmp_path / "missing.pem")),
        TlsFiles(str(wrong)),
        TlsFiles(identity.cert),
        TlsFiles(identity.cert, authority.issue("other").key),
    ):
        with pytest.raises(ConfigError, match=f"tls_cert_file.*{files.cert_file}"):
            files.context()
    with pytest.raises(ConfigError, match=f"tls_client_ca_file.*{wrong}"):
        TlsFiles(identity.cert, identity.key, str(wrong)).context()


# Handshakes.


async def test_a_handshake_has_a_deadline(tls: ServerTls, client: ssl.SSLContext) -> None:
    async with exchanging("direct", echo, tls=tls, client_context=client, header_timeout_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await is_closed(reader)
        writer.close()


async def test_bytes_that_are_no_tls_end_the_connection(tls: ServerTls, client: ssl.SSLContext) -> None:
    with logged(logging.WARNING) as records:
        async with exchanging("direct", echo, tls=tls, client_context=client) as server:
            for noise in (get(), b"\x16\x03\x01\xff\xff" + bytes(100), b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(noise)
                writer.write_eof()
                try:
                    async with asyncio.timeout(20):
                        await reader.read()
                except ConnectionError:
                    pass
                writer.close()
            assert (await server.ask(head(2) + b"ok"))[0] == 200
            assert len(server.exchanges) == 1
    assert not records


async def test_stalled_handshakes_keep_no_request_out(tls: ServerTls, client: ssl.SSLContext, quick: None) -> None:
    async with exchanging("direct", echo, tls=tls, client_context=client, connections_max=4) as server:
        stalled = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        async with asyncio.timeout(20):
            for _ in range(5):
                reader, writer = await server.send(head(2) + b"ok")
                assert (await read_any(reader))[0] == 200
                writer.close()
        for _, writer in stalled:
            writer.close()


async def test_handshakes_have_a_bound_of_their_own(
    tls: ServerTls, client: ssl.SSLContext, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 3)
    async with exchanging("direct", echo, tls=tls, client_context=client) as server:
        reader, writer = await server.send(head(2) + b"ok")
        assert (await read_any(reader))[0] == 200
        stalled = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10)]
        async with asyncio.timeout(20):
            assert (await server.ask(head(2) + b"ok"))[0] == 200
        writer.write(head(2) + b"ok")  # what was open before was not given up for them
        assert (await read_any(reader))[0] == 200
        for _, stalled_writer in stalled:
            stalled_writer.close()


async def test_many_handshakes_at_once_all_succeed(
    tls: ServerTls, client: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKES_MAX", 4)
    async with exchanging("direct", echo, tls=tls, client_context=client) as server:
        answers = await asyncio.gather(*(server.ask(head(2) + b"ok") for _ in range(50)))
        assert [status for status, _, _ in answers] == [200] * 50


async def test_a_stop_ends_handshakes(tls: ServerTls, client: ssl.SSLContext) -> None:
    async with exchanging("direct", echo, tls=tls, client_context=client) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await server.ask(head(2) + b"ok"))[0] == 200
    assert await is_closed(reader)
    writer.close()


async def test_a_full_server_gives_up_idle_connections(tls: ServerTls, client: ssl.SSLContext) -> None:
    async with exchanging("direct", echo, tls=tls, client_context=client, connections_max=3) as server:
        for _ in range(10):
            reader, _ = await server.send(head(2) + b"ok")
            assert (await read_any(reader))[0] == 200
            assert len(server.http.connections) <= 3 + 4
