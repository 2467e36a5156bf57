"""A handler below ASGI over real sockets, by either implementation of the exchange."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import PlainTextResponse

from kvxfer.errors import KvxferError
from kvxfer.serving.asgi_exchange import asgi_endpoint
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.connections import ConnectionPhase
from kvxfer.serving.exchange import ClientExchange, ExchangeHandler
from kvxfer.serving.limits import ServingLimits
from kvxfer.serving.server import HttpServer, listening, serving
from kvxfer.serving.tls import ServerTls
from tests.support.serving.servers import eventually, hang_up

KINDS = ("direct", "asgi")
TEXT = [(b"content-type", b"text/plain")]


def get(path: str = "/", *more: str, version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: x", *more, "", ""]).encode()


async def echo(exchange: ClientExchange) -> None:
    body = await exchange.read_body()
    exchange.respond(200, TEXT, body)


async def stream(exchange: ClientExchange) -> None:
    exchange.start(200, TEXT)
    for chunk in (b"one", b"", b"two"):
        exchange.write(chunk)
    exchange.end()


async def failing_body(exchange: ClientExchange, caught: list[KvxferError]) -> None:
    try:
        await exchange.read_body()
    except KvxferError as error:
        caught.append(error)
        exchange.respond(getattr(error, "status", 503), TEXT, b"no")
        return
    exchange.respond(200, TEXT, b"yes")


@dataclasses.dataclass
class ExchangeServer:
    port: int
    http: HttpServer
    bodies: Bodies
    exchanges: list[ClientExchange] = dataclasses.field(default_factory=list)
    """All that were handed to the handler."""
    ended: int = 0
    """Handlers that are over."""
    writers: list[asyncio.StreamWriter] = dataclasses.field(default_factory=list)
    client_context: ssl.SSLContext | None = None
    """Of connections that speak TLS."""

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.client_context)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        reader, _ = await self.send(data)
        return await read_any(reader)

    async def wait_phase(self, phase: ConnectionPhase, count: int) -> None:
        await eventually(lambda: self.http.connections.count(phase) == count)

    async def wait_ended(self, count: int) -> None:
        await eventually(lambda: self.ended == count)


@contextlib.asynccontextmanager
async def exchanging(
    kind: str,
    handler: ExchangeHandler,
    *,
    tls: ServerTls | None = None,
    client_context: ssl.SSLContext | None = None,
    connections_max: int = 100,
    **limits: Any,
) -> AsyncIterator[ExchangeServer]:
    """A server of which ``handler`` serves each request, but those for ``/asgi``."""
    settings = ServingLimits(**{"max_body_bytes": 1000, **limits})
    bodies = Bodies(settings)

    async def counted(exchange: ClientExchange) -> None:
        server.exchanges.append(exchange)
        try:
            await handler(exchange)
        finally:
            server.ended += 1

    other = PlainTextResponse("over ASGI")
    endpoint = asgi_endpoint(counted, bodies)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (endpoint if kind == "asgi" and scope["path"] != "/asgi" else other)(scope, receive, send)

    def find(method: str, path: str) -> ExchangeHandler | None:
        return counted if kind == "direct" and path != "/asgi" else None

    with listening("127.0.0.1", 0) as listener:
        async with serving(
            app,
            listener,
            settings,
            bodies,
            connections_max=connections_max,
            name="test exchange",
            find_handler=find,
            tls=tls,
        ) as http:
            server = ExchangeServer(listener.getsockname()[1], http, bodies, client_context=client_context)
            try:
                yield server
            finally:
                for writer in server.writers:
                    await hang_up(writer)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    async with asyncio.timeout(20):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return int(lines[0].split()[1]), {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)
    }


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk; empty at the end."""
    async with asyncio.timeout(20):
        size = int(await reader.readuntil(b"\r\n"), 16)
        return (await reader.readexactly(size + 2))[:-2]


async def read_any(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer of any framing."""
    status, headers = await read_head(reader)
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while chunk := await read_chunk(reader):
            body += chunk
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        async with asyncio.timeout(20):
            body = await reader.read()
    return status, headers, body
