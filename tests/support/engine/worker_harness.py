"""What the worker's tests share: a worker serving HTTP in this process, and the bodies that it is asked with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import httpx

from kvxfer.engine.options import WorkerOptions
from kvxfer.engine.worker import serve


@dataclasses.dataclass
class Running:
    client: httpx.AsyncClient
    ready: dict
    stop: asyncio.Event
    task: asyncio.Task

    async def statistics(self) -> dict:
        return (await self.client.get("/statistics")).json()

    async def wait_idle(self, *, timeout_s: float = 5.0) -> dict:
        """The statistics, once nothing is used, reserved or granted any more."""
        async with asyncio.timeout(timeout_s):
            while True:
                now = await self.statistics()
                pool = now["pool"]
                if not (pool["used"] or pool["reserved"] or pool["granted"] or now["engine"]["waiting"]):
                    return now
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(path, **options):
    ready: asyncio.Future = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    values = {
        "model": str(path),
        "pool_blocks": 96,
        "threads": 1,
        "shutdown_grace_s": 0.5,
        "leg_keys": False,
        **options,
    }
    task = asyncio.create_task(serve(WorkerOptions(**values), on_ready=ready.set_result, stop=stop))
    await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        ready.cancel()
        task.result()
    line = ready.result()
    async with httpx.AsyncClient(base_url=line["http_url"], trust_env=False, timeout=30) as client:
        try:
            yield Running(client, line, stop, task)
        finally:
            stop.set()
            await task


def params(role, transfer_id):
    end = {"ranks": 1, "address": ""}
    return {
        "transfer_id": str(transfer_id),
        "attempt": 1,
        "role": role,
        "source": {"agent_id": "p", **end},
        "destination": {"agent_id": "d", **end},
        "first_token": "decode",
    }


def body(prompt, **more):
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
