"""Every way in which an engine fails a request is an error that names the engine and the phase, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from unittest import mock

import pytest

from kvxfer.errors import TransportError
from kvxfer.router.upstream import (
    UpstreamAbortedError,
    UpstreamClosedError,
    UpstreamConnectError,
    UpstreamDeadlines,
    UpstreamError,
    UpstreamLimits,
    UpstreamPhase,
    UpstreamPool,
    UpstreamProtocolError,
    UpstreamTimeoutError,
    UpstreamUnprocessedError,
)
from kvxfer.router.upstream.connection import UpstreamConnection
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.upstream import CHUNKED, HELLO, OK, chunk, pool_over, until


def silent(engine: ScriptedEngine, *, after: bytes = b"", reads: bool = True) -> Script:
    """Sends ``after`` and then nothing, until the other side hangs up."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reads:
            await engine.read(reader)
            writer.write(after)
            await engine.until_hung_up(reader)
        else:
            await asyncio.sleep(0.5)
            await engine.until_hung_up(reader)

    return script


@pytest.mark.parametrize(
    ("after", "deadlines", "phase"),
    [
        (b"", UpstreamDeadlines(first_byte_s=0.1), UpstreamPhase.FIRST_BYTE),
        (OK, UpstreamDeadlines(first_byte_s=0.1), UpstreamPhase.FIRST_BYTE),
        (b"HTTP/1.1 100 Continue\r\n\r\n", UpstreamDeadlines(first_byte_s=0.1), UpstreamPhase.FIRST_BYTE),
        (CHUNKED + chunk(b"a"), UpstreamDeadlines(between_chunks_s=0.1), UpstreamPhase.BODY),
        (CHUNKED + b"3\r\nab", UpstreamDeadlines(between_chunks_s=0.1), UpstreamPhase.BODY),
        (CHUNKED + chunk(b"a"), UpstreamDeadlines(whole_s=0.1), UpstreamPhase.WHOLE),
        (b"", UpstreamDeadlines(whole_s=0.1), UpstreamPhase.WHOLE),
    ],
)
async def test_a_silent_engine_passes_the_deadline_of_its_phase(
    after: bytes, deadlines: UpstreamDeadlines, phase: UpstreamPhase
) -> None:
    async with pool_over(lambda engine: silent(engine, after=after)) as (engine, pool):
        with pytest.raises(UpstreamTimeoutError, match=r"deadline of 0\.1 s") as caught:
            async with await pool.request("POST", "/", (), [b"{}"], deadlines) as response:
                await response.read(100)
        assert (caught.value.phase, caught.value.address) == (phase, engine.address)
        assert isinstance(caught.value, TransportError)
        assert pool.counters.failed[phase] == 1
        await asyncio.wait_for(engine.hung_up.wait(), 10)


async def test_an_engine_that_reads_nothing_passes_the_deadline_of_sending() -> None:
    async with pool_over(lambda engine: silent(engine, reads=False)) as (_, pool):
        deadlines = UpstreamDeadlines(send_s=0.1)
        with pytest.raises(UpstreamTimeoutError) as caught:
            await pool.request("POST", "/", (), [b"x" * 40_000_000], deadlines)
        assert caught.value.phase is UpstreamPhase.SEND


async def test_bytes_that_come_again_and_again_renew_the_deadline_between_chunks() -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(CHUNKED)
            for _ in range(20):
                writer.write(chunk(b"a"))
                await asyncio.sleep(0.05)
            writer.write(b"0\r\n\r\n")
            await engine.until_hung_up(reader)

        return script

    async with pool_over(make) as (_, pool):
        deadlines = UpstreamDeadlines(between_chunks_s=0.5)
        async with await pool.request("GET", "/", deadlines=deadlines) as response:
            assert await response.read(100) == b"a" * 20


async def test_a_port_without_an_engine_is_a_connect_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        pool = UpstreamPool(sock.getsockname())
        with pytest.raises(UpstreamConnectError, match=pool.address) as caught:
            await pool.request("GET", "/")
        assert caught.value.phase is UpstreamPhase.CONNECT
        assert (pool.counters.failed[UpstreamPhase.CONNECT], pool.counters.open) == (1, 0)
        await pool.close()


