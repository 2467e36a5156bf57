"""What a handler below ASGI may rely on: clients that leave, and clients that read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.serving.exchange import ClientExchange, ClientGoneError
from tests.support.serving.exchanges import KINDS, TEXT, exchanging, get, read_any
from tests.support.serving.servers import ConnectionPhase, eventually, head, logged

MIB = 1 << 20


pytestmark = pytest.mark.parametrize("kind", KINDS)


# Clients that leave.


def waiting(gone: asyncio.Event, started: asyncio.Event, *, starts: bool) -> Callable[[ClientExchange], Any]:
    """A handler that waits until its client has left."""

    async def handler(exchange: ClientExchange) -> None:
        calls: list[bool] = []

        def on_gone() -> None:
            calls.append(exchange.is_gone)
            gone.set()

        exchange.on_gone = on_gone
        await exchange.read_body()
        if starts:
            exchange.start(200, TEXT)
            exchange.write(b"some")
        started.set()
        await gone.wait()
        exchange.write(b"more")
        exchange.end()
        exchange.respond(200, TEXT, b"")
        assert await exchange.drained(5.0)
        await asyncio.sleep(0.05)
        assert calls == [True]
        assert not exchange.is_ended

    return handler


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("way", ["close", "reset"])
async def test_exchange_says_once_that_its_client_has_left(kind: str, starts: bool, way: str) -> None:
    gone, started = asyncio.Event(), asyncio.Event()
    async with exchanging(kind, waiting(gone, started, starts=starts)) as server:
        with logged(logging.WARNING) as records:
            _, writer = await server.send(head(2) + b"{}")
            await asyncio.wait_for(started.wait(), 20)
            if way == "reset":
                writer.transport.abort()
            else:
                writer.close()
            async with asyncio.timeout(1):
                await gone.wait()
            await server.wait_ended(1)
            await eventually(lambda: len(server.http.connections) == 0)
        assert not records


async def test_exchange_says_that_its_client_has_left_before_it_was_asked(kind: str) -> None:
    calls: list[str] = []

    async def handler(exchange: ClientExchange) -> None:
        await eventually(lambda: exchange.is_gone)
        exchange.on_gone = lambda: calls.append("gone")
        assert not calls
        await asyncio.sleep(0.05)
        assert calls == ["gone"]

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            _, writer = await server.send(get())
            await eventually(lambda: len(server.exchanges) == 1)
            writer.close()
            await server.wait_ended(1)
        assert not records


async def test_exchange_client_that_leaves_amid_its_body_is_no_line_of_log(kind: str) -> None:
    caught: list[BaseException] = []

    async def handler(exchange: ClientExchange) -> None:
        try:
            await exchange.read_body()
        except ClientGoneError as error:
            caught.append(error)
            raise

    async with exchanging(kind, handler) as server:
        with logged(logging.INFO) as records:
            _, writer = await server.send(head(1000) + b"x")
            await server.wait_phase(ConnectionPhase.BODY, 1)
            await eventually(lambda: server.bodies.held_bytes == 1)
            writer.close()
            await server.wait_ended(1)
            await eventually(lambda: len(server.http.connections) == 0)
        assert not records
        assert caught
        assert server.bodies.held_bytes == 0


async def test_exchange_client_that_left_has_no_body(kind: str) -> None:
    caught: list[BaseException] = []

    async def handler(exchange: ClientExchange) -> None:
        await eventually(lambda: exchange.is_gone)
        try:
            await exchange.read_body()
        except ClientGoneError as error:
            caught.append(error)

    async with exchanging(kind, handler) as server:
        _, writer = await server.send(head(10) + b"x")
        await eventually(lambda: len(server.exchanges) == 1)
        writer.close()
        await server.wait_ended(1)
        assert caught


async def test_exchange_client_that_leaves_after_the_answer_is_not_told(kind: str) -> None:
    calls: list[str] = []
    go_on = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        exchange.on_gone = lambda: calls.append("gone")
        exchange.respond(200, TEXT, b"x")
        await go_on.wait()

    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(get())
        assert (await read_any(reader))[2] == b"x"
        writer.close()
        await eventually(lambda: len(server.http.connections) == 0)
        go_on.set()
        await server.wait_ended(1)
        assert not calls


# Slow readers.


@contextlib.asynccontextmanager
async def slow_client(port: int, data: bytes) -> Any:
    """A socket with a small window, on which nothing is read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, data)
        yield client


