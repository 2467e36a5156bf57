"""One GET, as the supervisor asks a child: whatever comes back is an answer or one error."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.cli import asking
from kvxfer.errors import TransportError


async def answered(content: bytes, *, timeout_s: float = 30.0, stays_open: bool = False) -> tuple[int, bytes]:
    opened: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        await writer.drain()
        if not stays_open:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        return await asking.get(f"http://127.0.0.1:{port}", "/x", timeout_s=timeout_s)
    finally:
        server.close()
        for writer in opened:
            writer.close()
            await writer.wait_closed()


async def test_bodies_of_both_kinds_are_read() -> None:
    assert await answered(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno") == (503, b"no")
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n"
    assert await answered(chunked) == (200, b"yes")


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno", b"HTTP/1.1 2x0 OK\r\n\r\n"]
)
async def test_what_is_no_answer_is_one_error(content: bytes) -> None:
    with pytest.raises(TransportError, match="gives no answer"):
        await answered(content)


async def test_silence_is_bounded() -> None:
    with pytest.raises(TransportError, match="gives no answer: TimeoutError"):
        await answered(b"HTTP/1.1 200 OK\r\n\r\n", timeout_s=0.05, stays_open=True)
