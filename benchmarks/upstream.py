"""CPU seconds of the router's upstream client per 1,000 streamed requests, beside other clients in one run.

Starts an engine in a process of its own (prebuilt bytes: 32 chunks of about 120 bytes, one write each), sends POSTs of
2 KB to it at a fixed number at a time, and hands each chunk to a sink as a proxy would. Clients: this one by ``pipe``
and by ``async for``, httpx, aiohttp (if it is installed), and a bare splice that trusts the engine's framing and has no
deadlines, bounds or errors: the floor of what a Python client costs. Rounds alternate; each row is the median.

    benchmarks/upstream.py [--requests 1000] [--clients 64] [--rounds 5] [--itl-ms 0] [--only pipe,splice]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import httpx
import uvloop

from kvxfer.router.upstream import UpstreamLimits, UpstreamPool

CHUNKS = 32
EVENT = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" tok0000","finish_reason":null}]}'
DATA = b"data: " + EVENT + b"\n\n"
CHUNK = b"%x\r\n%b\r\n" % (len(DATA), DATA)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
BODY = b'{"model":"mock","stream":true,"prompt":"' + b"x" * 2000 + b'"}'
JSON = b"application/json"
Ask = Callable[[], Awaitable[int]]
"""Sends one request; the answer is how many bytes of a body came."""


class BenchEngine(asyncio.Protocol):
    def __init__(self, itl_s: float) -> None:
        self._itl_s = itl_s
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(HEAD)
        self._left = CHUNKS
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._step()

    def _step(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        self._transport.write(CHUNK if self._left else CHUNK + LAST)
        if self._left:
            self._due += self._itl_s
            self._loop.call_at(self._due, self._step) if self._itl_s else self._loop.call_soon(self._step)


def serve(itl_s: float, port: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BenchEngine(itl_s), "127.0.0.1", 0, backlog=1024)
        port.put(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(main())


class Sink:
    """Stands for the client's transport."""

    size = 0

    def write(self, chunk: bytes) -> None:
        self.size += len(chunk)


class BenchSplice(asyncio.Protocol):
    """The prototype's: bytes are handed on unread, and the end is known by its five last bytes."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def start(self, request: bytes, sink: Sink) -> asyncio.Future[None]:
        self._sink = sink
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._sink.write(data)
        self._tail = (self._tail + data)[-5:]
        if self._tail == LAST:
            self._done.set_result(None)


@contextlib.asynccontextmanager
async def ours(port: int, *, is_piped: bool) -> Any:
    pool = UpstreamPool(("127.0.0.1", port), UpstreamLimits())
    headers = [(b"content-type", JSON)]

    async def ask() -> int:
        sink = Sink()
        async with await pool.request("POST", "/v1/completions", headers, [BODY]) as response:
            if is_piped:
                await response.pipe(sink.write)
            else:
                async for chunk in response:
                    sink.write(chunk)
        return sink.size

    yield ask
    await pool.close()


@contextlib.asynccontextmanager
async def with_httpx(port: int) -> Any:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": JSON.decode()}

        async def ask() -> int:
            sink = Sink()
            async with client.stream("POST", url, content=BODY, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    sink.write(chunk)
            return sink.size

        yield ask


@contextlib.asynccontextmanager
async def with_aiohttp(port: int) -> Any:
    aiohttp: Any = importlib.import_module("aiohttp")
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as client:
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": JSON.decode()}

        async def ask() -> int:
            sink = Sink()
            async with client.post(url, data=BODY, headers=headers) as response:
                while chunk := await response.content.readany():
                    sink.write(chunk)
            return sink.size

        yield ask


@contextlib.asynccontextmanager
async def spliced(port: int) -> Any:
    idle: list[BenchSplice] = []
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    request = head % (JSON, len(BODY)) + BODY

    async def ask() -> int:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(BenchSplice, "127.0.0.1", port)
        sink = Sink()
        await connection.start(request, sink)
        idle.append(connection)
        return CHUNKS * len(DATA) if sink.size == len(HEAD) + CHUNKS * len(CHUNK) + len(LAST) else -1

    yield ask
    for connection in idle:
        connection.transport.close()


CLIENTS: dict[str, Callable[[int], Any]] = {
    "pipe": lambda port: ours(port, is_piped=True),
    "for": lambda port: ours(port, is_piped=False),
    "splice": spliced,
    "aiohttp": with_aiohttp,
    "httpx": with_httpx,
}


async def measure(client: Callable[[int], Any], port: int, requests: int, clients: int) -> tuple[float, float]:
    """(CPU seconds of this process, wall seconds) per 1,000 requests."""
    async with client(port) as ask:

        async def run(count: int) -> None:
            for _ in range(count):
                size = await ask()
                if size != CHUNKS * len(DATA):
                    raise SystemExit(f"{size} bytes came, not {CHUNKS * len(DATA)}")

        await asyncio.gather(*(run(1) for _ in range(clients)))
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(run(requests // clients) for _ in range(clients)))
        scale = 1000 / (requests // clients * clients)
        return (time.process_time() - cpu) * scale, (time.perf_counter() - wall) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--only", default=",".join(CLIENTS))
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name != "aiohttp" or importlib.util.find_spec("aiohttp")]
    context = multiprocessing.get_context("spawn")
    port_queue = context.Queue()
    engine = context.Process(target=serve, args=(args.itl_ms / 1e3, port_queue), daemon=True)
    engine.start()
    port = port_queue.get(timeout=30)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            rows[name].append(uvloop.run(measure(CLIENTS[name], port, args.requests, args.clients)))
    engine.terminate()
    print(f"{args.clients} at a time, {CHUNKS} chunks, {args.itl_ms:g} ms apart; medians of {args.rounds} rounds")
    print("| client | CPU s per 1,000 | min | max | wall s per 1,000 |\n|---|---|---|---|---|")
    for name in names:
        cpu = [row[0] for row in rows[name]]
        wall = statistics.median(row[1] for row in rows[name])
        print(f"| {name} | {statistics.median(cpu):.3f} | {min(cpu):.3f} | {max(cpu):.3f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
