"""The heartbeats of an agent's engine."""

from __future__ import annotations

import pytest

from kvxfer import Agent, AgentConfig
from kvxfer.clock import SystemClock
from kvxfer.errors import ClosedError, GrantUnknownError
from kvxfer.transport import MemoryNetwork
from tests.support.agents import BLOCK_BYTES, RECORD, fresh_id, info, introduce


@pytest.mark.parametrize("is_in_memory", [False, True], ids=["sockets", "memory"])
async def test_pulse_before_the_agent_started_is_not_lost(is_in_memory: bool) -> None:
    """An engine that starts first says once that it is idle: a pull of what it was never asked for ends by that."""
    network = MemoryNetwork(clock=SystemClock()) if is_in_memory else None
    config = AgentConfig(unknown_wait_s=0.2)
    source, reader = (Agent(info(name), config=config, network=network) for name in ("source", "reader"))
    source.pulse(has_work=True)
    source.pulse(has_work=False)
    if network is not None:
        network.drive()
    pool = reader.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)
    source.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)
    async with source, reader:
        introduce(source, reader)
        transfer = reader.pull(pool, [0], transfer_id=fresh_id(), source="source", timeout_s=30.0)
        with pytest.raises(GrantUnknownError, match="never asked"):
            await transfer
    with pytest.raises(ClosedError):
        source.pulse(has_work=False)
    if network is not None:
        network.stop()
