"""Many agents at one real coordinator: they are told a longer interval, see whom they ask for, and come back."""

from __future__ import annotations

import asyncio
import pathlib
import random
from typing import Any

import grpc.aio
import pytest

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.rpc import MembershipWatch, convert
from kvxfer.rpc.convert import ASK_NAMES_MAX
from kvxfer.rpc.link import EOF, ReconnectBackoff
from kvxfer.types import AgentRef
from tests.support.coordinator import PATIENCE_S, running, until
from tests.support.directory import hello


async def test_agents_of_a_big_cluster_see_each_other_once_one_asks(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, whole_view_max=0) as cluster:
        one, other, third = (cluster.agent(name, nonce=nonce) for nonce, name in enumerate("abc", 1))
        for agent in (one, other, third):
            await agent.session.start()
        one.session.ask("b")
        await until(lambda: set(one.members) == {"a", "b"} and set(other.members) == {"a", "b"}, "both ends")
        assert one.members["b"].session_key == other.members["a"].session_key != b""
        one.session.ask("d")
        late = cluster.agent("d", nonce=4)
        ref = await late.session.start()
        await until(lambda: "d" in one.members and "a" in late.members, "one that came later")
        assert set(third.members) <= {"c"}
        await cluster.stop()
        await cluster.start()
        await until(lambda: all(agent.session.is_connected for agent in cluster.agents), "the return")
        await late.session.close()
        await until(lambda: one.gone == [ref], "the end of the one asked for")
        assert "b" in one.members
        assert third.gone == []


async def test_many_names_are_asked_for_in_parts(tmp_path: pathlib.Path) -> None:
    """An agent that asks for very many is heard in time, and is not lost."""
    async with running(tmp_path, whole_view_max=0) as cluster:
        one, other = cluster.agent("a"), cluster.agent("b", nonce=2)
        await one.session.start()
        await other.session.start()
        for number in range(2 * ASK_NAMES_MAX):
            one.session.ask(f"absent-{number}")
        one.session.ask("b")
        await until(lambda: "b" in one.members and "a" in other.members, "the last name")
        assert one.states == [True]


async def test_more_names_in_a_message_than_the_bound_are_refused(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path, whole_view_max=0) as cluster:
        token = (("authorization", f"Bearer {cluster.token.decode()}"),)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            call = control_pb2_grpc.CoordinatorStub(channel).Session(metadata=token)  # type: ignore[no-untyped-call]
            await call.write(pb.AgentMessage(register=convert.write_hello(hello("a"))))
            names = [f"n{number}" for number in range(ASK_NAMES_MAX + 1)]
            await call.write(pb.AgentMessage(ask=pb.Ask(agent_ids=names)))
            with pytest.raises(grpc.aio.AioRpcError, match="ASK_NAMES_MAX=256") as refused:
                await asyncio.wait_for(_read_all(call), PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.deep
async def test_two_hundred_agents_are_told_a_longer_interval_and_none_is_lost(tmp_path: pathlib.Path) -> None:
    """The coordinator is lost and all come back but one, which is all that is ended: a tenth comes late."""
    source = random.Random(30)
    options = {"heartbeat_s": 0.25, "suspect_after_s": 0.6, "dead_after_s": 1.25}
    async with running(tmp_path, heartbeats_a_s_max=200.0, whole_view_max=16, **options) as cluster:
        agents = [cluster.agent(f"w{number}", nonce=1 + number % 255) for number in range(200)]
        refs = await asyncio.gather(*(agent.session.start() for agent in agents))
        for agent in agents:
            agent.session.ask(source.choice(agents).session.ref.agent_id)
        await until(lambda: all(agent.session.heartbeat_s >= 1.0 for agent in agents), "the interval")
        gone: list[AgentRef] = []
        async with MembershipWatch(
            cluster.address, cluster.token, on_membership=lambda view: gone.extend(view.gone)
        ) as watch:
            await watch.wait_connected()
            agents[0].cut()
            await cluster.stop()
            for number, agent in enumerate(agents[1:20]):
                agent.session._backoff = _Slow(asyncio.get_running_loop().time() + 2.0 + 0.25 * number)
            await asyncio.sleep(1.0)  # all have failed to come back once
            await cluster.start()
            await until(lambda: all(agent.session.is_connected for agent in agents[1:]), "the return")
            await until(lambda: gone, "the end of the one that is not back")
            assert gone == [refs[0]]
            assert {member.ref for member in watch.membership.members} == set(refs[1:])
        for agent in agents:
            assert agent.gone in ([], [refs[0]])
            assert agent.states in ([True], [True, False, True], [True, False])


class _Slow(ReconnectBackoff):
    """Of an agent that waits long at a busy coordinator, until ``at_s`` of the loop's clock: waits that began when each
    agent lost its connection would come to an end in another order, with gaps in which none comes back."""

    def __init__(self, at_s: float) -> None:
        super().__init__(random.Random())
        self._at_s = at_s

    def next_s(self) -> float:
        return max(0.05, self._at_s - asyncio.get_running_loop().time())


async def _read_all(call: Any) -> None:
    while await call.read() is not EOF:
        pass
