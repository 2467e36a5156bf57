"""Bodies that a worker cannot take: the client sees why, the log stays quiet, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest

from tests.support.engine.engine_harness import make_prompt
from tests.support.engine.worker_harness import body, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


async def connect(running):
    url = urlsplit(running.ready["http_url"])
    return await asyncio.open_connection(url.hostname, url.port)


async def read_error(reader):
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))["error"]


async def hang_up(writer):
    writer.close()
    await writer.wait_closed()


async def is_served(running):
    answer = await running.client.post("/v1/completions", json=body(make_prompt(4), max_tokens=1))
    return answer.status_code == 200


async def test_worker_413_is_read_by_a_client_that_sends_all_of_its_body_first(tiny_path):
    async with serving(tiny_path, max_body_bytes=1000) as running:
        reader, writer = await connect(running)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % (8 << 20) + b"x" * (8 << 20))
        await writer.drain()
        status, error = await read_error(reader)
        assert (status, error["message"]) == (413, "the body is longer than max_body_bytes 1000")
        await hang_up(writer)
        assert await is_served(running)


async def test_worker_unfinished_bodies_are_refused_in_time_and_keep_no_other_out(tiny_path):
    async with serving(tiny_path, body_stall_s=0.3, max_waiting=1) as running:
        slow = [await connect(running) for _ in range(20)]
        for _, writer in slow:
            writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        assert await is_served(running)
        for reader, writer in slow:
            status, error = await read_error(reader)
            assert (status, "body_stall_s 0.3" in error["message"]) == (408, True)
            await hang_up(writer)


async def test_worker_request_with_both_a_length_and_chunks_is_refused(tiny_path):
    async with serving(tiny_path) as running:
        reader, writer = await connect(running)
        writer.write(HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        status, error = await read_error(reader)
        assert (status, error["code"]) == (400, "protocol")
        await hang_up(writer)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_worker_client_that_leaves_amid_its_body_is_no_traceback(tiny_path, caplog, is_reset):
    async with serving(tiny_path) as running:
        with caplog.at_level(logging.WARNING):
            _, writer = await connect(running)
            writer.write(HEAD + b"content-length: 100\r\n\r\n{")
            await writer.drain()
            if is_reset:
                writer.transport.abort()
            await hang_up(writer)
            assert await is_served(running)
        assert not caplog.records
