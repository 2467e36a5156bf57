"""Bodies of requests that do not come, or say that they are longer than may be."""

from __future__ import annotations

import asyncio

import pytest
from router_fakes import FakeWorker, router_over


async def test_a_body_that_never_ends_gives_its_place_back() -> None:
    d = FakeWorker("d0")
    async with router_over(d, max_inflight=1, body_timeout_s=1.0) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5.0)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout_s 1" in answer
        assert (await router.complete()).status_code == 200
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("digits", [7, 30, 5000])
async def test_a_body_that_says_it_is_too_long(digits: int) -> None:
    d = FakeWorker("d0")
    async with router_over(d, max_body_bytes=100_000) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {'9' * digits}\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(65536), 5.0)
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")), answer
        assert b"Traceback" not in answer
        assert (await router.complete()).status_code == 200
        writer.close()
        await writer.wait_closed()
