"""An agent that is no member any more, in each way that it can lose that, says so of itself, and blames no peer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from kvxfer import Agent, AgentConfig, Lane
from kvxfer.connectors.vllm import loads, wire
from kvxfer.errors import KvxferError, MembershipEndedError, PeerGoneError
from kvxfer.openai.errors import error_body, status_for
from kvxfer.router.failure import FailureKind, from_answer, from_event
from kvxfer.rpc import load_or_create_token
from kvxfer.transport.engine import Op
from kvxfer.trust.identity import CertRole
from kvxfer.types import AgentRef, Incarnation
from tests.support.agents import BLOCK_BYTES, RECORD, fresh_id, info, until
from tests.support.coordinator import Cluster, running
from tests.support.trust import ClusterAuthority

LOST_WITHIN_S = 10.0
ENDS_WITHIN_S = 10.0
"""Each of the agents' bounds (stall_s, reconnect_s, a grant's lifetime) is a second at most."""


def agent(cluster: Cluster, name: str, ca: ClusterAuthority | None = None) -> Agent:
    config = AgentConfig(stall_s=0.3, reconnect_s=0.5, lanes=(Lane.STREAM,))
    if ca is not None:
        issued = ca.issue(CertRole.WORKER, name)
        files = {"ca_file": ca.ca_file, "cert_file": str(issued.cert_file), "key_file": str(issued.key_file)}
        config = dataclasses.replace(config, **{f"coordinator_{key}": path for key, path in files.items()})
    made = Agent(info(name), coordinator=cluster.address, token=cluster.token, config=config, connect_s=10)
    made.allocate_pool(RECORD, block_count=8, block_bytes=BLOCK_BYTES)
    return made


async def pull(source: Agent, reader: Agent) -> str:
    """How a pull of one block ends."""
    identity = fresh_id()
    source.grant(source.pools[0], [0], transfer_id=identity, ready_blocks=1, ttl_s=1.0)
    transfer = reader.pull(reader.pools[0], [1], transfer_id=identity, source=source.ref.agent_id, deadline_s=20)
    try:
        await transfer
    except KvxferError as error:
        return f"{error.code}: {error}"
    finally:
        await transfer.wait_drained()
    return "committed"


async def said_of(awaited: Awaitable[Any]) -> str:
    try:
        await awaited
    except KvxferError as error:
        return f"{error.code}: {error}"
    return "committed"


async def notify(sender: Agent, receiver: str, times: int = 1) -> None:
    """Send them all, then wait for the last one."""
    await [sender.notify(receiver, b"%d" % number) for number in range(times)][-1]


def replace_token(cluster: Cluster) -> None:
    pathlib.Path(cluster.options.token_file).write_text(secrets.token_hex(32))
    assert load_or_create_token(cluster.options.token_file) != cluster.token


class Registered:
    """Registered memory of both, which the reader may read at any time."""

    def __init__(self, source: Agent, reader: Agent) -> None:
        self.reader = reader
        memory = [np.zeros(4096, np.uint8) for _ in range(2)]
        theirs, ours = source.register(memory[0]), reader.register(memory[1])
        rows = [np.array([[one.record.address, 4096, 0]], dtype=np.uint64) for one in (theirs, ours)]
        self.remote = reader.prepare(rows[0], peer=source.ref.agent_id, records=source.memory())
        self.local = reader.prepare(rows[1])

    async def read(self) -> str:
        try:
            await self.reader.post(Op.READ, self.local, None, self.remote, None, deadline_s=20)
        except KvxferError as error:
            return f"{error.code}: {error}"
        return "committed"


async def assert_own_end_is_said(source: Agent, reader: Agent, read: Callable[[], Any], why: str) -> None:
    """Each awaitable of an agent that is no member any more ends, in a bounded time, with its own end as the reason."""
    peer = source.ref.agent_id
    awaitables = {
        "pull of a grant": pull(source, reader),
        "ask": said_of(reader.ask(reader.pools[0], 1, transfer_id=fresh_id(), source=peer, deadline_s=20)),
        "post": read(),
        "notify": said_of(notify(reader, peer)),
        "notify, many": said_of(notify(reader, peer, times=20)),
        "wait_member": said_of(reader.wait_member("a-third", timeout_s=0.1)),
        "pull from an unknown one": said_of(
            reader.pull(reader.pools[0], [3], transfer_id=fresh_id(), source="a-fourth")
        ),
    }
    async with asyncio.timeout(ENDS_WITHIN_S):
        said = dict(zip(awaitables, await asyncio.gather(*awaitables.values()), strict=True))
    for name, text in said.items():
        assert text.startswith("membership_ended: "), (name, text)
        assert f"this agent, {reader.ref}, is no member any more: " in text, name
        assert why in text, name
    assert reader.statistics().notifications.pending == 0
    grant = reader.grant(reader.pools[0], [5], transfer_id=fresh_id(), ready_blocks=1, ttl_s=0.3)
    async with asyncio.timeout(ENDS_WITHIN_S):
        await grant.wait_ended()
        await asyncio.to_thread(reader.progress, 1.0)


async def test_a_revoked_one(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("cryptography")
    ca, revoked = ClusterAuthority(tmp_path / "ca"), tmp_path / "revoked"
    revoked.write_text("")
    options = ca.coordinator_options() | {"revoked_file": str(revoked)}
    async with (
        running(tmp_path, **options) as cluster,
        agent(cluster, "p", ca) as source,
        agent(cluster, "d", ca) as reader,
    ):
        await asyncio.gather(source.wait_member("d", timeout_s=10), reader.wait_member("p", timeout_s=10))
        registered = Registered(source, reader)
        assert await pull(source, reader) == await registered.read() == "committed"
        revoked.write_text("kvxfer://default/worker/d")
        await until(lambda: source.find_member("d") is None, LOST_WITHIN_S)
        await assert_own_end_is_said(source, reader, registered.read, "is revoked")
        revoked.write_text("")  # it was a mistake: the same incarnation is back, and nothing sticks to it
        await until(lambda: source.find_member("d") is not None, LOST_WITHIN_S)
        await until(lambda: reader.explain(PeerGoneError("x")).code == "peer_gone", LOST_WITHIN_S)
        assert await pull(source, reader) == "committed"


async def test_one_whose_name_a_newer_incarnation_has(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as cluster, agent(cluster, "p") as source, agent(cluster, "d") as reader:
        await asyncio.gather(source.wait_member("d", timeout_s=10), reader.wait_member("p", timeout_s=10))
        registered = Registered(source, reader)
        assert await pull(source, reader) == await registered.read() == "committed"
        newer = cluster.agent("d", nonce=9)
        newer.session._ref = AgentRef("d", Incarnation(reader.ref.incarnation.number + 1, bytes([9]) * 16))
        await newer.session.start()
        await until(lambda: "newer" in str(reader.explain(PeerGoneError("x"))), LOST_WITHIN_S)
        await until(lambda: all(member.ref != reader.ref for member in source.members()), LOST_WITHIN_S)
        await assert_own_end_is_said(source, reader, registered.read, "newer")


async def test_one_whose_token_is_not_accepted_goes_on_with_those_that_it_knows(tmp_path: pathlib.Path) -> None:
    """All agents are refused then, and none is told that another one has ended."""
    async with running(tmp_path) as cluster, agent(cluster, "p") as source, agent(cluster, "d") as reader:
        await asyncio.gather(source.wait_member("d", timeout_s=10), reader.wait_member("p", timeout_s=10))
        await cluster.stop()
        replace_token(cluster)
        await cluster.start()
        await until(lambda: reader.explain(PeerGoneError("x")).code == "membership_ended", LOST_WITHIN_S)
        assert await pull(source, reader) == await said_of(notify(reader, "p")) == "committed"
        with pytest.raises(MembershipEndedError, match="did not accept this cluster token"):
            await reader.wait_member("a-third", timeout_s=0.1)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await source.close()  # and the coordinator cannot tell the reader so
            assert (await said_of(notify(reader, "p"))).startswith("membership_ended: ")
            await reader.close()


async def test_a_member_that_drains_or_lost_the_coordinator_is_none(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as cluster, agent(cluster, "p") as source, agent(cluster, "d") as reader:
        await asyncio.gather(source.wait_member("d", timeout_s=10), reader.wait_member("p", timeout_s=10))
        reader.set_draining()
        assert await pull(source, reader) == "committed"
        await cluster.stop()
        await until(lambda: reader.statistics().is_coordinator_connected is False, LOST_WITHIN_S)
        assert reader.explain(PeerGoneError("x")).code == "peer_gone"
        with pytest.raises(KvxferError) as caught:
            await reader.wait_member("a-third", timeout_s=0.1)
        assert caught.value.code == "coordinator_unavailable"
        await cluster.start()


async def test_vllms_connector_does_not_blame_a_peer_that_takes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patience with a message is shorter than the agent's own."""
    monkeypatch.setattr(loads, "SILENT_S", 0.05)
    agent = Mock(explain=lambda error: MembershipEndedError(f"revoked; {error}"), wait_member=AsyncMock())
    agent.notify.return_value = asyncio.get_running_loop().create_future()
    sender = Mock(_agent=agent)
    with pytest.raises(MembershipEndedError, match="'p' took no message"):
        await loads.Loads.notify(sender, "p", wire.Keep(()))


def test_a_router_blames_the_worker_that_says_so_and_tries_another() -> None:
    error = MembershipEndedError("this agent, d#1, is no member any more: its certificate is revoked")
    assert (error.retryable, status_for(error)) == (True, 502)
    body = error_body(error)
    for failure in (
        from_answer("decode", 502, json.dumps(body).encode()),
        from_event("decode", json.dumps(body).encode()),
    ):
        assert failure is not None
        assert (failure.kind, failure.code, failure.is_final) == (FailureKind.ERROR, "membership_ended", False)
        assert failure.body["error"]["message"] == str(error)
