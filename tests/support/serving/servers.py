"""A server of ours over real sockets, and a client that writes raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from kvxfer.errors import KvxferError
from kvxfer.openai.errors import error_body, status_for
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.connections import ConnectionPhase
from kvxfer.serving.limits import ServingLimits
from kvxfer.serving.server import HttpServer, listening, serving


@dataclasses.dataclass
class Served:
    port: int
    http: HttpServer
    bodies: Bodies
    hold: asyncio.Event
    """Requests are answered while it is set."""
    left: int = 0
    """Clients that left amid their body."""
    done: int = 0
    writers: list[asyncio.StreamWriter] = dataclasses.field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client's connection; it is closed with the server, at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which those bytes were written."""
        reader, writer = await self.connect()
        writer.write(data)
        return reader, writer

    async def wait_phase(self, phase: ConnectionPhase, count: int) -> None:
        await eventually(lambda: self.http.connections.count(phase) == count)


@contextlib.asynccontextmanager
async def served(*, connections_max: int = 100, **limits: Any) -> AsyncIterator[Served]:
    """A server that answers ``POST /`` with the length of its body, and ``GET /`` with nothing."""
    settings = ServingLimits(**{"max_body_bytes": 1000, **limits})
    bodies = Bodies(settings)
    app = FastAPI()
    hold = asyncio.Event()
    hold.set()

    @app.exception_handler(KvxferError)
    async def on_error(request: Request, error: KvxferError) -> Response:
        return JSONResponse(error_body(error), status_code=status_for(error))

    @app.post("/")
    async def post(request: Request) -> Response:
        try:
            body = await bodies.read(request)
        except ClientDisconnect:
            server.left += 1
            return Response(status_code=400)
        await hold.wait()
        server.done += 1
        return JSONResponse({"size": len(body)})

    @app.get("/")
    async def get() -> Response:
        return Response(b"x" * 100_000)

    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        async with serving(app, listener, settings, bodies, connections_max=connections_max, name="test http") as http:
            server = Served(port, http, bodies, hold)
            try:
                yield server
            finally:
                hold.set()
                for writer in server.writers:
                    await hang_up(writer)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # TLS has errors of its own for a peer that was faster
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def trickling(writer: asyncio.StreamWriter, piece: bytes) -> AsyncIterator[None]:
    """Meanwhile ``piece`` is written again and again."""

    async def trickle() -> None:
        while True:
            writer.write(piece)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(trickle())
    try:
        yield
    finally:
        task.cancel()


def head(length: int | None = None, *more: str, method: str = "POST") -> bytes:
    fields = ["host: x", *([] if length is None else [f"content-length: {length}"]), *more]
    return "\r\n".join([f"{method} / HTTP/1.1", *fields, "", ""]).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer."""
    async with asyncio.timeout(20):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, body


async def read_error(reader: asyncio.StreamReader) -> tuple[int, str, str]:
    """Status, code and message of an answer that is an error."""
    status, _, body = await read_answer(reader)
    error = json.loads(body)["error"]
    return status, error["code"], error["message"]


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends, in whatever way, with no more bytes."""
    try:
        async with asyncio.timeout(20):
            return await reader.read() == b""
    except ConnectionError:
        return True


async def eventually(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = 20.0) -> None:
    """Wait until ``condition`` holds; raise TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)


class Records(logging.Handler):
    """Keeps what is logged at a level or above."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def logged(level: int = logging.INFO) -> Any:
    """All records of all loggers within the block."""
    root, records = logging.getLogger(), Records(level)
    before = root.level
    root.addHandler(records)
    root.setLevel(level)
    try:
        yield records.records
    finally:
        root.removeHandler(records)
        root.setLevel(before)
