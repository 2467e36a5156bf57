"""The router beside a real coordinator: workers come, go, and stay known while the coordinator is away."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.server import serve as serve_coordinator
from kvxfer.errors import AuthenticationError
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import serve as serve_router
from kvxfer.rpc import CoordinatorSession, load_or_create_token
from kvxfer.types import DataAddress, Role
from tests.support.fake_workers import FakeWorker, eventually, free_port

REQUEST = {"model": "tiny", "prompt": "hello"}


@contextlib.asynccontextmanager
async def serving(serve: Any, options: Any) -> AsyncIterator[dict[str, Any]]:
    stop = asyncio.Event()
    lines: list[dict[str, Any]] = []
    task = asyncio.create_task(serve(options, on_ready=lines.append, stop=stop))
    try:
        await eventually(lambda: bool(lines) or task.done())
        if task.done():
            task.result()
        yield lines[0]
    finally:
        stop.set()
        await asyncio.wait({task})


def registered(fake: FakeWorker, target: str, token: bytes) -> CoordinatorSession:
    return CoordinatorSession(
        target,
        token,
        fake.incarnation.boot_nonce,
        fake.member.info,
        DataAddress("127.0.0.1", 1, "", "host"),
        (),
        on_membership=lambda membership: None,
    )


async def test_workers_come_and_go_and_stay_known_while_the_coordinator_is_away(tmp_path: pathlib.Path) -> None:
    token_file = str(tmp_path / "token")
    token = load_or_create_token(token_file)
    port = free_port()
    coordinator = CoordinatorOptions(port=port, token_file=token_file)
    target = f"127.0.0.1:{port}"
    p, d = FakeWorker("p0", Role.PREFILL), FakeWorker("d0")
    async with contextlib.AsyncExitStack() as stack:
        for fake in (p, d):
            await stack.enter_async_context(fake.running())
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        await first.enter_async_context(serving(serve_coordinator, coordinator))
        options = RouterOptions(coordinator=target, token_file=token_file, shutdown_grace_s=0.2)
        line = await stack.enter_async_context(serving(serve_router, options))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=line["http_url"], trust_env=False, timeout=30.0)
        )
        sessions = [registered(fake, target, token) for fake in (p, d)]
        for session in sessions:
            await stack.enter_async_context(session)

        async def workers() -> int:
            return len((await client.get("/v1/workers")).json()["data"])

        async def knows_both() -> bool:
            return await workers() == 2

        await eventually(knows_both)
        answer = await client.post("/v1/completions", json=REQUEST)
        assert answer.status_code == 200
        assert answer.headers["x-kvxfer-prefill"] == "remote"

        await first.aclose()

        async def is_alone() -> bool:
            return not (await client.get("/health")).json()["coordinator_connected"]

        await eventually(is_alone)
        answer = await client.post("/v1/completions", json=REQUEST)
        assert answer.status_code == 200

        await stack.enter_async_context(serving(serve_coordinator, coordinator))

        async def is_heard() -> bool:
            assert await workers() == 2
            return bool((await client.get("/health")).json()["coordinator_connected"])

        await eventually(is_heard, within_s=30.0)
        await eventually(lambda: all(session.is_connected for session in sessions), within_s=30.0)
        await sessions[0].close()

        async def knows_one() -> bool:
            return await workers() == 1

        await eventually(knows_one)
        answer = await client.post("/v1/completions", json=REQUEST)
        assert answer.headers["x-kvxfer-prefill"] == "local"


async def test_a_wrong_token_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    load_or_create_token(theirs)
    async with serving(serve_coordinator, CoordinatorOptions(token_file=ours)) as line:
        options = RouterOptions(coordinator=line["address"], token_file=theirs)
        with pytest.raises(AuthenticationError):
            await serve_router(options, on_ready=lambda line: None, stop=asyncio.Event())
