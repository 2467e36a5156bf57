"""A real coordinator on a free port, in this loop, and agents that remember what they heard."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvxfer.coordinator import CoordinatorOptions, serve
from kvxfer.rpc import CoordinatorSession, MembershipWatch, load_or_create_token
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Member,
    Membership,
    PoolRecord,
    Role,
    WorkerInfo,
)

RECORD = CompatibilityRecord("m", "c", "w", "float16", 2, 3, 64, 16, "lb2thd", "plain", "rope", "sdpa")
PATIENCE_S = 20.0
"""Bound on waits that should take milliseconds: the machine is small and shared."""


def pool(pool_id: int = 1) -> PoolRecord:
    return PoolRecord(pool_id, RECORD, 8, 4096, Exposure.GRANT, False)


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for ``condition``; fail saying ``what`` was waited for."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited {PATIENCE_S} s for {what}")


class Recorder:
    """One agent's session, with everything it was told."""

    def __init__(
        self,
        cluster: Cluster,
        agent_id: str,
        *,
        nonce: int = 1,
        pools: tuple[PoolRecord, ...] = (),
        token: bytes | None = None,
        target: str = "",
    ):
        self.gone: list[AgentRef] = []
        self.states: list[bool] = []
        self.drains: list[str] = []
        self.session = CoordinatorSession(
            target or cluster.address,
            cluster.token if token is None else token,
            bytes([nonce]) * 16,
            WorkerInfo(agent_id, Role.BOTH, "m", f"http://127.0.0.1:{nonce}"),
            DataAddress("127.0.0.1", 4000 + nonce, f"/run/{agent_id}", "host"),
            pools,
            on_membership=self.heard,
            on_state=self.states.append,
            on_drain=self.drains.append,
        )

    def heard(self, membership: Membership) -> None:
        self.gone += membership.gone

    @property
    def members(self) -> dict[str, Member]:
        return {member.ref.agent_id: member for member in self.session.membership.members}

    def cut(self) -> None:
        """Vanish as a killed process does: no goodbye."""
        assert self.session._task is not None
        self.session._task.cancel()


class Cluster:
    """A coordinator that can be stopped and started again on its port."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self.options = options
        self.token = load_or_create_token(options.token_file)
        self.ready: dict[str, Any] = {}
        self.agents: list[Recorder] = []
        self.watches: list[MembershipWatch] = []
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    async def start(self) -> None:
        listening = asyncio.Event()

        def on_ready(ready: dict[str, Any]) -> None:
            self.ready = ready
            listening.set()

        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve(self.options, on_ready=on_ready, stop=self._stop))
        waiter = asyncio.create_task(listening.wait())
        await asyncio.wait({self._task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            waiter.cancel()
            self._task.result()
        self.options = dataclasses.replace(self.options, port=int(self.address.rpartition(":")[2]))

    async def watch(self) -> Callable[[], dict[str, Member]]:
        """What a router sees of the members, now and later, by agent id."""
        watch = MembershipWatch(self.address, self.token)
        self.watches.append(watch)
        watch.start()
        await watch.wait_connected()
        return lambda: {member.ref.agent_id: member for member in watch.membership.members}

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task

    def agent(self, agent_id: str, **more: Any) -> Recorder:
        agent = Recorder(self, agent_id, **more)
        self.agents.append(agent)
        return agent


@contextlib.asynccontextmanager
async def running(tmp_path: pathlib.Path, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster whose agents and coordinator all end with the block."""
    times = {"heartbeat_s": 0.2, "suspect_after_s": 0.8, "dead_after_s": 2.0}
    cluster = Cluster(CoordinatorOptions(token_file=str(tmp_path / "token"), **{**times, **options}))
    await cluster.start()
    try:
        yield cluster
    finally:
        await asyncio.gather(*(agent.session.close() for agent in cluster.agents))
        await asyncio.gather(*(watch.close() for watch in cluster.watches))
        await cluster.stop()
