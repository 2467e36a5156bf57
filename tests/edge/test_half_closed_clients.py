"""Clients of a router and of a worker that close their sending half: they get their answer, and those that left do not
keep an engine at work."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import pathlib
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, eventually, router_over
from tests.support.raw_http import request
from tests.support.worker_http import running_worker

PROMPT = {"model": "tiny", "prompt": "hello there", "max_tokens": 3}


def asked(path: str, body: dict[str, Any] | None, *, version: str = "1.1") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    return request("GET" if body is None else "POST", path, body=content, version=version)


def ask_half(port: int, data: bytes, meanwhile: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
    """As ``nc -N`` asks: status and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        meanwhile()
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/x/y", "/v1/models", "/health"])
async def test_a_client_of_a_router_that_sends_nothing_more_gets_its_answer(
    path: str, stream: bool, version: str
) -> None:
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    fake.hold = asyncio.Event()
    async with router_over(fake, pass_through=("/v1/x/=engine",)) as router:
        port = int(router.url.rpartition(":")[2])
        is_hot = path in ("/v1/completions", "/v1/x/y")
        data = asked(path, {**PROMPT, "stream": stream} if is_hot else None, version=version)
        asking = asyncio.create_task(asyncio.to_thread(ask_half, port, data))
        if is_hot:
            await asyncio.wait_for(fake.arrived.wait(), 20)
            await asyncio.sleep(0.1)  # the end of sending is seen while the engine computes
        fake.hold.set()
        status, body = await asyncio.wait_for(asking, 20)
        assert status == 200
        if path == "/v1/completions":
            assert b"three" in body
            assert body.endswith(b"data: [DONE]\n\n") is stream
        assert not any(one.left.is_set() for one in fake.received)


@pytest.mark.parametrize(("stream", "delay_s"), [(False, 60.0), (True, 0.01), (True, 60.0)])
async def test_a_client_that_left_keeps_no_engine_at_work(stream: bool, delay_s: float) -> None:
    """It closes its socket without having anything unread, which begins as the end of sending does."""
    fake = FakeWorker("e0", Role.BOTH, dialect="plain")
    fake.tokens, fake.delay_s = [f" {number}" for number in range(10_000)], delay_s
    async with router_over(fake) as router:
        data = asked("/v1/completions", {**PROMPT, "stream": stream})
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(data)
        await asyncio.wait_for(fake.arrived.wait(), 20)
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: "), 20)
        writer.close()
        await asyncio.wait_for(fake.received[0].left.wait(), 5)
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_a_worker_that_sends_nothing_more_gets_its_answer(
    stream: bool, tiny_path: pathlib.Path
) -> None:
    async with running_worker(tiny_path) as worker:
        port = int(worker.url.rpartition(":")[2])
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 50, "stream": stream, "ignore_eos": True}
        status, answer = await asyncio.to_thread(ask_half, port, asked("/v1/completions", body))
        assert status == 200
        assert (answer.count(b'"finish_reason":null') > 0) is stream
        assert answer.endswith(b"data: [DONE]\n\n") is stream
        for path in ("/v1/models", "/metrics", "/live"):
            assert (await asyncio.to_thread(ask_half, port, asked(path, None)))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_keeps_no_worker_at_work(stream: bool, tiny_path: pathlib.Path) -> None:
    async with running_worker(tiny_path) as worker, httpx.AsyncClient(base_url=worker.url, trust_env=False) as client:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 900, "stream": stream, "ignore_eos": True}
        _, writer = await asyncio.open_connection("127.0.0.1", int(worker.url.rpartition(":")[2]))
        writer.write(asked("/v1/completions", body))

        async def running() -> int:
            return int((await client.get("/statistics")).json()["pool"]["used"])

        async def has_begun() -> bool:
            return await running() > 0

        async def is_idle() -> bool:
            return await running() == 0

        await eventually(has_begun)
        writer.close()
        await eventually(is_idle, within_s=2.0)
