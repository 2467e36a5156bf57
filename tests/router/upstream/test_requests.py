"""Requests and answers over real sockets: what is sent, what comes back, and which connections are kept."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import InvalidArgumentError, UsageError
from kvxfer.router.upstream import (
    UpstreamLimits,
    UpstreamPool,
    UpstreamRequestError,
    UpstreamTooLargeError,
)
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.upstream import CHUNKED, HELLO, LAST, OK, chunk, pool_over, until


async def test_a_request_is_sent_as_it_was_given_and_the_connection_is_kept() -> None:
    async with pool_over(lambda engine: engine.answering(HELLO)) as (engine, pool):
        for _ in range(3):
            headers = [(b"Content-Type", b"application/json"), (b"x-request-id", b"7")]
            async with await pool.request("POST", "/v1/completions?a=b", headers, [b"{", b"}"]) as response:
                assert (response.status, response.headers) == (200, [(b"content-length", b"5")])
                assert await response.read(5) == b"hello"
        head, body = engine.requests[0]
        assert head.decode() == (
            "POST /v1/completions?a=b HTTP/1.1\r\nContent-Type: application/json\r\nx-request-id: 7\r\n"
            f"host: {engine.address}\r\ncontent-length: 2\r\n\r\n"
        )
        assert body == b"{}"
        counters = pool.counters
        assert (engine.connections, counters.connected, counters.reused, counters.completed) == (1, 1, 2, 3)
        assert (counters.open, counters.idle, counters.in_flight) == (1, 1, 0)


@pytest.mark.parametrize(
    ("method", "answer", "status", "body", "is_kept"),
    [
        ("HEAD", OK + b"content-length: 99\r\n\r\n", 200, b"", True),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", 304, b"", True),
        ("POST", b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO, 200, b"hello", True),
        ("POST", CHUNKED + chunk(b"ab") + chunk(b"c") + b"0\r\nx-late: 1\r\n\r\n", 200, b"abc", True),
        ("GET", HELLO + b"surplus", 200, b"hello", False),
        ("GET", OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi", False),
    ],
)
async def test_an_answer_ends_where_it_should(
    method: str, answer: bytes, status: int, body: bytes, is_kept: bool
) -> None:
    async with pool_over(lambda engine: engine.answering(answer)) as (engine, pool):
        for _ in range(2):
            async with await pool.request(method, "/") as response:
                assert response.status == status
                assert await response.read(1000) == body
        assert engine.connections == (1 if is_kept else 2)
        assert (b"content-length" in engine.requests[0][0]) == (method == "POST")


async def test_an_answer_until_the_connection_closes_is_whole() -> None:
    answer = OK + b"\r\n" + b"until the end"
    async with pool_over(lambda engine: engine.answering(answer, closes=True)) as (engine, pool):
        for _ in range(2):
            async with await pool.request("GET", "/") as response:
                assert await response.read(100) == b"until the end"
        assert (engine.connections, pool.counters.completed) == (2, 2)


async def test_chunks_come_as_they_came_and_through_a_pipe() -> None:
    gate = asyncio.Event()

    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await engine.read(reader)
                writer.write(CHUNKED + chunk(b"one") + chunk(b"two"))
                await gate.wait()
                writer.write(chunk(b"three") + LAST)

        return script

    async with pool_over(make) as (engine, pool):
        for is_piped in (False, True):
            gate.clear()
            chunks: list[bytes] = []
            async with await pool.request("GET", "/") as response:
                if is_piped:
                    task = asyncio.create_task(response.pipe(chunks.append))
                    await until(lambda: b"".join(chunks) == b"onetwo")  # noqa: B023
                    gate.set()
                    await task
                else:
                    async for piece in response:
                        chunks.append(piece)
                        gate.set()
            assert b"".join(chunks) == b"onetwothree"
            assert chunks[-1] == b"three"
        assert engine.connections == 1


async def test_a_big_body_arrives_whole_while_the_engine_reads_slowly() -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.1)
            await engine.read(reader)
            writer.write(HELLO)
            await engine.until_hung_up(reader)

        return script

    parts = [bytes([byte]) * 1_000_001 for byte in range(20)]
    async with pool_over(make) as (engine, pool):
        async with await pool.request("POST", "/", (), parts) as response:
            assert await response.read(5) == b"hello"
        assert engine.requests[0][1] == b"".join(parts)
        assert pool.counters.idle == 1


@pytest.mark.parametrize(("status", "is_sent"), [(413, False), (200, True)])
async def test_an_early_answer_is_heard_while_the_body_is_sent(status: int, is_sent: bool) -> None:
    early = b"HTTP/1.1 %d Early\r\ntransfer-encoding: chunked\r\n\r\n" % status + chunk(b"soon")
    received = 0

    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal received
            await reader.readuntil(b"\r\n\r\n")
            writer.write(early)
            await asyncio.sleep(0.1)
            if is_sent:
                received = len(await reader.readexactly(30_000_000))
            writer.write(LAST)
            await writer.drain()
            await engine.until_hung_up(reader)

        return script

    async with pool_over(make) as (_, pool):
        async with await pool.request("POST", "/", (), [b"x" * 30_000_000]) as response:
            assert response.status == status
            assert await response.read(100) == b"soon"
        assert received == (30_000_000 if is_sent else 0)
        assert pool.counters.idle == (1 if is_sent else 0), "a request that was not sent whole ends its connection"


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/\r\nx: y", []),
        ("GET", "/ HTTP/1.1", []),
        ("GET\r\n", "/", []),
        ("CONNECT", "a:1", []),
        ("GET", "/\u00e4", []),
        ("GET", "", []),
        ("GET", "/", [(b"x", b"a\r\nb: c")]),
        ("GET", "/", [(b"x", b"a\nb")]),
        ("GET", "/", [(b"x", b"a\0")]),
        ("GET", "/", [(b"x\r\ny", b"a")]),
        ("GET", "/", [(b"x: y", b"a")]),
        ("GET", "/", [(b"", b"a")]),
        ("GET", "/", [(b"Host", b"a"), (b"host", b"b")]),
        ("GET", "/", [(b"Content-Length", b"3")]),
        ("GET", "/", [(b"Transfer-Encoding", b"chunked")]),
        ("GET", "/", [(b"expect", b"100-continue")]),
        ("GET", "/", [(b"connection", b"close")]),
    ],
)
async def test_a_request_that_could_be_read_as_another_is_refused_before_it_is_sent(
    method: str, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    async with pool_over(lambda engine: engine.answering(HELLO)) as (engine, pool):
        with pytest.raises(UpstreamRequestError):
            await pool.request(method, target, headers)
        assert (engine.connections, pool.counters.requests) == (0, 0)


async def test_an_answer_longer_than_its_reader_allows_is_given_up() -> None:
    async with pool_over(lambda engine: engine.answering(HELLO)) as (engine, pool):
        response = await pool.request("GET", "/")
        with pytest.raises(UpstreamTooLargeError, match=f"{engine.address}.*more than 4 bytes"):
            await response.read(4)


async def test_an_answer_has_one_reader() -> None:
    async with pool_over(lambda engine: engine.answering(CHUNKED)) as (_, pool):
        response = await pool.request("GET", "/")
        task = asyncio.create_task(response.read(10))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="one reader"):
            await response.read(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.counters.aborted == 1


@pytest.mark.parametrize("address", ["http://", "ftp://a:1", "http://a:1/path", "a:99999", "http://u:p@a:1", ""])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError):
        UpstreamPool(address)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("http://a", "a:80"),
        ("https://a", "a:443"),
        ("a:1", "a:1"),
        (("::1", 2), "[::1]:2"),
        ("http://[::1]:3/", "[::1]:3"),
    ],
)
async def test_an_address_has_a_name(address: str | tuple[str, int], name: str) -> None:
    assert UpstreamPool(address).address == name


def test_a_bound_is_more_than_zero() -> None:
    with pytest.raises(InvalidArgumentError, match="idle_s"):
        UpstreamLimits(idle_s=0)


async def given_up(pool: UpstreamPool, late: list[bytes], *, after_s: float = 0.05) -> None:
    """A request that its caller cancels before the answer is there."""

    async def call() -> None:
        async with await pool.request("POST", "/", (), [b"{}"], late=late.append) as response:
            await response.read(100)

    task = asyncio.create_task(call())
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_an_answer_that_crosses_with_the_end_of_its_request_is_heard() -> None:
    def answering(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            await engine.until_hung_up(reader)
            writer.write(HELLO)

        return script

    late: list[bytes] = []
    async with pool_over(answering) as (_, pool):
        await given_up(pool, late)
        await until(lambda: late)
        assert late == [b"hello"]
        assert (pool.counters.in_flight, sum(pool.counters.failed.values()), pool.counters.aborted) == (0, 0, 1)


async def test_a_request_that_ends_for_good_is_not_heard_of_again() -> None:
    def silent(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(HELLO[:-2])
            await engine.until_hung_up(reader)

        return script

    late: list[bytes] = []
    async with pool_over(silent) as (engine, pool):
        await given_up(pool, late)
        await asyncio.wait_for(engine.hung_up.wait(), 10)
        await until(lambda: pool.counters.in_flight == 0)
        assert late == []
        assert sum(pool.counters.failed.values()) == 0


async def test_an_answer_that_was_read_is_not_heard_twice() -> None:
    def answering(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(HELLO)
            await engine.until_hung_up(reader)

        return script

    late: list[bytes] = []
    async with pool_over(answering) as (_, pool):
        async with await pool.request("POST", "/", (), [b"{}"], late=late.append) as response:
            assert await response.read(100) == b"hello"
        assert late == []
