"""Agents at different coordinators of one etcd that are told by name: both ends know each other in the end."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from kvxfer.coordinator.acquaintances import Acquaintances
from kvxfer.coordinator.receivers import Receivers
from kvxfer.protocol.directory import Directory
from kvxfer.types import AgentRef, DataAddress, Incarnation, Member, Role, WorkerInfo
from tests.support.coordinator import Cluster, Recorder, running, until
from tests.support.directory import LIMITS, hello
from tests.support.etcd import EtcdNodes, etcd_nodes, free_ports, needs_etcd
from tests.support.receivers import session_state

MAX = 4
"""Members of which all are told; there are more in these tests."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 1) as started:
        yield started


@pytest.fixture
async def pair(nodes: EtcdNodes, tmp_path: pathlib.Path) -> AsyncIterator[tuple[Cluster, Cluster]]:
    await asyncio.to_thread(nodes.empty)
    shared = {"store": f"etcd:{nodes.endpoints}", "whole_view_max": MAX}
    async with running(tmp_path, **shared) as one, running(tmp_path, **shared) as two:
        yield one, two


async def started(clusters: Sequence[Cluster], names: str, *, target: str = "") -> dict[str, Recorder]:
    """Agents by turns at each coordinator."""
    turns = zip(names, itertools.cycle(clusters), strict=False)
    agents = {name: cluster.agent(name, nonce=ord(name), target=target) for name, cluster in turns}
    for agent in agents.values():
        await agent.session.start()
    return agents


async def until_all_are_known(clusters: Sequence[Cluster], names: str) -> None:
    """All coordinators know all agents."""
    for cluster in clusters:
        seen = await cluster.watch()
        await until(lambda seen=seen: set(seen()) == set(names), "all to be known at both")  # type: ignore[misc]


def know_each_other(one: Recorder, other: Recorder) -> bool:
    names = one.session.ref.agent_id, other.session.ref.agent_id
    if names[1] not in one.members or names[0] not in other.members:
        return False
    assert one.members[names[1]].session_key == other.members[names[0]].session_key != b""
    return True


def are_symmetric(agents: dict[str, Recorder]) -> bool:
    return all(
        (other in agents[one].members) == (one in agents[other].members)
        for one, other in itertools.combinations(agents, 2)
    )


@needs_etcd
async def test_agents_at_different_coordinators_ask_for_each_other(pair: tuple[Cluster, Cluster]) -> None:
    agents = await started(pair, "abcdefgh")
    late = pair[1].agent("x", nonce=90)
    agents["a"].session.ask("h")  # at the other one
    agents["f"].session.ask("c")
    agents["g"].session.ask("x")  # not there yet
    await late.session.start()
    for one, other in ((agents["a"], agents["h"]), (agents["f"], agents["c"]), (agents["g"], late)):
        await until(lambda one=one, other=other: know_each_other(one, other), "both ends to be told")  # type: ignore[misc]
    assert "a" not in late.members
    assert "x" not in agents["a"].members
    ref = late.session.ref
    await late.session.close()
    await until(lambda: agents["g"].gone == [ref], "the end of an agent at the other coordinator")
    assert agents["a"].gone == []


@needs_etcd
async def test_the_same_pairs_know_each_other_when_the_view_gets_too_large(pair: tuple[Cluster, Cluster]) -> None:
    """Coordinators pass the bound at different moments, and a comer is told of those that were told of it."""
    agents = await started(pair, "abcd")
    await until(lambda: all(len(agent.members) == 4 for agent in agents.values()), "all to know all")
    more = await started(pair, "efgh")
    await until_all_are_known(pair, "abcdefgh")
    agents |= more
    await until(lambda: are_symmetric(agents), "both ends of each pair to be told")
    await agents["e"].session.close()
    for name in "fgh":
        await agents[name].session.close()
        del agents[name]
    del agents["e"]
    await until(lambda: all(set(agent.members) == set("abcd") for agent in agents.values()), "all to know all again")


@needs_etcd
async def test_who_was_asked_for_is_known_after_a_coordinator_is_lost(pair: tuple[Cluster, Cluster]) -> None:
    one, two = pair
    agents = await started(pair, "abcdef", target=f"{one.address},{two.address}")
    for name, other in itertools.pairwise("abcdef"):
        agents[name].session.ask(other)
    agents["f"].session.ask("x")
    await two.stop()
    late = one.agent("x", nonce=90)
    await late.session.start()
    await until(lambda: all(agent.session.is_connected for agent in agents.values()), "all at the one that is left")
    for name, other in itertools.pairwise("abcdef"):
        await until(lambda name=name, other=other: know_each_other(agents[name], agents[other]), "pairs")  # type: ignore[misc]
    await until(lambda: know_each_other(agents["f"], late), "one that came later")
    await two.start()
    agents["a"].session.ask("x")
    await until(lambda: know_each_other(agents["a"], late), "asked for later")
    assert all(agent.gone == [] for agent in agents.values())


async def test_a_coordinator_is_asked_until_it_told(tmp_path: pathlib.Path) -> None:
    """Nothing answers at first, and then one that has no session of that agent."""
    directory = Directory(LIMITS, 0, epoch=bytes(16))
    receivers = Receivers(directory, 0)
    [nowhere] = [f"127.0.0.1:{port}" for port in free_ports(1)]
    addresses = [""]
    async with running(tmp_path, whole_view_max=0) as cluster:
        asked = Acquaintances(directory, receivers, lambda _: addresses[-1], cluster.token, None)
        receivers.on_elsewhere = asked.add
        try:
            registration = directory.register(hello("a"), fresh_number=1, now_ns=0)
            state = session_state("a")
            receivers.open(registration.stream, state, ())
            directory.told(elsewhere("z"), 1, is_judged=True, now_ns=0)
            receivers.wake()
            receivers.ask(state, ["z"])
            assert len(asked) == 1
            addresses.append(nowhere)
            agent = cluster.agent("a", nonce=3)
            await agent.session.start()  # so that there is something to be told of
            await asyncio.sleep(0.2)
            addresses.append(cluster.address)
            await asyncio.sleep(0.2)
            assert len(asked) == 1
            late = cluster.agent("z", nonce=2)
            await late.session.start()
            await until(lambda: not len(asked), "the answer")
            await until(lambda: "a" in late.members, "the news")

            receivers.ask(state, ["y"])
            directory.told(elsewhere("y"), 1, is_judged=True, now_ns=0)
            receivers.wake()
            assert len(asked) == 1
            directory.ended("y", now_ns=0)
            receivers.wake()
            await until(lambda: not len(asked), "nothing to be left to tell")
        finally:
            await asked.close()


def elsewhere(name: str) -> Member:
    info = WorkerInfo(name, Role.BOTH, "m", "http://127.0.0.1:1")
    return Member(AgentRef(name, Incarnation(7, bytes([7]) * 16)), info, DataAddress("127.0.0.1", 1, "", "h"))
