"""Real services under a small limit of open files, and what raises it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.engine.tiny import make_tiny_model
from tests.support import child
from tests.support.serving.servers import hang_up, head, read_answer

IDLE = 200
LINES_MAX = 20


class Process:
    """A service of its own, with what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], log: list[bytes]) -> None:
        self.process = process
        self.port = int(ready["address"].rpartition(":")[2])
        self.log = log

    def open_files_limit(self) -> int:
        text = pathlib.Path(f"/proc/{self.process.pid}/limits").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("Max open files")).split()[3])


@contextlib.asynccontextmanager
async def limited(soft: int, hard: int, *words: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *child.command("serving.limited", str(soft), str(hard), *words), stdout=-1, stderr=-1, env=child.environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[bytes] = []

    async def read_log(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            log.append(line)

    reading = asyncio.create_task(read_log(process.stderr))
    try:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        assert line, b"".join(log).decode()
        yield Process(process, json.loads(line), log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await reading


async def get(port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(method="GET").replace(b" / ", f" {path} ".encode()))
        return (await read_answer(reader))[0]
    finally:
        await hang_up(writer)


async def check_flood(process: Process) -> None:
    """Many more idle connections than there are descriptors: others are served, and the log stays short."""
    idle = [await asyncio.open_connection("127.0.0.1", process.port) for _ in range(IDLE)]
    try:
        for _ in range(5):
            assert await get(process.port, "/health") == 200
        assert len(process.log) < LINES_MAX, b"".join(process.log[:LINES_MAX]).decode()
    finally:
        for _, writer in idle:
            await hang_up(writer)


async def test_router_under_64_open_files_serves_beside_a_flood_of_idle_connections(tmp_path: pathlib.Path) -> None:
    token = f"--token-file={tmp_path / 'token'}"
    async with (
        limited(64, 64, "coordinator", token) as coordinator,
        limited(64, 64, "router", f"--coordinator=127.0.0.1:{coordinator.port}", token) as router,
    ):
        assert router.open_files_limit() == 64
        await check_flood(router)


@pytest.mark.deep
async def test_worker_under_64_open_files_serves_beside_a_flood_of_idle_connections(tmp_path: pathlib.Path) -> None:
    token = f"--token-file={tmp_path / 'token'}"
    model = make_tiny_model(tmp_path / "tiny")
    async with (
        limited(64, 64, "coordinator", token) as coordinator,
        limited(
            64,
            64,
            "worker",
            f"--model={model}",
            "--threads=1",
            "--pool-blocks=16",
            f"--coordinator=127.0.0.1:{coordinator.port}",
            token,
        ) as worker,
    ):
        await check_flood(worker)


@pytest.mark.parametrize("service", ["coordinator", "router"])
async def test_service_raises_its_open_files_limit_at_its_start(service: str, tmp_path: pathlib.Path) -> None:
    token = f"--token-file={tmp_path / 'token'}"
    async with limited(100, 400, "coordinator", token) as coordinator:
        if service == "coordinator":
            assert coordinator.open_files_limit() == 400
            return
        async with limited(100, 400, "router", f"--coordinator=127.0.0.1:{coordinator.port}", token) as router:
            assert router.open_files_limit() == 400


async def test_router_without_room_for_connections_says_which_limit_to_raise(tmp_path: pathlib.Path) -> None:
    token = f"--token-file={tmp_path / 'token'}"
    async with limited(400, 400, "coordinator", token) as coordinator:
        words = ("router", f"--coordinator=127.0.0.1:{coordinator.port}", token, "--max-connections=300")
        process = await asyncio.create_subprocess_exec(
            *child.command("serving.limited", "200", "200", *words), stdout=-1, stderr=-1, env=child.environment()
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode != 0, out) == (True, b"")
        assert b"max_connections 300" in err
        assert b"ulimit -n" in err
        assert b"Traceback" not in err
