"""Very many registrations by one hostile member: with the cluster's token up to ``members_max``, with one certificate
up to its own bound. The answer names the bound, memory stays in proportion, and the others are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from kvxfer._pb import control_pb2 as pb
from kvxfer._pb import control_pb2_grpc
from kvxfer.coordinator import admission
from kvxfer.rpc import convert, load_token
from kvxfer.rpc.link import CHANNEL_OPTIONS, EOF, open_channel
from kvxfer.trust.identity import CertRole
from tests.support.coordinator import running, until
from tests.support.directory import hello
from tests.support.trust import CertifiedAgent, ClusterAuthority, CoordinatorProcess, coordinator_process, watch

KIB_EACH_MAX = 192
AT_ONCE = 64
MORE = 50
"""Registrations beyond the bound."""


class Flood:
    """Streams of agents that register, over one connection, and stay silent."""

    def __init__(self, channel: grpc.aio.Channel, token: bytes = b"") -> None:
        self._stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = (("authorization", f"Bearer {token.decode()}"),) if token else ()
        self._calls: list[Any] = []
        self.refused: list[tuple[grpc.StatusCode, str]] = []
        self.taken = 0
        self._places = asyncio.Semaphore(AT_ONCE)

    async def register(self, name: str) -> None:
        async with self._places:
            call = self._stub.Session(metadata=self._metadata)
            await call.write(pb.AgentMessage(register=convert.write_hello(hello(name, nonce=secrets.token_bytes(16)))))
            try:
                if await call.read() is not EOF:
                    self.taken += 1
                    self._calls.append(call)
                    return
            except grpc.aio.AioRpcError:
                pass
            self.refused.append((await call.code(), await call.details()))

    async def register_all(self, names: list[str]) -> None:
        await asyncio.gather(*map(self.register, names))

    async def leave(self) -> None:
        for call in self._calls:
            await call.write(pb.AgentMessage(deregister=pb.Deregister()))
        for call in self._calls:
            while await call.read() is not EOF:
                pass


def resident_kib(coordinator: CoordinatorProcess) -> int:
    status = pathlib.Path(f"/proc/{coordinator.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


@contextlib.asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield channel


@pytest.mark.parametrize(
    "count",
    [pytest.param(1_000, marks=pytest.mark.deep), pytest.param(10_000, marks=pytest.mark.nightly)],
)
async def test_with_the_token_up_to_members_max(tmp_path: pathlib.Path, count: int) -> None:
    """Places that are left are free again."""
    options = {"members_max": count + 1, "suspect_after_s": 100, "dead_after_s": 200}  # none ever gives a heartbeat
    async with coordinator_process(tmp_path, options) as coordinator:
        token = load_token(tmp_path / "coordinator-token")
        honest = CertifiedAgent(coordinator.address, "honest", None, token=token)
        await honest.session.start()
        before_kib = resident_kib(coordinator)
        async with channel_to(coordinator.address) as channel:
            flood = Flood(channel, token)
            await flood.register_all([f"many-{number}" for number in range(count + MORE)])
            assert (flood.taken, len(flood.refused)) == (count, MORE)
            for status, text in flood.refused:
                assert (status, f"members_max={count + 1}" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            assert resident_kib(coordinator) - before_kib < count * KIB_EACH_MAX
            assert honest.states == [True]
            assert "honest" in await watch(coordinator.address, None, 30.0, token)
            await flood.leave()
        late = CertifiedAgent(coordinator.address, "late", None, token=token)
        await late.session.start(60.0)
        assert honest.states == [True]
        await honest.session.close()
        await late.session.close()


async def test_with_one_certificate_up_to_its_own_bound(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    most = 20
    monkeypatch.setattr(admission, "AGENTS_OF_ONE_MAX", most)
    ca = ClusterAuthority(tmp_path / "ca")
    async with running(tmp_path, **ca.coordinator_options()) as cluster:
        honest = CertifiedAgent(cluster.address, "honest", ca.followed(CertRole.WORKER, "honest"))
        await honest.session.start()
        async with open_channel(cluster.address, ca.followed(CertRole.WORKER, "greedy")) as channel:
            flood = Flood(channel)
            await flood.register_all([f"greedy.{number}" for number in range(most + MORE)])
            assert (flood.taken, len(flood.refused)) == (most, MORE)
            for status, text in flood.refused:
                assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"kvxfer://default/worker/greedy has AGENTS_OF_ONE_MAX={most} members already" in text
            other = CertifiedAgent(cluster.address, "other", ca.followed(CertRole.WORKER, "other"))
            await other.session.start()
            assert honest.states == [True]
            await flood.leave()
        await until(lambda: len(honest.gone) == most, "the end of all of them")
        again = CertifiedAgent(cluster.address, "greedy.0", ca.followed(CertRole.WORKER, "greedy"))
        await again.session.start()
        await until(lambda: again.session.is_connected, "a place that is free again")
        for agent in (honest, other, again):
            await agent.session.close()
