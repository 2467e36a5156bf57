"""Agents of a cluster that is too large for everybody to be told of everybody: they meet by name."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable

import pytest

from kvxfer import Agent, AgentConfig, Lane
from kvxfer.errors import AuthenticationError, PeerGoneError
from kvxfer.types import Membership
from tests.support.agents import BLOCK_BYTES, RECORD, Coordinator, fresh_id, info, until

RECONNECT_S = 1.0


@pytest.fixture
async def coordinator(tmp_path: pathlib.Path) -> AsyncIterator[Coordinator]:
    running = Coordinator(tmp_path, whole_view_max=0)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def agents(coordinator: Coordinator) -> AsyncIterator[dict[str, Agent]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(make(coordinator, name)) for name in ("p", "d", "other")}


def make(coordinator: Coordinator, name: str) -> Agent:
    config = AgentConfig(stall_s=0.3, reconnect_s=RECONNECT_S)
    agent = Agent(info(name), coordinator=coordinator.target, token=coordinator.token, config=config, connect_s=10)
    agent.allocate_pool(RECORD, block_count=16, block_bytes=BLOCK_BYTES)
    return agent


async def pulled(source: Agent, reader: Agent, *, lanes: tuple[Lane, ...] | None = None) -> Lane:
    """The lane of one block that was pulled by name, without any wait before."""
    transfer_id = fresh_id()
    source.pools[0].array[1] = 7
    source.grant(source.pools[0], [1], transfer_id=transfer_id, reader=reader.ref.agent_id, ready_blocks=1)
    transfer = reader.pull(
        reader.pools[0], [2], transfer_id=transfer_id, source=source.ref.agent_id, lanes=lanes, deadline_s=20
    )
    result = await transfer
    await transfer.wait_drained()
    assert (reader.pools[0].array[2] == 7).all()
    return result.lane


def deafened(agent: Agent) -> Callable[[], None]:
    """Have an agent learn of nobody until what is returned is called."""
    session = agent._session
    assert session is not None
    heard, kept = session._on_membership, list[Membership]()
    session._on_membership = kept.append

    def listen() -> None:
        session._on_membership = heard
        for membership in kept:
            heard(membership)

    return listen


async def test_a_pull_by_name_is_the_first_that_both_ends_hear_of_each_other(agents: dict[str, Agent]) -> None:
    assert all(agent.members() == () for agent in agents.values())
    await pulled(agents["p"], agents["d"])
    assert await pulled(agents["d"], agents["p"], lanes=(Lane.STREAM,)) is Lane.STREAM
    assert agents["other"].members() == ()


@pytest.mark.parametrize("lane", [Lane.UNIX, Lane.STREAM])
async def test_the_dialer_tries_again_until_the_other_end_knows_it(agents: dict[str, Agent], lane: Lane) -> None:
    p, d = agents["p"], agents["d"]
    listen = deafened(p)
    assert d.find_member("p") is None  # asks for it
    await until(lambda: d.find_member("p") is not None)
    pulling = asyncio.create_task(pulled(p, d, lanes=(lane,)))
    await until(lambda: p.statistics().sessions.refused > 0)
    assert p.members() == ()
    listen()
    assert await pulling is lane


async def test_the_dialer_gives_up_where_the_other_end_never_hears_of_it(agents: dict[str, Agent]) -> None:
    deafened(agents["p"])
    with pytest.raises(AuthenticationError, match="not known here"):
        await pulled(agents["p"], agents["d"])


async def test_a_message_to_a_name_goes_out_once_the_name_is_known(agents: dict[str, Agent]) -> None:
    d = agents["d"]
    with pytest.raises(PeerGoneError):
        d.notify("p", b"x")
    await until(lambda: "p" in [member.ref.agent_id for member in d.members()])
    await d.notify("p", b"x")
    told = await anext(agents["p"].notifications())
    assert (told.sender.agent_id, told.payload) == ("d", b"x")