async def read_all(client: socket.socket, size: int) -> int:
    """Read until that many bytes have come."""
    loop, found = asyncio.get_running_loop(), 0
    async with asyncio.timeout(60):
        while found < size:
            piece = await loop.sock_recv(client, 1 << 20)
            if not piece:
                break
            found += len(piece)
    return found


async def test_exchange_slow_reader_pauses_the_handler_and_memory_stays_bounded(kind: str) -> None:
    calls: list[str] = []
    writable = asyncio.Event()
    writable.set()
    chunk, total = b"x" * 8192, 16 * MIB
    ahead: list[int] = []

    async def handler(exchange: ClientExchange) -> None:
        def pause() -> None:
            calls.append("pause")
            writable.clear()

        def resume() -> None:
            calls.append("resume")
            writable.set()

        exchange.on_pause, exchange.on_resume = pause, resume
        exchange.start(200, TEXT)
        written = 0
        while written < total:
            exchange.write(chunk)
            written += len(chunk)
            ahead.append(written)
            await writable.wait()
            await asyncio.sleep(0)
        exchange.end()

    async with exchanging(kind, handler) as server, slow_client(server.port, get()) as client:
        await eventually(lambda: "pause" in calls)
        await asyncio.sleep(0.2)
        before = len(ahead)
        await asyncio.sleep(0.1)
        assert len(ahead) == before  # it waits
        assert ahead[-1] < 8 * MIB  # what the kernel took, and a bounded rest
        await server.wait_phase(ConnectionPhase.WORK, 1)
        assert await read_all(client, total) >= total
        await server.wait_ended(1)
        assert calls[:2] == ["pause", "resume"]
        assert all(one != other for one, other in itertools.pairwise(calls))
        await server.wait_phase(ConnectionPhase.IDLE, 1)


async def test_exchange_pause_is_told_at_once_where_it_is_so_already(kind: str) -> None:
    calls: list[str] = []

    async def handler(exchange: ClientExchange) -> None:
        exchange.start(200, TEXT)
        exchange.write(b"x" * (16 * MIB))
        exchange.on_pause = lambda: calls.append("pause")
        calls.append("set")
        assert not await exchange.drained(0.05)
        exchange.on_resume = lambda: calls.append("resume")
        assert await exchange.drained(60)
        calls.append("drained")
        exchange.end()

    async with exchanging(kind, handler) as server, slow_client(server.port, get()) as client:
        await eventually(lambda: "set" in calls)
        await asyncio.sleep(0.1)
        assert calls == ["pause", "set"]
        assert await read_all(client, 16 * MIB) >= 16 * MIB
        await server.wait_ended(1)
        assert sorted(calls) == ["drained", "pause", "resume", "set"]


async def test_exchange_drained_ends_where_the_client_leaves(kind: str) -> None:
    found: list[bool] = []

    async def handler(exchange: ClientExchange) -> None:
        exchange.start(200, TEXT)
        exchange.write(b"x" * (16 * MIB))
        found.append(await exchange.drained(60))
        exchange.abort()

    async with exchanging(kind, handler) as server:
        async with slow_client(server.port, get()):
            await server.wait_phase(ConnectionPhase.WORK, 1)
            await asyncio.sleep(0.1)
            assert not found
        await server.wait_ended(1)
        assert found == [True]


async def test_exchange_drained_is_at_once_where_nothing_waits(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        assert await exchange.drained(0.0)
        exchange.start(200, TEXT)
        exchange.write(b"x")
        assert await exchange.drained(5.0)
        exchange.end()
        assert await exchange.drained(5.0)

    async with exchanging(kind, handler) as server:
        assert (await server.ask(get()))[2] == b"x"


async def test_exchange_client_that_takes_no_byte_is_hung_up_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.WRITE_STALL_S", 0.1)
    gone = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        exchange.on_gone = gone.set
        exchange.start(200, TEXT)
        exchange.write(b"x" * (16 * MIB))
        await gone.wait()

    async with exchanging(kind, handler) as server, slow_client(server.port, get()):
        async with asyncio.timeout(10):
            await gone.wait()
        await server.wait_ended(1)
