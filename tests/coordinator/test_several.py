"""Clients with a list of coordinators, on coordinators that know nothing of each other."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.config import check_addresses
from kvxfer.coordinator import CoordinatorOptions
from kvxfer.errors import ConfigError, InvalidArgumentError, RefusedError
from kvxfer.rpc import MembershipWatch, drain
from kvxfer.rpc.targets import Targets
from tests.support.coordinator import running, until


def test_each_target_comes_in_turn() -> None:
    targets = Targets("a:1, b:2,a:1")
    first = targets.now
    targets.lost()
    assert {first, targets.now} == {"a:1", "b:2"}
    targets.lost()
    assert targets.now == first
    with pytest.raises(InvalidArgumentError, match="host:port"):
        Targets("a:1,")


@pytest.mark.parametrize("text", ["a:1,", "a:1,b", ","])
def test_a_bad_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="coordinator must be host:port"):
        check_addresses("coordinator", text)


@pytest.mark.parametrize("text", ["", "disk", "sqlite:", "etcd:", "etcd:host", "memory:x"])
def test_a_store_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        CoordinatorOptions(store=text)


async def test_an_agent_and_a_watch_go_to_the_next_coordinator(tmp_path: pathlib.Path) -> None:
    async with running(tmp_path) as first, running(tmp_path) as second:
        both = f"{first.address},{second.address}"
        agent = first.agent("a", target=both)
        ref = await agent.session.start()
        async with MembershipWatch(both, first.token) as watch:
            await watch.wait_connected()

            for cluster in (first, second):
                await cluster.stop()
                await until(lambda: agent.session.is_connected and watch.is_connected, "both to be connected again")
                await until(lambda: [m.ref for m in watch.membership.members] == [ref], "the watch to know the agent")
                assert agent.session.ref == ref
                await cluster.start()
                with pytest.raises(RefusedError, match="no member 'b'"):
                    await drain(both, first.token, "b")
