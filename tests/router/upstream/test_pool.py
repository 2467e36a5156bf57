"""Many requests on few connections, slow consumers, cancelled callers: nothing is exceeded, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import random
import ssl

import pytest

from kvxfer.router.upstream import (
    UpstreamBusyError,
    UpstreamClosedError,
    UpstreamDeadlines,
    UpstreamLimits,
    UpstreamPhase,
    UpstreamPool,
    UpstreamTimeoutError,
)
from kvxfer.serving.tls import TlsFiles
from tests.support.certificates import Authority
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.upstream import CHUNKED, HELLO, LAST, chunk, pool_over, until


def echo(engine: ScriptedEngine, *, pause_s: float = 0.0) -> Script:
    """Streams the first 50 bytes of each request's body back in chunks of one byte."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await engine.read(reader)
            writer.write(CHUNKED)
            for at in range(len(body[:50])):
                writer.write(chunk(body[at : at + 1]))
                await writer.drain()
                await asyncio.sleep(pause_s)
                if writer.is_closing():
                    return
            writer.write(LAST)

    return script


def sockets() -> set[str]:
    """The open sockets of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def flood(engine: ScriptedEngine, *, sent: list[int]) -> Script:
    """64 MiB in chunks of 64 KiB, as fast as they are taken."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(CHUNKED)
        for _ in range(1024):
            writer.write(chunk(b"x" * 65536))
            await writer.drain()
            sent[0] += 65536
        writer.write(LAST)
        await engine.until_hung_up(reader)

    return script


async def test_500_requests_on_8_connections_all_get_their_own_answer() -> None:
    limits = UpstreamLimits(connections_max=8, tick_s=0.01)
    async with pool_over(echo, limits) as (engine, pool):

        async def ask(number: int) -> None:
            body = b"%04d" % number
            pieces: list[bytes] = []
            async with await pool.request("POST", "/", (), [body]) as response:
                if number % 2:
                    await response.pipe(pieces.append)
                else:
                    pieces.append(await response.read(100))
            assert b"".join(pieces) == body

        await asyncio.gather(*map(ask, range(500)))
        counters = pool.counters
        assert (counters.completed, counters.connected, counters.reused, engine.connections) == (500, 8, 492, 8)
        assert (counters.open, counters.idle, counters.waiting, counters.in_flight) == (8, 8, 0, 0)


async def test_the_connection_that_was_used_last_is_used_first_and_the_others_end() -> None:
    limits = UpstreamLimits(idle_s=0.3, tick_s=0.01)
    async with pool_over(echo, limits) as (_, pool):

        async def ask() -> None:
            async with await pool.request("POST", "/", (), [b"ab"]) as response:
                await response.read(10)

        await asyncio.gather(*(ask() for _ in range(5)))
        assert pool.counters.idle == 5

        async def one_left() -> bool:
            await ask()
            return pool.counters.open == 1

        async with asyncio.timeout(20):
            while not await one_left():
                pass
        assert pool.counters.connected == 5
        await until(lambda: pool.counters.open == 0)
        assert pool._timer is None or pool._owned == set()


async def test_the_wait_for_a_connection_is_bounded_in_length_and_in_time() -> None:
    limits = UpstreamLimits(connections_max=1, waiting_max=1, tick_s=0.01)
    async with pool_over(lambda engine: engine.answering(CHUNKED), limits) as (_, pool):
        async with await pool.request("GET", "/"):
            first = asyncio.create_task(pool.request("GET", "/", deadlines=UpstreamDeadlines(queue_s=0.1)))
            await until(lambda: pool.counters.waiting == 1)
            with pytest.raises(UpstreamBusyError):
                await pool.request("GET", "/")
            with pytest.raises(UpstreamTimeoutError) as caught:
                await first
            assert caught.value.phase is UpstreamPhase.QUEUE
        assert pool.counters.failed[UpstreamPhase.QUEUE] == 2


async def test_a_connection_that_ends_lets_the_next_request_open_one() -> None:
    limits = UpstreamLimits(connections_max=1, tick_s=0.01)
    async with pool_over(lambda engine: engine.answering(HELLO, closes=True), limits) as (engine, pool):

        async def ask() -> bytes:
            async with await pool.request("GET", "/") as response:
                return await response.read(10)

        answers = await asyncio.gather(*(ask() for _ in range(20)), return_exceptions=True)
        lost = [answer for answer in answers if answer != b"hello"]
        assert all(isinstance(error, UpstreamClosedError) for error in lost)
        assert engine.connections + len(lost) >= 10


