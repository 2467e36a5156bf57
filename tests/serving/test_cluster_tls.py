"""TLS of a server that is of the cluster: no client gets in under files that count no more."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import ssl

import pytest

from kvxfer.serving.cluster_tls import ClusterTls
from kvxfer.serving.tls import ServerTls, TlsFiles
from kvxfer.trust.identity import CertRole
from tests.support.serving.exchanges import echo, exchanging
from tests.support.serving.servers import head
from tests.support.trust import ClusterAuthority
from tests.support.worker_http import caller_context

pytest.importorskip("cryptography")


class HeldClient:
    """A client of which each step of the handshake is sent when the test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
        self._reader = reader
        self._writer = writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()

    def send(self) -> None:
        """What it has ready."""
        self._writer.write(self._outgoing.read())

    async def hear(self) -> None:
        """The server's part of the handshake."""
        while True:
            data = await self._reader.read(1 << 16)
            assert data, "the server hung up"
            self._incoming.write(data)
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass

    async def ask(self) -> bytes:
        """The status line that comes back for a request that is sent with whatever is ready; none from a server that
        hangs up."""
        self._tls.write(head(2) + b"ok")
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            self.send()
            while data := await self._reader.read(1 << 16):
                self._incoming.write(data)
                with contextlib.suppress(ssl.SSLWantReadError):
                    return self._tls.read(1 << 16).partition(b"\r\n")[0]
        return b""


@pytest.mark.parametrize("held", ["hello", "end"])
@pytest.mark.parametrize("is_cluster", [True, False])
async def test_a_handshake_that_spans_a_change_of_the_files(
    tmp_path: pathlib.Path, held: str, is_cluster: bool
) -> None:
    """The client's CA is taken away before the client has sent that part of the handshake. A server that only serves
    TLS goes on with it, and one of the cluster hangs up without a look at the request."""
    kept, gone = ClusterAuthority(tmp_path / "kept"), ClusterAuthority(tmp_path / "gone")
    cas = tmp_path / "cas.pem"
    cas.write_bytes(kept.ca_bytes + gone.ca_bytes)
    own = kept.issue(CertRole.DECODE, "d0")
    files = TlsFiles(str(own.cert_file), str(own.key_file), str(cas))
    tls = ClusterTls(files) if is_cluster else ServerTls(files)
    known = caller_context(kept.ca_file, kept.issue(CertRole.ROUTER, "r0"))
    dropped = caller_context(kept.ca_file, gone.issue(CertRole.ROUTER, "r1"))
    async with asyncio.timeout(20), exchanging("direct", echo, tls=tls, client_context=dropped) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        server.writers.append(writer)
        client = HeldClient(reader, writer, dropped)
        if held == "end":
            client.send()
            await client.hear()
        assert (await server.ask(head(2) + b"ok"))[0] == 200  # so the one before it was accepted
        cas.write_bytes(kept.ca_bytes)
        tls.load()
        if held == "hello":
            client.send()
            await client.hear()
        assert await client.ask() == (b"" if is_cluster else b"HTTP/1.1 200 OK")
        assert len(server.exchanges) == (1 if is_cluster else 2)
        server.client_context = known
        assert (await server.ask(head(2) + b"ok"))[0] == 200
