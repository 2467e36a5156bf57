"""What a handler below ASGI may rely on: the bodies of requests."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvxfer.errors import ClosedError, KvxferError, OverloadedError, UsageError
from kvxfer.openai.errors import RequestError
from kvxfer.serving.exchange import ClientExchange, ClientGoneError
from tests.support.serving.exchanges import KINDS, TEXT, echo, exchanging, failing_body, get, read_any, stream
from tests.support.serving.servers import ConnectionPhase, eventually, head, is_closed, logged, read_error

MIB = 1 << 20


pytestmark = pytest.mark.parametrize("kind", KINDS)


# Bodies.


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_exchange_body_that_is_too_long_is_413_and_its_client_reads_that(kind: str, is_chunked: bool) -> None:
    caught: list[KvxferError] = []
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught)) as server:
        body = b"x" * (4 * MIB)
        if is_chunked:
            data = head(None, "transfer-encoding: chunked") + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        else:
            data = head(len(body)) + body
        reader, writer = await server.send(data)
        await writer.drain()
        status, headers, answer = await read_any(reader)
        assert (status, headers["connection"], answer) == (413, "close", b"no")
        assert isinstance(caught[0], RequestError)


async def test_exchange_body_that_came_with_its_head_may_be_too_long_too(kind: str) -> None:
    caught: list[KvxferError] = []
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught)) as server:
        body = b"x" * 1001
        sent = head(None, "transfer-encoding: chunked") + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        assert (await server.ask(sent))[0] == 413
        assert (await server.ask(head(1000) + b"x" * 1000))[0] == 200


@pytest.mark.parametrize("limit", ["body_stall_s", "body_timeout_s"])
async def test_exchange_body_that_stops_coming_is_408(kind: str, limit: str) -> None:
    caught: list[KvxferError] = []
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught), **{limit: 0.2}) as server:
        status, headers, _ = await server.ask(head(1000) + b"x")
        assert (status, headers["connection"]) == (408, "close")
        assert f"{limit} 0.2" in str(caught[0])
        assert server.bodies.held_bytes == 0


async def test_exchange_bodies_share_one_budget(kind: str) -> None:
    caught: list[KvxferError] = []
    limits = {"max_body_bytes": 1000, "body_budget_bytes": 1700}
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught), **limits) as server:
        first, _ = await server.send(head(1000) + b"x" * 900)
        await eventually(lambda: server.bodies.held_bytes == 900)
        second, writer = await server.send(head(1000) + b"x" * 900)
        assert (await read_any(first))[0] == 503
        assert isinstance(caught[0], OverloadedError)
        writer.write(b"x" * 100)
        assert (await read_any(second))[0] == 200
        assert server.bodies.held_bytes == 0


async def test_exchange_body_that_is_not_read_slows_its_client_down(kind: str) -> None:
    go_on = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await go_on.wait()
        exchange.respond(200, TEXT, b"%d" % len(await exchange.read_body()))

    size = 32 * MIB
    async with exchanging(kind, handler, max_body_bytes=size) as server:
        reader, writer = await server.send(head(size) + b"x" * size)
        await eventually(lambda: len(server.exchanges) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.5)
        held: Any = server.exchanges[0]
        assert held.incoming.held_bytes < MIB
        go_on.set()
        assert (await read_any(reader))[2] == b"%d" % size


async def test_exchange_body_is_read_once(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        assert await exchange.read_body() == b"abc"
        with pytest.raises(UsageError):
            await exchange.read_body()
        exchange.respond(200, TEXT, b"")

    async with exchanging(kind, handler) as server:
        assert (await server.ask(head(3) + b"abc"))[0] == 200


async def test_exchange_client_that_waits_for_100_gets_it_when_its_body_is_read(kind: str) -> None:
    async with exchanging(kind, echo) as server:
        reader, writer = await server.send(head(5, "expect: 100-continue"))
        assert (await reader.readuntil(b"\r\n\r\n")) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"12345")
        assert (await read_any(reader))[2] == b"12345"


async def test_exchange_client_that_waits_for_100_is_told_an_error_instead(kind: str) -> None:
    caught: list[KvxferError] = []
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught)) as server:
        status, headers, _ = await server.ask(head(5000, "expect: 100-continue"))
        assert (status, headers["connection"]) == (413, "close")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_exchange_answer_before_the_end_of_the_body_closes(kind: str, is_streamed: bool) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if is_streamed:
            await stream(exchange)
        else:
            exchange.respond(200, TEXT, b"onetwo")

    async with exchanging(kind, handler, max_body_bytes=8 * MIB) as server:
        reader, writer = await server.send(head(4 * MIB) + b"x" * MIB)
        status, headers, body = await read_any(reader)
        assert (status, headers["connection"], body) == (200, "close", b"onetwo")
        writer.write(b"x" * (3 * MIB) + get())
        await writer.drain()
        assert await is_closed(reader)
        assert len(server.exchanges) == 1


async def test_exchange_body_with_a_bad_chunk_is_a_client_that_left(kind: str) -> None:
    caught: list[KvxferError] = []
    async with exchanging(kind, lambda exchange: failing_body(exchange, caught)) as server:
        with logged(logging.WARNING) as records:
            reader, writer = await server.send(head(None, "transfer-encoding: chunked") + b"1\r\na\r\n")
            await server.wait_phase(ConnectionPhase.BODY, 1)
            await eventually(lambda: len(server.exchanges) == 1)
            writer.write(b"not a chunk\r\n")
            assert (await read_error(reader))[:2] == (400, "protocol")
            await server.wait_ended(1)
        assert isinstance(caught[0], ClientGoneError)
        assert not records
        assert server.bodies.held_bytes == 0


async def test_exchange_unfinished_body_ends_when_the_server_stops(kind: str) -> None:
    caught: list[KvxferError] = []
    with logged(logging.WARNING) as records:
        async with exchanging(kind, lambda exchange: failing_body(exchange, caught)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head(100) + b"x")
            await eventually(lambda: server.bodies.held_bytes == 1)
        assert (await read_any(reader))[0] == 503
        writer.close()
    assert isinstance(caught[0], ClosedError)
    assert not records
