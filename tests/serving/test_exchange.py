"""What a handler below ASGI may rely on, by both implementations: answers, their order, failures, the stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.serving.exchange import ClientExchange
from tests.support.serving.exchanges import KINDS, TEXT, echo, exchanging, get, read_any, read_chunk, read_head, stream
from tests.support.serving.servers import ConnectionPhase, eventually, head, is_closed, logged, read_error

pytestmark = pytest.mark.parametrize("kind", KINDS)


# What it shows of the request.


async def test_exchange_shows_the_request(kind: str) -> None:
    async with exchanging(kind, echo) as server:
        reader, writer = await server.send(get("/a%20b?c=%20d", "X-Two: 1", "x-two: 2"))
        assert (await read_any(reader))[0] == 200
        exchange = server.exchanges[0]
        assert (exchange.method, exchange.path, exchange.raw_target) == ("GET", "/a b", b"/a%20b?c=%20d")
        assert list(exchange.headers) == [(b"host", b"x"), (b"x-two", b"1"), (b"x-two", b"2")]
        assert (exchange.header(b"x-two"), exchange.header(b"x-three")) == (b"1", None)
        assert exchange.client == "127.0.0.1:{}".format(writer.get_extra_info("sockname")[1])


async def test_exchange_is_not_used_where_no_handler_is_found(kind: str) -> None:
    async with exchanging(kind, echo) as server:
        assert (await server.ask(get("/asgi")))[2] == b"over ASGI"
        assert not server.exchanges


# Answers.


async def test_exchange_whole_answer_has_its_length_and_keeps_the_connection(kind: str) -> None:
    async with exchanging(kind, echo) as server:
        reader, writer = await server.send(head(5) + b"hello")
        for body in (b"hello", b"again"):
            status, headers, found = await read_any(reader)
            assert (status, headers["content-length"], headers["content-type"], found) == (200, "5", "text/plain", body)
            assert "connection" not in headers
            assert "date" in headers
            await server.wait_phase(ConnectionPhase.IDLE, 1)
            writer.write(head(5) + b"again")


async def test_exchange_stream_comes_in_chunks_and_keeps_the_connection(kind: str) -> None:
    async with exchanging(kind, stream) as server:
        reader, writer = await server.send(get())
        for _ in range(3):
            status, headers, body = await read_any(reader)
            assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"onetwo")
            assert "connection" not in headers
            writer.write(get())


async def test_exchange_head_goes_out_before_the_first_chunk_is_there(kind: str) -> None:
    go_on = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        exchange.start(201, TEXT)
        assert exchange.is_started
        await go_on.wait()
        exchange.write(b"late")
        exchange.end()

    async with exchanging(kind, handler) as server:
        reader, _ = await server.send(get())
        assert (await read_head(reader))[0] == 201
        go_on.set()
        assert (await read_chunk(reader), await read_chunk(reader)) == (b"late", b"")


async def test_exchange_each_chunk_goes_out_at_once(kind: str) -> None:
    go_on = asyncio.Semaphore(0)

    async def handler(exchange: ClientExchange) -> None:
        exchange.start(200, TEXT)
        for number in range(5):
            exchange.write(b"%d" % number)
            await go_on.acquire()
        exchange.end()

    async with exchanging(kind, handler) as server:
        reader, _ = await server.send(get())
        await read_head(reader)
        for number in range(5):
            assert await read_chunk(reader) == b"%d" % number
            go_on.release()
        assert await read_chunk(reader) == b""


async def test_exchange_answer_to_http_1_0_ends_with_its_connection(kind: str) -> None:
    async with exchanging(kind, stream) as server:
        status, headers, body = await server.ask(get(version="1.0") + get(version="1.0"))
        assert (status, headers["connection"], body) == (200, "close", b"onetwo")
        assert "transfer-encoding" not in headers


async def test_exchange_whole_answer_to_http_1_0_ends_with_its_connection(kind: str) -> None:
    async with exchanging(kind, echo) as server:
        reader, _ = await server.send(get("/", "connection: keep-alive", "content-length: 2", version="1.0") + b"ab")
        status, headers, body = await read_any(reader)
        assert (status, headers["connection"], body) == (200, "close", b"ab")
        assert await is_closed(reader)


@pytest.mark.parametrize("handler", [echo, stream])
async def test_exchange_answer_to_head_has_no_body(kind: str, handler: Any) -> None:
    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(get("/", "content-length: 3", method="HEAD") + b"abc")
        status, headers = await read_head(reader)
        assert (status, headers.get("content-length")) == (200, "3" if handler is echo else None)
        if handler is echo:
            writer.write(get("/", method="HEAD"))
            assert (await read_head(reader))[1]["content-length"] == "0"
        await server.wait_ended(2 if handler is echo else 1)


@pytest.mark.parametrize("status", [204, 304])
async def test_exchange_answer_without_a_body_says_no_length(kind: str, status: int) -> None:
    async def handler(exchange: ClientExchange) -> None:
        exchange.respond(status, [], b"ignored")

    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(get())
        for _ in range(2):
            found, headers = await read_head(reader)
            assert (found, "content-length" in headers, "transfer-encoding" in headers) == (status, False, False)
            writer.write(get())


async def test_exchange_client_that_asks_to_close_gets_a_close(kind: str) -> None:
    async with exchanging(kind, stream) as server:
        reader, _ = await server.send(get("/", "connection: close"))
        status, headers, body = await read_any(reader)
        assert (status, headers["connection"], body) == (200, "close", b"onetwo")
        assert await is_closed(reader)


async def test_exchange_handler_that_asks_to_close_gets_a_close_and_frames_nothing_itself(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        exchange.respond(
            200, [(b"connection", b"close"), (b"content-length", b"77"), (b"transfer-encoding", b"chunked")], b"abc"
        )

    async with exchanging(kind, handler) as server:
        reader, _ = await server.send(get())
        status, headers, body = await read_any(reader)
        assert (status, headers["connection"], headers["content-length"], body) == (200, "close", "3", b"abc")
        assert "transfer-encoding" not in headers
        assert await is_closed(reader)


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\0"])
async def test_exchange_field_with_a_line_break_is_refused(kind: str, value: bytes) -> None:
    async def handler(exchange: ClientExchange) -> None:
        with pytest.raises(InvalidArgumentError):
            exchange.respond(200, [(b"x", value)], b"")
        with pytest.raises(InvalidArgumentError):
            exchange.start(99, [])
        assert not exchange.is_started
        exchange.respond(200, TEXT, b"fine")

    async with exchanging(kind, handler) as server:
        assert (await server.ask(get()))[2] == b"fine"


# The order of calls.


async def test_exchange_calls_out_of_order_do_nothing(kind: str) -> None:
    states: list[tuple[bool, bool, bool]] = []

    async def handler(exchange: ClientExchange) -> None:
        def note() -> None:
            states.append((exchange.is_started, exchange.is_ended, exchange.is_gone))

        exchange.write(b"too early")
        exchange.end()
        note()
        exchange.start(200, TEXT)
        exchange.start(500, TEXT)
        exchange.respond(500, TEXT, b"too late")
        exchange.write(b"one")
        note()
        exchange.end()
        note()
        exchange.write(b"too late")
        exchange.end()
        exchange.respond(500, TEXT, b"too late")
        exchange.abort()
        note()

    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(get())
        for _ in range(2):
            assert ((await read_any(reader))[::2]) == (200, b"one")
            assert states == [(False, False, False), (True, False, False), (True, True, False), (True, True, False)]
            states.clear()
            writer.write(get())


async def test_exchange_whole_answer_ends_it(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        exchange.respond(200, TEXT, b"one")
        assert exchange.is_started
        assert exchange.is_ended
        exchange.respond(200, TEXT, b"two")
        exchange.start(200, TEXT)
        exchange.write(b"two")
        exchange.end()

    async with exchanging(kind, handler) as server:
        reader, _ = await server.send(get() + get())
        assert [(await read_any(reader))[2] for _ in range(2)] == [b"one", b"one"]


# Pipelining.


@pytest.mark.parametrize("handler", [echo, stream])
async def test_exchange_pipelined_requests_are_answered_in_order(kind: str, handler: Any) -> None:
    async with exchanging(kind, handler) as server:
        chunked = head(None, "transfer-encoding: chunked") + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
        reader, _ = await server.send(head(2) + b"{}" + chunked + get("/asgi") + head(3) + b"xyz")
        bodies = [(await read_any(reader))[2] for _ in range(4)]
        expected = [b"{}", b"abc", b"over ASGI", b"xyz"]
        assert bodies == (expected if handler is echo else [b"onetwo", b"onetwo", b"over ASGI", b"onetwo"])
        await server.wait_phase(ConnectionPhase.IDLE, 1)


async def test_exchange_many_pipelined_requests_wait_as_bytes(kind: str) -> None:
    go_on = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await go_on.wait()
        exchange.respond(200, TEXT, b"x")

    async with exchanging(kind, handler) as server:
        reader, writer = await server.send(get() * 20_000)
        await eventually(lambda: len(server.exchanges) == 1)
        await asyncio.sleep(0.1)
        connection: Any = next(iter(server.http.connections._phases))
        assert len(server.exchanges) == 1
        assert 0 < len(connection._buffer) < 400_000
        go_on.set()
        for _ in range(100):
            assert (await read_any(reader))[2] == b"x"
        writer.close()


async def test_exchange_malformed_request_after_an_answer_is_refused(kind: str) -> None:
    async with exchanging(kind, stream) as server:
        reader, _ = await server.send(get() + b"GET / HTTP/1.1\r\nhost : x\r\n\r\n")
        assert (await read_any(reader))[2] == b"onetwo"
        assert (await read_error(reader))[:2] == (400, "protocol")
        assert await is_closed(reader)


# Handlers that fail.


async def test_exchange_handler_that_raises_before_its_answer_is_500_and_logged(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        raise ZeroDivisionError("secret")

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            reader, _ = await server.send(get("/path"))
            status, headers, body = await read_any(reader)
            assert (status, headers["connection"], headers["content-type"]) == (500, "close", "application/json")
            assert b"ZeroDivisionError" in body
            assert b"secret" not in body
            assert await is_closed(reader)
        assert [(record.levelname, "/path" in record.getMessage()) for record in records] == [("ERROR", True)]
        assert records[0].exc_info


async def test_exchange_handler_that_raises_amid_its_answer_cuts_the_connection_and_is_logged(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        exchange.start(200, TEXT)
        exchange.write(b"some")
        await asyncio.sleep(0.05)
        raise ZeroDivisionError

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            reader, _ = await server.send(get())
            await read_head(reader)
            assert await read_chunk(reader) == b"some"
            assert await is_closed(reader)
            await eventually(lambda: len(server.http.connections) == 0)
        assert [record.levelname for record in records] == ["ERROR"]


async def test_exchange_handler_that_raises_after_its_answer_is_logged(kind: str) -> None:
    async def handler(exchange: ClientExchange) -> None:
        exchange.respond(200, TEXT, b"fine")
        raise ZeroDivisionError

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            reader, writer = await server.send(get())
            for _ in range(2):
                assert (await read_any(reader))[2] == b"fine"
                writer.write(get())
            await eventually(lambda: len(records) >= 2)
        assert {record.levelname for record in records} == {"ERROR"}


@pytest.mark.parametrize("starts", [False, True])
async def test_exchange_handler_that_returns_without_an_end_has_failed(kind: str, starts: bool) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if starts:
            exchange.start(200, TEXT)
            exchange.write(b"some")
            await asyncio.sleep(0.05)

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            reader, _ = await server.send(get())
            assert (await read_head(reader))[0] == (200 if starts else 500)
            if starts:
                assert await read_chunk(reader) == b"some"
            else:
                await reader.readuntil(b"}}")
            assert await is_closed(reader)
        assert [record.levelname for record in records] == ["ERROR"]


@pytest.mark.parametrize("starts", [False, True])
async def test_exchange_abort_cuts_the_connection_quietly(kind: str, starts: bool) -> None:
    calls: list[str] = []

    async def handler(exchange: ClientExchange) -> None:
        exchange.on_gone = lambda: calls.append("gone")
        if starts:
            exchange.start(200, TEXT)
            exchange.write(b"some")
            await asyncio.sleep(0.05)
        exchange.abort()
        exchange.abort()
        assert exchange.is_gone
        assert not exchange.is_ended
        exchange.write(b"more")
        exchange.end()
        exchange.respond(200, TEXT, b"")

    async with exchanging(kind, handler) as server:
        with logged(logging.WARNING) as records:
            reader, _ = await server.send(get())
            if starts:
                await read_head(reader)
                assert await read_chunk(reader) == b"some"
            assert await is_closed(reader)
            await eventually(lambda: len(server.http.connections) == 0)
        assert not records
        assert not calls


# The server stops.


async def test_exchange_under_way_is_finished_when_the_server_stops(kind: str) -> None:
    go_on = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        exchange.start(200, TEXT)
        exchange.write(b"one")
        await go_on.wait()
        await asyncio.sleep(0.2)
        exchange.write(b"two")
        exchange.end()

    async def read(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        body = (await read_any(reader))[2]
        assert await is_closed(reader)
        writer.close()
        return body

    async with exchanging(kind, handler) as server:
        reading = asyncio.create_task(read(server.port))
        await eventually(lambda: len(server.exchanges) == 1)
        go_on.set()
    assert await reading == b"onetwo"


@pytest.mark.parametrize("starts", [False, True])
async def test_exchange_that_outlives_the_grace_is_ended(kind: str, starts: bool) -> None:
    ended: list[str] = []

    async def handler(exchange: ClientExchange) -> None:
        if starts:
            exchange.start(200, TEXT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with exchanging(kind, handler) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(get())
        await eventually(lambda: len(server.exchanges) == 1)
    assert ended == ["cancelled"]
    if starts:
        assert (await read_head(reader))[0] == 200
        assert await is_closed(reader)
    else:
        status, _, body = await read_any(reader)
        assert (status, b'"closed"' in body) == (503, True)
    writer.close()
