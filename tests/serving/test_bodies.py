"""Bodies: too long, too slow, too many at once, and those whose client leaves."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvxfer.serving.bodies import Bodies, _ReceivedBody
from kvxfer.serving.limits import ServingLimits
from tests.support.serving.servers import (
    ConnectionPhase,
    eventually,
    hang_up,
    head,
    is_closed,
    logged,
    read_answer,
    read_error,
    served,
    trickling,
)

MIB = 1 << 20


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_server_413_is_read_by_a_client_that_sends_all_of_its_body_first(is_chunked: bool) -> None:
    async with served(max_body_bytes=1000) as server:
        reader, writer = await server.connect()
        body = b"x" * (24 * MIB)
        if is_chunked:
            writer.write(head(None, "transfer-encoding: chunked") + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        else:
            writer.write(head(len(body)) + body)
        await writer.drain()
        status, headers, answer = await read_answer(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert b"max_body_bytes 1000" in answer
        writer.write_eof()
        assert await is_closed(reader)


async def test_server_413_waits_for_no_client_that_stops_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.READ_ON_IDLE_S", 0.1)
    async with served(max_body_bytes=1000) as server:
        reader, _ = await server.send(head(2000) + b"x")
        assert (await read_answer(reader))[0] == 413
        await server.wait_phase(ConnectionPhase.CLOSING, 0)
        assert len(server.http.connections) == 0


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * MIB)
        await writer.drain()


async def test_server_413_reads_on_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.READ_ON_BYTES_MAX", 4 * MIB)
    async with served(max_body_bytes=1000) as server:
        _, writer = await server.send(head(None, "transfer-encoding: chunked") + b"%x\r\n" % (1 << 40))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_ever(writer), 20)
        await eventually(lambda: len(server.http.connections) == 0)


async def test_server_client_that_waits_for_100_is_told_413_before_it_sends() -> None:
    async with served(max_body_bytes=1000) as server:
        reader, writer = await server.send(head(5000, "expect: 100-continue"))
        assert (await read_error(reader))[0] == 413
        writer.close()
        reader, writer = await server.send(head(5, "expect: 100-continue"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"12345")
        assert (await read_answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"body_stall_s": 0.2}, "body_stall_s 0.2"), ({"body_timeout_s": 0.2}, "body_timeout_s 0.2")],
)
async def test_server_body_that_stops_coming_is_408(limits: dict[str, float], words: str) -> None:
    async with served(**limits) as server:
        reader, _ = await server.send(head(1000) + b"x")
        status, _, message = await read_error(reader)
        assert (status, words in message) == (408, True)


async def test_server_body_that_trickles_is_408() -> None:
    async with served(body_stall_s=0.2) as server:
        reader, writer = await server.send(head(1000))
        async with trickling(writer, b"x"):
            assert (await read_error(reader))[0] == 408


class Clock:
    """Stands for the asyncio timeout around one body."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def reschedule(self, when: float) -> None:
        self.at_s = when


def test_bodies_clock_is_set_anew_by_each_step_and_never_beyond_the_end() -> None:
    bodies = Bodies(ServingLimits(max_body_bytes=MIB, body_stall_s=5.0, body_timeout_s=30.0))
    clock = Clock()
    body = _ReceivedBody(clock, end_s=130.0)  # type: ignore[arg-type]
    for size, now_s, expected_s in ((4095, 104.0, 0.0), (1, 104.0, 109.0), (1, 108.0, 109.0), (9000, 128.0, 130.0)):
        bodies._take(body, b"x" * size, now_s)
        assert clock.at_s == expected_s


async def test_server_bodies_beyond_the_budget_refuse_the_one_that_is_read_for_longest() -> None:
    async with served(max_body_bytes=1000, body_budget_bytes=2700) as server:
        slow = []
        for _ in range(3):
            reader, writer = await server.send(head(1000) + b"x" * 800)
            slow.append((reader, writer))
            await server.wait_phase(ConnectionPhase.BODY, len(slow))
            await eventually(lambda: server.bodies.held_bytes == 800 * len(slow))
        reader, writer = await server.send(head(1000) + b"x" * 1000)
        assert (await read_answer(reader))[0] == 200  # no request waits for the slow ones
        status, code, message = await read_error(slow[0][0])
        assert (status, code) == (503, "overloaded")
        assert "body_budget_bytes 2700" in message
        for late_reader, late_writer in slow[1:]:
            late_writer.write(b"x" * 200)
            assert (await read_answer(late_reader))[0] == 200
        assert server.bodies.held_bytes == 0
        for _, late_writer in [*slow, (reader, writer)]:
            late_writer.close()


async def test_server_many_unfinished_bodies_keep_no_other_request_out() -> None:
    async with served(connections_max=400) as server:
        slow = [await server.connect() for _ in range(200)]
        for _, writer in slow:
            writer.write(head(1000) + b"x")
        await server.wait_phase(ConnectionPhase.BODY, 200)
        reader, writer = await server.send(head(2) + b"{}")
        assert (await read_answer(reader))[0] == 200
        for _, other in [*slow, (reader, writer)]:
            other.close()
        await eventually(lambda: server.left == 200)
        assert server.bodies.held_bytes == 0


@pytest.mark.parametrize("is_reset", [False, True])
async def test_server_client_that_leaves_amid_its_body_is_no_line_of_log(is_reset: bool) -> None:
    async with served() as server:
        with logged(logging.INFO) as records:
            _, writer = await server.send(head(1000) + b"x")
            await server.wait_phase(ConnectionPhase.BODY, 1)
            if is_reset:
                writer.transport.abort()
            else:
                writer.close()
            await eventually(lambda: server.left == 1)
        assert not records


async def test_server_that_stops_ends_unfinished_bodies_with_503_and_no_traceback() -> None:
    with logged(logging.WARNING) as records:
        async with served() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head(1000) + b"x")
            await server.wait_phase(ConnectionPhase.BODY, 1)
        status, code, _ = await read_error(reader)
        assert (status, code) == (503, "closed")
        await hang_up(writer)
    assert not records
