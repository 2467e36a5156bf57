"""Clients with a list of coordinators, on coordinators that know nothing of each other."""

from __future__ import annotations

import asyncio
import contextlib
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


class Relay:
    """Carries bytes to a coordinator and back, until it is mute: then it takes them, and says nothing."""

    def __init__(self, target: str) -> None:
        self.is_mute = False
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        far, ask = await asyncio.open_connection(self._host, int(self._port))
        for reader, writer in ((near, ask), (far, answer)):
            self._tasks.add(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.is_mute:
                    writer.write(data)


@pytest.mark.parametrize("stretch", [1, 2])
async def test_an_agent_leaves_a_silent_coordinator_before_it_seems_dead_there(
    tmp_path: pathlib.Path, stretch: int
) -> None:
    options = {"heartbeats_a_s_max": 5.0 / stretch}  # one agent each 0.2 s
    async with running(tmp_path, **options) as first, running(tmp_path) as second:
        await second.stop()
        relay = Relay(first.address)
        async with relay as address, MembershipWatch(first.address, first.token) as watch:
            agent = first.agent("a", target=f"{address},{second.address}")
            ref = await agent.session.start()
            assert agent.session.heartbeat_s == 0.2 * stretch
            await second.start()
            await until(lambda: [member.ref for member in watch.membership.members] == [ref], "the agent at the first")
            async with MembershipWatch(second.address, first.token) as other:
                relay.is_mute = True
                await until(lambda: [member.ref for member in other.membership.members] == [ref], "it at the second")
                assert [member.ref for member in watch.membership.members] == [ref]
