"""Agents that are let in while something changes: they come twice, are revoked, or were ordered to drain meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer._pb import control_pb2 as pb
from kvxfer.clock import SystemClock
from kvxfer.coordinator.admission import AgentAdmission
from kvxfer.coordinator.gate import Caller
from kvxfer.coordinator.receivers import Receivers
from kvxfer.errors import AuthenticationError, RefusedError
from kvxfer.protocol.directory import CloseStream, Directory, Effect, Hello
from kvxfer.rpc import convert
from tests.support.coordinator import until
from tests.support.directory import LIMITS, NONCES, hello

CALLER = Caller(None, "", "test")


class SlowKeeper:
    """A store whose writes wait for ``written``."""

    def __init__(self) -> None:
        self.written = asyncio.Event()
        self.waiting = 0
        self._number = 0

    async def next_number(self) -> int:
        self._number += 1
        return self._number

    async def admit_number(self, number: int) -> None:
        pass

    async def keep(self, agent_id: str) -> None:
        self.waiting += 1
        await self.written.wait()


class World:
    """An admission and what is around it. ``is_revoked``: the caller, from now on."""

    def __init__(self) -> None:
        self.directory = Directory(LIMITS, SystemClock().now_ns(), epoch=bytes(16))
        self.receivers = Receivers(self.directory, 100)
        self.keeper = SlowKeeper()
        keeper: Any = self.keeper
        self.is_revoked = False
        gate: Any = SimpleNamespace(audited=lambda *_: contextlib.nullcontext(), check_revoked=self._check_revoked)
        metrics: Any = SimpleNamespace(registered=lambda code: None)
        hosts: Any = SimpleNamespace(check=lambda hello, peer: None)
        self.admission = AgentAdmission(
            self.directory,
            keeper,
            self.receivers,
            gate,
            hosts,
            SystemClock(),
            metrics,
            carry_out=self.carry_out,
            check_open=lambda: None,
        )

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, CloseStream):
                self.receivers.retire(effect.stream, RefusedError(effect.reason))
        self.receivers.wake()

    def _check_revoked(self, caller: Caller) -> None:
        if self.is_revoked:
            raise AuthenticationError("the certificate is revoked")

    async def come(self, said: Hello) -> Any:
        message = pb.AgentMessage(register=convert.write_hello(said))

        async def read() -> pb.AgentMessage:
            return message

        return await self.admission.admit(SimpleNamespace(read=read, peer=lambda: "test"), CALLER)


@pytest.fixture
def world() -> World:
    return World()


async def begun(world: World, count: int, said: Hello) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(world.come(said)) for _ in range(count)]
    await until(lambda: world.keeper.waiting == count, "all to wait for the store")
    return tasks


async def test_who_comes_twice_at_once_has_one_stream(world: World) -> None:
    """The first stream waits for the store while the second one takes its place."""
    first, second = await begun(world, 2, hello())
    world.keeper.written.set()
    with pytest.raises(RefusedError, match="speaks for no member"):
        await first
    registration, _ = await second
    assert list(world.receivers.sessions) == [registration.stream]
    assert "a" in world.directory


async def test_who_is_revoked_while_the_store_writes_is_not_in(world: World) -> None:
    (task,) = await begun(world, 1, hello())
    world.is_revoked = True
    world.keeper.written.set()
    with pytest.raises(AuthenticationError, match="revoked"):
        await task
    assert not world.receivers.sessions
    assert "a" not in world.directory


async def test_who_is_revoked_before_its_hello_is_not_in(world: World) -> None:
    world.is_revoked = True
    with pytest.raises(AuthenticationError, match="revoked"):
        await world.come(hello(number=7))
    assert "a" not in world.directory


async def test_a_stream_that_speaks_for_nobody_is_withdrawn_in_peace(world: World) -> None:
    world.keeper.written.set()
    registration, _ = await world.come(hello())
    world.admission.withdraw(registration.stream)
    world.admission.withdraw(registration.stream)
    assert "a" not in world.directory


@pytest.mark.parametrize("knows", [False, True])
async def test_a_drain_that_was_ordered_meanwhile_is_said_at_the_return(world: World, knows: bool) -> None:
    world.keeper.written.set()
    registration, _ = await world.come(hello())
    now_ns = SystemClock().now_ns()
    world.receivers.close(registration.stream)
    world.directory.stream_ended(registration.stream, now_ns=now_ns)
    assert world.directory.drain("a", "maintenance", now_ns=now_ns) == ()
    number = registration.ref.incarnation.number
    _, receiver = await world.come(hello("a", NONCES[0], number, is_draining=knows))
    assert bool(receiver.drain_reason) is not knows
