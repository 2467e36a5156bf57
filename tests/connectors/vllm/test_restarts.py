"""Sources that are not any more what they were: another incarnation under the same name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from kvxfer.agent import Agent
from tests.support.vllm_connector.pair import OPTIONS, Rank, finish_order, load_order, until


@contextlib.asynccontextmanager
async def another_incarnation(of: Rank, known_to: Rank) -> AsyncIterator[Agent]:
    """A restart of an engine, as the other sees it."""
    pools = [pool.published for pool in of.agent.pools]
    async with Agent(of.agent.info, config=OPTIONS.agent_config(0)) as agent:
        agent.connect_peer(known_to.agent.ref, known_to.agent.address, bytes(32))
        known_to.agent.connect_peer(agent.ref, agent.address, bytes(32), pools)
        yield agent


@pytest.mark.parametrize("has_direct", [False, True])
async def test_a_source_that_was_restarted_has_not_what_it_said(p: Rank, d: Rank, has_direct: bool) -> None:
    order = dataclasses.replace(
        load_order(0, (0, 1, 2), has_direct=has_direct), incarnations=(p.agent.ref.incarnation,)
    )
    p.write(0, [4, 5, 6], 0)
    p.source.begin_step(finish_order((4, 5, 6)))
    assert (await d.load(order)).error is None
    async with another_incarnation(p, d):
        error = (await asyncio.wait_for(d.load(order), 1.0)).error
    assert error is not None
    assert error.code == "peer_gone"
    assert "restarted" in str(error)


@pytest.mark.parametrize("has_direct", [False, True])
async def test_a_source_that_is_restarted_while_it_is_waited_for(p: Rank, d: Rank, has_direct: bool) -> None:
    waiting = d.load(load_order(0, (0, 1, 2), has_direct=has_direct))
    await until(lambda: bool(d.agent.statistics().transfers_live or p.source._early))
    async with another_incarnation(p, d):
        error = (await asyncio.wait_for(waiting, 3.0)).error
    assert error is not None
    assert error.code == "peer_gone"
    assert "restarted" in str(error)
