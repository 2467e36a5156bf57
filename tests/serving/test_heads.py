"""Heads of requests: slow ones, malformed ones, and those that can be read in two ways."""

from __future__ import annotations

import logging

import pytest

from tests.support.serving.servers import (
    ConnectionPhase,
    eventually,
    head,
    is_closed,
    logged,
    read_answer,
    read_error,
    served,
    trickling,
)


@pytest.mark.parametrize("is_second", [False, True])
async def test_server_head_that_does_not_arrive_is_408_and_closes(is_second: bool) -> None:
    async with served(header_timeout_s=0.2) as server:
        reader, writer = await server.connect()
        if is_second:
            writer.write(head(2) + b"{}")
            assert (await read_answer(reader))[0] == 200
        writer.write(b"POST / HTTP/1.1\r\nhost:")
        status, _, message = await read_error(reader)
        assert (status, "header_timeout_s 0.2" in message) == (408, True)
        assert await is_closed(reader)


async def test_server_head_that_trickles_has_one_deadline_in_all() -> None:
    async with served(header_timeout_s=0.3) as server:
        reader, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\n")
        async with trickling(writer, b"a: b\r\n"):
            assert (await read_error(reader))[0] == 408


async def test_server_connection_that_never_says_anything_is_closed() -> None:
    async with served(header_timeout_s=0.2) as server:
        reader, _ = await server.connect()
        assert await is_closed(reader)


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (head(3, "transfer-encoding: chunked") + b"1\r\na\r\n0\r\n\r\n", 400, "both content-length and transfer"),
        (b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "content-length"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "content-length"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501, "chunked"),
        (b"POST / HTTP/1.1\r\n\r\n", 400, "host"),
        (b"\x16\x03\x01\x00\x05hello\r\n\r\n", 400, "illegal request line"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 20_000 + b"\r\n\r\n", 431, "exceeds 16384"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 900_000, 431, "too long"),
    ],
    ids=["length and chunks", "1.0 chunks", "two lengths", "below 0", "gzip", "no host", "TLS", "long", "endless"],
)
async def test_server_request_that_is_not_plain_http_is_refused_and_closes(
    sent: bytes, status: int, words: str
) -> None:
    async with served() as server:
        with logged() as records:
            reader, writer = await server.send(sent + b"GET / HTTP/1.1\r\nhost: smuggled\r\n\r\n")
            found, code, message = await read_error(reader)
            assert (found, code) == (status, "protocol")
            assert words in message.lower() or words in message
            writer.write_eof()
            assert await is_closed(reader)
            writer.close()
        assert not records
        assert server.done == 0


async def test_server_body_with_a_bad_chunk_ends_its_request_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.READ_ON_IDLE_S", 60.0)  # the connection outlives its request
    async with served() as server:
        with logged(logging.WARNING) as records:
            reader, writer = await server.send(head(None, "transfer-encoding: chunked") + b"1\r\na\r\n")
            await server.wait_phase(ConnectionPhase.BODY, 1)
            writer.write(b"not a chunk\r\n")
            assert (await read_error(reader))[0] == 400
            await eventually(lambda: server.left == 1, within_s=5)
            assert server.http.connections.count(ConnectionPhase.CLOSING) == 1
            writer.close()
            await server.wait_phase(ConnectionPhase.CLOSING, 0)
        assert not records
        assert server.bodies.held_bytes == 0


async def test_server_requests_on_one_connection_are_served_in_turn() -> None:
    async with served() as server:
        reader, _ = await server.send(head(2) + b"{}" + head(3) + b"abc")
        for size in (2, 3):
            status, _, body = await read_answer(reader)
            assert (status, body) == (200, b'{"size":%d}' % size)
        await server.wait_phase(ConnectionPhase.IDLE, 1)