@pytest.mark.parametrize("looks", [1, 2], ids=["before it is handed over", "after that"])
async def test_a_request_that_waits_takes_no_connection_with_an_earlier_tls_context(
    tmp_path: pathlib.Path, looks: int
) -> None:
    """The files change between two looks at them: the first is for the first connection, the next is taken when that
    one is free, and the third by the request that it is given to."""
    authority, engine = Authority(tmp_path), ScriptedEngine()
    earlier, newest = authority.client_context(), authority.client_context()
    looked = 0
    served: list[tuple[bytes, int]] = []
    """Each request's body, and the number of the connection that it came by."""
    may_answer = asyncio.Event()

    def look() -> ssl.SSLContext:
        nonlocal looked
        looked += 1
        return earlier if looked <= looks else newest

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.connections += 1
        number = engine.connections
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                served.append(((await engine.read(reader))[1], number))
                await may_answer.wait()
                writer.write(HELLO)
        writer.close()

    async def ask(body: bytes) -> None:
        async with await pool.request("POST", "/", (), [body]) as response:
            assert await response.read(10) == b"hello"

    shown = authority.issue("engine")
    tls = TlsFiles(shown.cert, shown.key).context()
    async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        host, port = server.sockets[0].getsockname()
        pool = UpstreamPool((host, port), UpstreamLimits(connections_max=1, waiting_max=2, tick_s=0.01), tls=look)
        tasks = []
        try:
            for body in (b"0", b"1", b"2"):
                tasks.append(asyncio.create_task(ask(body)))
                await until(lambda: bool(served) and pool.counters.waiting == len(tasks) - 1)
            may_answer.set()
            await asyncio.gather(*tasks)
        finally:
            await pool.close()
        order = [b"0", b"1", b"2"] if looks == 1 else [b"0", b"2", b"1"]
        assert served == list(zip(order, (1, 2, 2), strict=True))
        assert (pool.counters.connected, pool.counters.reused) == (2, 1)


@pytest.mark.parametrize("is_piped", [False, True])
async def test_a_slow_consumer_holds_the_engine_up_and_no_deadline_passes(is_piped: bool) -> None:
    sent = [0]
    async with pool_over(lambda engine: flood(engine, sent=sent)) as (_, pool):
        deadlines = UpstreamDeadlines(between_chunks_s=0.1)
        got = 0
        async with await pool.request("GET", "/", deadlines=deadlines) as response:
            if is_piped:

                def write(piece: bytes) -> None:
                    nonlocal got
                    got += len(piece)
                    response.pause()

                task = asyncio.create_task(response.pipe(write))
            before = -1
            while before != sent[0]:
                before = sent[0]
                await asyncio.sleep(0.3)
            assert sent[0] < 40 << 20, "the kernel's buffers, and no more"
            kept = sum(map(len, response._chunks))
            assert kept <= UpstreamLimits().buffer_bytes_max + (256 << 10)
            if is_piped:
                assert got <= 512 << 10
                while not task.done():
                    response.resume()
                    await asyncio.sleep(0)
                await task
            else:
                async for piece in response:
                    got += len(piece)
        assert (got, pool.counters.completed) == (64 << 20, 1)


async def test_a_pipe_that_was_paused_before_it_began_waits() -> None:
    async with pool_over(lambda engine: engine.answering(CHUNKED + chunk(b"a") + LAST)) as (_, pool):
        pieces: list[bytes] = []
        async with await pool.request("GET", "/") as response:
            await until(lambda: pool.counters.completed == 1)
            response.pause()
            task = asyncio.create_task(response.pipe(pieces.append))
            await asyncio.sleep(0.02)
            assert pieces == []
            response.resume()
            await task
        assert pieces == [b"a"]


async def test_requests_cancelled_at_any_moment_leave_nothing() -> None:
    """Cancelled in the queue, in connecting, in sending, before the head, and in the body."""
    limits = UpstreamLimits(connections_max=5, tick_s=0.01)
    rng = random.Random(7)
    before = sockets()
    async with pool_over(lambda engine: echo(engine, pause_s=0.001), limits) as (_, pool):

        async def ask(number: int) -> None:
            body = [b"x" * (3_000_000 if number % 7 == 0 else 5)]
            async with await pool.request("POST", "/", (), body) as response:
                if number % 2:
                    await response.pipe(lambda piece: None)
                elif number % 7:
                    await response.read(10)

        for round_ in range(12):
            tasks = [asyncio.create_task(ask(number)) for number in range(20)]
            for task in tasks:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0 if round_ % 2 else rng.random() / 100)
                if number_of_turns := rng.randrange(3):
                    for _ in range(number_of_turns):
                        await asyncio.sleep(0)
                    task.cancel()
            for task in tasks[::7]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(one) for one in done} <= {type(None), asyncio.CancelledError}
            counters = pool.counters
            assert (counters.in_flight, counters.waiting) == (0, 0)
            await until(lambda: pool.counters.open == pool.counters.idle == pool._slots)
        async with await pool.request("POST", "/", (), [b"still"]) as response:
            assert await response.read(10) == b"still"
    gc.collect()
    await until(lambda: sockets() <= before)


async def test_a_pool_that_closes_ends_what_runs_and_what_waits() -> None:
    limits = UpstreamLimits(connections_max=1, tick_s=0.01)
    async with pool_over(lambda engine: engine.answering(CHUNKED), limits) as (_, pool):
        response = await pool.request("GET", "/")
        waits = asyncio.create_task(pool.request("GET", "/"))
        await until(lambda: pool.counters.waiting == 1)
        await pool.close()
        with pytest.raises(UpstreamClosedError):
            await waits
        with pytest.raises(Exception, match="gave the request up"):
            await response.read(10)
        with pytest.raises(UpstreamClosedError, match="pool is closed"):
            await pool.request("GET", "/")


async def test_a_pipe_wakes_its_task_once_at_the_end() -> None:
    async with pool_over(lambda engine: echo(engine, pause_s=0.002)) as (_, pool):
        response = await pool.request("POST", "/", (), [b"x" * 50])
        pieces: list[bytes] = []
        task = asyncio.create_task(response.pipe(pieces.append))
        await until(lambda: response.is_piped)
        waiter = response._waiter
        assert waiter is not None
        await waiter
        assert (len(pieces), pool.counters.completed) == (50, 1)
        await task