async def test_a_connection_that_does_not_come_about_passes_its_deadline() -> None:
    """The backlog of a listener that never accepts fills up; later connections wait."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        pool = UpstreamPool(listener.getsockname(), UpstreamLimits(tick_s=0.01))
        with pytest.raises(UpstreamTimeoutError) as caught:
            await pool.request("GET", "/", deadlines=UpstreamDeadlines(connect_s=0.1))
        assert caught.value.phase is UpstreamPhase.CONNECT
        task = asyncio.create_task(pool.request("GET", "/"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.close()
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    "answer", [b"\x16\x03\x01garbage\r\n\r\n", CHUNKED + b"xyz\r\n", OK + b"a: b\r\n" * 200 + b"\r\n"]
)
async def test_an_answer_that_is_none_is_a_protocol_error(answer: bytes) -> None:
    async with pool_over(lambda engine: silent(engine, after=answer)) as (engine, pool):
        with pytest.raises(UpstreamProtocolError, match=engine.address):
            async with await pool.request("GET", "/") as response:
                await response.read(100)
        await asyncio.wait_for(engine.hung_up.wait(), 10)


@pytest.mark.parametrize(
    ("answer", "phase", "before"),
    [
        (b"", UpstreamPhase.FIRST_BYTE, b""),
        (OK, UpstreamPhase.FIRST_BYTE, b""),
        (CHUNKED + chunk(b"one") + b"5\r\nab", UpstreamPhase.BODY, b"oneab"),
        (CHUNKED + chunk(b"one"), UpstreamPhase.BODY, b"one"),
        (OK + b"content-length: 5\r\n\r\nhel", UpstreamPhase.BODY, b"hel"),
    ],
)
@pytest.mark.parametrize("is_piped", [False, True])
async def test_an_answer_cut_short_is_a_closed_error_after_what_came(
    answer: bytes, phase: UpstreamPhase, before: bytes, is_piped: bool
) -> None:
    async with pool_over(lambda engine: engine.answering(answer, closes=True)) as (_, pool):
        chunks: list[bytes] = []

        async def consume() -> None:
            async with await pool.request("GET", "/") as response:
                if is_piped:
                    await response.pipe(chunks.append)
                async for piece in response:
                    chunks.append(piece)

        with pytest.raises(UpstreamClosedError) as caught:
            await consume()
        assert (b"".join(chunks), caught.value.phase) == (before, phase)
        assert type(caught.value) is UpstreamClosedError, "a new connection's request may have been processed"


async def test_an_idle_connection_that_the_engine_closed_is_never_used() -> None:
    async with pool_over(lambda engine: engine.answering(HELLO, closes=True)) as (engine, pool):
        for count in range(1, 6):
            async with await pool.request("GET", "/") as response:
                await response.read(10)
            assert engine.connections == count
            if count % 2:
                await until(lambda: pool.counters.idle == 0)
            await until(lambda: engine.open == 0)  # closed, and this loop may not have heard of it
        assert (pool.counters.completed, sum(pool.counters.failed.values())) == (5, 0)


async def test_bytes_on_an_idle_connection_end_it() -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(HELLO)
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            await engine.until_hung_up(reader)

        return script

    async with pool_over(make) as (engine, pool):
        async with await pool.request("GET", "/") as response:
            await response.read(10)
        assert pool.counters.idle == 1
        await asyncio.wait_for(engine.hung_up.wait(), 10)
        await until(lambda: pool.counters.idle == pool.counters.open == 0)


async def test_a_kept_connection_closed_before_it_took_the_request_says_so() -> None:
    """The race that is left: the FIN comes after the last look at the socket. The kernel knows what it acknowledged."""
    async with pool_over(lambda engine: engine.answering(HELLO, closes=True)) as (engine, pool):
        async with await pool.request("GET", "/") as response:
            await response.read(10)
            [connection] = pool._owned
            connection._transport.pause_reading()  # this loop hears nothing of the FIN
        await until(lambda: engine.open == 0)
        assert not connection.is_usable, "the look at the socket would have seen it"
        with mock.patch.object(UpstreamConnection, "is_usable", True):
            task = asyncio.create_task(pool.request("POST", "/", (), [b"x"]))
            await until(lambda: pool.counters.in_flight)
            connection._transport.resume_reading()
            with pytest.raises(UpstreamError) as caught:
                await task
        assert type(caught.value) is UpstreamUnprocessedError


@pytest.mark.parametrize("resets", [False, True])
async def test_a_kept_connection_closed_after_it_took_the_request_does_not_say_so(resets: bool) -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(HELLO)
            await engine.read(reader)
            if resets:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()

        return script

    async with pool_over(make) as (_, pool):
        async with await pool.request("GET", "/") as response:
            await response.read(10)
        with pytest.raises(UpstreamClosedError) as caught:
            await pool.request("GET", "/")
        assert pool.counters.reused == 1
        assert type(caught.value) is UpstreamClosedError


async def test_a_kept_connection_closed_within_a_big_body_says_that_it_was_not_processed() -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(HELLO)
            await reader.readexactly(1000)

        return script

    async with pool_over(make) as (_, pool):
        async with await pool.request("GET", "/") as response:
            await response.read(10)
        with pytest.raises(UpstreamUnprocessedError):
            await pool.request("POST", "/", (), [b"x" * 40_000_000])


async def test_an_aborted_answer_closes_the_connection() -> None:
    async with pool_over(lambda engine: silent(engine, after=CHUNKED + chunk(b"a"))) as (engine, pool):
        response = await pool.request("GET", "/")
        response.abort()
        response.abort()
        with pytest.raises(UpstreamAbortedError):
            await response.read(10)
        await asyncio.wait_for(engine.hung_up.wait(), 10)
        assert (pool.counters.aborted, pool.counters.in_flight) == (1, 0)


async def test_what_the_consumers_write_raises_ends_the_request() -> None:
    def write(piece: bytes) -> None:
        raise RuntimeError("the client is gone")

    for answer in (CHUNKED, CHUNKED + chunk(b"a")):

        def make(engine: ScriptedEngine, answer: bytes = answer) -> Script:
            async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await engine.read(reader)
                writer.write(answer)
                await asyncio.sleep(0.05)
                writer.write(chunk(b"b"))
                await engine.until_hung_up(reader)

            return script

        async with pool_over(make) as (engine, pool):
            with pytest.raises(RuntimeError, match="client is gone"):
                async with await pool.request("GET", "/") as response:
                    await response.pipe(write)
            await asyncio.wait_for(engine.hung_up.wait(), 10)
            assert pool.counters.aborted == 1
