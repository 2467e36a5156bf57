"""Agents for tests: on sockets or in a memory network, with a real coordinator in this process where one is wanted."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from kvxfer import Agent, AgentConfig
from kvxfer.clock import SystemClock
from kvxfer.transport import MemoryNetwork
from tests.support.agents import BLOCK_BYTES, RECORD, Coordinator, info, introduce


@pytest.fixture
async def coordinator(tmp_path: pathlib.Path) -> AsyncIterator[Coordinator]:
    running = Coordinator(tmp_path)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(params=["sockets", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Agent, Agent]]:
    """A source and a destination that know each other, each with an allocated pool of 32 blocks."""
    network = MemoryNetwork(clock=SystemClock()) if request.param == "memory" else None
    config = AgentConfig(stall_s=0.3, reconnect_s=0.6)
    async with contextlib.AsyncExitStack() as stack:
        if network is not None:
            network.drive()
            stack.callback(network.stop)
        agents = [Agent(info(name), config=config, network=network) for name in ("source", "destination")]
        for agent in agents:
            agent.allocate_pool(RECORD, block_count=32, block_bytes=BLOCK_BYTES)
            await stack.enter_async_context(agent)
        introduce(*agents)
        yield agents[0], agents[1]


@pytest.fixture
def source(pair: tuple[Agent, Agent]) -> Agent:
    return pair[0]


@pytest.fixture
def destination(pair: tuple[Agent, Agent]) -> Agent:
    return pair[1]
