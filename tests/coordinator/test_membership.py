"""Agents and watchers against a real gRPC server: which of them see which, with which keys, through deaths and
restarts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvxfer.errors import (
    AuthenticationError,
    ClosedError,
    CoordinatorUnavailableError,
    InvalidArgumentError,
    RefusedError,
)
from kvxfer.protocol.handshake import session_key, session_root
from kvxfer.rpc import MembershipWatch, drain, list_members
from kvxfer.types import AgentRef, Load, Member
from tests.support.coordinator import Cluster, Recorder, pool, until


async def two_agents(cluster: Cluster) -> tuple[Recorder, Recorder, AgentRef]:
    """``p0`` and ``d0``, registered, and the name of the first."""
    one, other = cluster.agent("p0"), cluster.agent("d0", nonce=2)
    ref = await one.session.start()
    await other.session.start()
    return one, other, ref


async def test_two_agents_meet_and_share_a_key_that_watchers_do_not_get(cluster: Cluster) -> None:
    one, other = cluster.agent("p0", pools=(pool(),)), cluster.agent("d0", nonce=2)
    ref_one, ref_other = await one.session.start(), await other.session.start()
    assert one.session.ref == ref_one
    assert ref_one.incarnation.boot_nonce == bytes([1]) * 16
    assert ref_other.incarnation.number > ref_one.incarnation.number
    await until(lambda: set(one.members) == set(other.members) == {"p0", "d0"}, "both to see both")
    seen = other.members["p0"]
    assert (seen.ref, seen.info, seen.address) == (ref_one, one.session._hello.info, one.session._hello.address)
    assert seen.pools == (pool(),)
    key = one.members["d0"].session_key
    assert key == seen.session_key == session_key(session_root(cluster.token), ref_one, ref_other)
    assert one.members["p0"].session_key not in (key, b"")
    async with MembershipWatch(cluster.address, cluster.token) as watch:
        view = await watch.wait_connected()
        assert [member.ref for member in view.members] == [ref_other, ref_one]
        assert all(member.session_key == b"" for member in view.members)
    assert one.states == [True]
    assert one.gone == []


async def test_pools_loads_and_draining_are_published_as_they_change(cluster: Cluster) -> None:
    one, other, _ = await two_agents(cluster)
    one.session.set_pools((pool(1), pool(2)))
    await until(lambda: "p0" in other.members and len(other.members["p0"].pools) == 2, "the pools")
    seen = await cluster.watch()
    one.session.set_draining()
    await until(lambda: seen()["p0"].is_draining, "draining")
    views: list[Any] = []
    async with MembershipWatch(cluster.address, cluster.token, on_membership=views.append) as watch:
        await watch.wait_connected()
        await asyncio.to_thread(one.session.set_load, Load(queued_requests=5, free_blocks=7))
        await until(lambda: watch.membership.members[1].load == Load(queued_requests=5, free_blocks=7), "the load")
    with pytest.raises(InvalidArgumentError, match="POOLS_MAX=64"):
        one.session.set_pools(map(pool, range(65)))
    with pytest.raises(InvalidArgumentError, match="pool ids"):
        one.session.set_pools((pool(1), pool(1)))


async def test_pools_that_change_while_the_agent_registers_are_published(cluster: Cluster) -> None:
    """From another thread, after the registration has read those of before and before it is sent."""
    one = cluster.agent("p0", pools=(pool(1),))
    known = one.session._known

    def slowly() -> tuple[str, ...]:
        one.session.set_pools((pool(1), pool(2)))
        one.session._known = known  # type: ignore[method-assign]
        return known()

    one.session._known = slowly  # type: ignore[method-assign]
    seen = await cluster.watch()
    await one.session.start()
    await until(lambda: "p0" in seen() and len(seen()["p0"].pools) == 2, "the pools")


async def test_goodbye_is_heard_at_once_and_once(cluster: Cluster) -> None:
    one, other, ref = await two_agents(cluster)
    await until(lambda: "p0" in other.members, "p0")
    await one.session.close()
    await one.session.close()
    await until(lambda: other.gone == [ref], "the goodbye")
    assert set(other.members) == {"d0"}
    assert one.states == [True, False]
    with pytest.raises(ClosedError):
        await one.session.start()


async def test_a_killed_agent_is_suspect_at_once_and_gone_after_dead_after(cluster: Cluster) -> None:
    one, other, ref = await two_agents(cluster)
    await until(lambda: "p0" in other.members, "p0")
    seen = await cluster.watch()
    started_s = time.monotonic()
    one.cut()
    await until(lambda: seen()["p0"].is_suspect, "suspicion")
    await until(lambda: other.gone == [ref], "death")
    assert time.monotonic() - started_s >= cluster.options.dead_after_s - cluster.options.heartbeat_s - 0.1
    assert "p0" not in other.members


async def test_an_agent_without_heartbeats_is_suspect_then_gone_and_may_come_back(cluster: Cluster) -> None:
    """A stopped process keeps its connection open; only its silence shows."""
    one, other, ref = await two_agents(cluster)
    await until(lambda: "p0" in other.members, "p0")
    wake, one.session._wake = one.session._wake, _Hanging()
    await until(lambda: other.gone == [ref], "death by silence")
    one.session._wake = wake
    await until(lambda: "p0" in other.members and other.members["p0"].ref == ref, "the same incarnation again")
    assert other.gone == [ref]
    await until(lambda: one.states[:3] == [True, False, True], "its own view of that")


class _Hanging(asyncio.Event):
    """Hangs the sender even past its timeout: heartbeats stop although the loop runs and the stream is open."""

    async def wait(self) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(10.0)
            raise


def _by_id(watch: MembershipWatch) -> dict[str, Member]:
    return {member.ref.agent_id: member for member in watch.membership.members}


async def test_a_restarted_coordinator_changes_nothing_for_peers(cluster: Cluster) -> None:
    one, other = cluster.agent("p0", pools=(pool(),)), cluster.agent("d0", nonce=2)
    refs = await one.session.start(), await other.session.start()
    await until(lambda: len(one.members) == len(other.members) == 2, "both")
    key = one.members["d0"].session_key
    one.session.set_draining()
    async with MembershipWatch(cluster.address, cluster.token) as watch:
        await watch.wait_connected()
        await cluster.stop()
        await until(lambda: not one.session.is_connected and not watch.is_connected, "the loss")
        assert set(one.members) == {"p0", "d0"}
        assert len(watch.membership.members) == 2
        await cluster.start()
        await until(lambda: one.session.is_connected and other.session.is_connected, "the return")
        await until(lambda: len((watch.membership).members) == 2 and watch.is_connected, "the watch")
        await until(lambda: _by_id(watch)["p0"].is_draining, "the drain to survive")
        await asyncio.sleep(cluster.options.dead_after_s + 4 * cluster.options.heartbeat_s)
        assert (one.session.ref, other.session.ref) == refs
        assert other.members["p0"].session_key == one.members["d0"].session_key == key
        assert other.members["p0"].pools == (pool(),)
        assert one.gone == other.gone == []
        assert {member.ref for member in watch.membership.members} == set(refs)


async def test_absent_member_is_gone_once_a_restarted_coordinator_settled(cluster: Cluster) -> None:
    one, other, ref = await two_agents(cluster)
    await until(lambda: "p0" in other.members, "p0")
    one.cut()
    await cluster.stop()
    await cluster.start()
    started_s = time.monotonic()
    await until(lambda: other.session.is_connected, "the return")
    await until(lambda: other.gone == [ref], "the missing one to be given up")
    assert time.monotonic() - started_s >= cluster.options.dead_after_s - 0.2
    newcomer = cluster.agent("p1", nonce=3)
    assert (await newcomer.session.start()).incarnation.number > ref.incarnation.number


async def test_a_second_worker_with_the_same_id_is_refused_until_the_first_is_away(cluster: Cluster) -> None:
    one, other, ref = await two_agents(cluster)
    with pytest.raises(RefusedError, match="'p0' is in use by the live agent"):
        await cluster.agent("p0", nonce=3).session.start()
    seen = await cluster.watch()
    one.cut()
    await until(lambda: "p0" in seen() and seen()["p0"].is_suspect, "the cut")
    successor = cluster.agent("p0", nonce=4)
    successor_ref = await successor.session.start()
    await until(lambda: other.gone == [ref], "the old incarnation to end")
    assert other.members["p0"].ref == successor_ref


async def test_drain_reaches_the_agent_and_all_watchers(cluster: Cluster) -> None:
    one, _, _ = await two_agents(cluster)
    await drain(cluster.address, cluster.token, "p0", reason="upgrade")
    await until(lambda: one.drains == ["upgrade"], "the order")
    seen = await cluster.watch()
    await until(lambda: seen()["p0"].is_draining, "the news")
    with pytest.raises(RefusedError, match="no member 'absent'"):
        await drain(cluster.address, cluster.token, "absent")
    assert [member.is_draining for member in (await list_members(cluster.address, cluster.token)).members] == [
        False,
        True,
    ]


@pytest.mark.parametrize("token", [b"", b"x" * 64])
async def test_a_wrong_token_is_one_clear_sentence(cluster: Cluster, token: bytes) -> None:
    message = "did not accept this cluster token; every process of a cluster reads the same token file"
    agent = cluster.agent("p0", token=token)
    with pytest.raises(AuthenticationError, match=message):
        await agent.session.start()
    async with MembershipWatch(cluster.address, token) as watch:
        with pytest.raises(AuthenticationError, match=message):
            await watch.wait_connected()
    with pytest.raises(AuthenticationError, match=message):
        await drain(cluster.address, token, "p0")


async def test_no_coordinator_is_waited_for_and_then_named() -> None:
    with pytest.raises(CoordinatorUnavailableError, match=r"tried for 0\.3 s"):
        await list_members("127.0.0.1:1", b"x" * 64, timeout_s=0.3)


async def test_an_agent_that_starts_first_waits_for_its_coordinator(cluster: Cluster) -> None:
    await cluster.stop()
    agent = cluster.agent("p0")
    start = asyncio.create_task(agent.session.start(20.0))
    await until(lambda: agent.session.last_error is not None, "a first failure")
    await cluster.start()
    assert (await start).agent_id == "p0"
    late = cluster.agent("p1", nonce=2)
    await cluster.stop()
    with pytest.raises(CoordinatorUnavailableError, match=r"tried for 0\.3 s"):
        await late.session.start(0.3)


async def test_a_reader_of_changes_gets_every_death_however_slow(cluster: Cluster) -> None:
    async with MembershipWatch(cluster.address, cluster.token) as watch:
        await watch.wait_connected()
        changes = watch.changes()
        assert (await anext(changes)).members == ()
        refs = []
        for number in range(1, 4):
            agent = cluster.agent(f"p{number}", nonce=number)
            refs.append(await agent.session.start())
            await until(lambda: len(watch.membership.members) == 1, "the agent")
            await agent.session.close()
            await until(lambda: not watch.membership.members, "its end")
        view = await anext(changes)
        assert (view.members, view.gone) == ((), tuple(refs))
        await changes.aclose()


async def test_a_callback_that_raises_does_not_end_the_session(cluster: Cluster) -> None:
    caught: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
    agent = cluster.agent("p0")

    def broken(_: object) -> None:
        raise ValueError("mine")

    agent.session._on_membership = broken
    await agent.session.start()
    await until(lambda: caught, "the error to be reported")
    assert "mine" in caught[0]["message"]
    await asyncio.sleep(3 * cluster.options.heartbeat_s)
    assert agent.states == [True]
