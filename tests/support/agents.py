"""What the agent's tests share: a record, names, and a coordinator in this process that can be stopped."""

from __future__ import annotations

import asyncio
import pathlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from kvxfer import Agent, CompatibilityRecord, Role, TransferId, WorkerInfo
from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.server import serve
from kvxfer.rpc import load_or_create_token

RECORD = CompatibilityRecord(
    model="tiny",
    config_fingerprint="c0",
    weights_fingerprint="w0",
    dtype="float32",
    layers=2,
    kv_heads=1,
    head_dim=8,
    block_tokens=16,
    axes="layer,kv,token,head,dim",
    packing="plain",
    rope="none",
    attention_backend="none",
)
BLOCK_BYTES = 8192


def info(agent_id: str, role: Role = Role.BOTH) -> WorkerInfo:
    return WorkerInfo(agent_id, role, "tiny", "")


def fresh_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))


def introduce(*agents: Agent) -> None:
    """Make agents without a coordinator known to each other."""
    for one in agents:
        for other in agents:
            if one is not other:
                pools = [pool.published for pool in other.pools]
                one.connect_peer(other.ref, other.address, bytes(32), pools)


async def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    """Look again and again; TimeoutError if it does not become so."""
    end_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError
        await asyncio.sleep(0.01)


class Coordinator:
    """A coordinator on one port that can be stopped and started again."""

    def __init__(self, directory: pathlib.Path, **options: Any) -> None:
        self._options = options
        self.token_file = directory / "token"
        self.token = load_or_create_token(self.token_file)
        self.port = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        options = CoordinatorOptions(port=self.port, token_file=str(self.token_file), stop_grace_s=0.2, **self._options)
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve(options, on_ready=ready.set_result, stop=self._stop))
        done, _ = await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task in done:
            await self._task
        self.port = int(ready.result()["address"].rpartition(":")[2])

    async def stop(self) -> None:
        if self._task is not None:
            self._stop.set()
            task, self._task = self._task, None
            await task
