"""A control plane that can be hurt in every part: three etcd nodes and three coordinators, each on a host of its own,
with two routers and 2P2D of the tiny engine on this one. Decides what a fault is, how it ends, and when the membership
is whole again; must never know which faults a test chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import pathlib
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from kvxfer.errors import KvxferError
from kvxfer.rpc import CoordinatorSession, list_members, load_or_create_token, load_token
from kvxfer.types import AgentRef, DataAddress, Role, WorkerInfo
from tests.support.e2e.client import connected
from tests.support.e2e.cluster import Cluster, together, until
from tests.support.etcd import EtcdNodes, etcd_nodes
from tests.support.switch import SwitchedHosts, switched

COORDINATORS = ("c1", "c2", "c3")
NODES = ("e1", "e2", "e3")
ROUTERS = ("r1", "r2")
WORKERS = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
PORT = 7000
POLL_S = 0.1
STEADY_S = 4.0
"""Longer than a silent agent is waited for."""
LOOK_S = 3.0
"""How long one look at a coordinator may take."""


class Harm(enum.StrEnum):
    KILL = "kill"
    STOP = "stop"
    PARTITION = "partition"
    EMPTY = "empty"
    """kill -9, and a start with an empty disk: a coordinator is given its token, an etcd node is added anew."""


@dataclasses.dataclass(frozen=True)
class PartFault:
    """What happens to one coordinator or etcd node."""

    harm: Harm
    part: str

    def __str__(self) -> str:
        return f"{self.harm} of {self.part}"


class ControlPlane:
    """Made by :func:`control_plane`."""

    def __init__(self, cluster: Cluster, nodes: EtcdNodes, hosts: SwitchedHosts) -> None:
        self.cluster = cluster
        self._nodes = nodes
        self._hosts = hosts
        self._freshest = 0
        self._refs: dict[str, AgentRef] = {}
        """As a coordinator first said: no agent is started anew."""

    @property
    def routers(self) -> list[str]:
        return [self.cluster.url(name) for name in ROUTERS]

    @property
    def coordinators(self) -> str:
        """As agents and routers take them."""
        return ",".join(f"{self._hosts.address(name)}:{PORT}" for name in COORDINATORS)

    async def start(self, directory: pathlib.Path) -> None:
        load_or_create_token(self.cluster.token_file)
        await together(*(self._start_coordinator(name, directory / name) for name in COORDINATORS))
        told = {"coordinator": self.coordinators}
        await together(
            *(self.cluster.router(name, **told) for name in ROUTERS),
            *(self.cluster.worker(name, role, **told) for name, role in WORKERS.items()),
        )

    async def _start_coordinator(self, name: str, disk: pathlib.Path) -> None:
        self._empty(disk)
        self.cluster.place(name, self._hosts.command(name))
        flags: dict[str, Any] = {
            "host": self._hosts.address(name),
            "port": PORT,
            "insecure": True,
            "metrics_port": PORT + 1,
        }
        flags |= {"store": f"etcd:{self._nodes.endpoints}", "token_file": str(disk / "token")}
        flags |= {"allow_http_host": ["127.0.0.1"]}
        await self.cluster.coordinator(name, **flags)

    # --- faults ---

    async def begin(self, fault: PartFault) -> None:
        part = fault.part
        is_node = part in NODES
        match fault.harm:
            case Harm.PARTITION:
                self._hosts.cut_off(part)
            case Harm.STOP if is_node:
                self._nodes.signal(NODES.index(part), signal.SIGSTOP)
            case Harm.STOP:
                self.cluster.pause(part)
            case _ if is_node:
                await asyncio.to_thread(self._nodes.kill, NODES.index(part))
            case _:
                await self.cluster.kill(part)

    async def prepare_end(self, fault: PartFault) -> None:
        """What an operator does before a part with an empty disk can be started."""
        if fault.harm is not Harm.EMPTY:
            return
        if fault.part in NODES:
            await asyncio.to_thread(self._nodes.replace_one, NODES.index(fault.part))
        else:
            self._empty(self.cluster.token_file.parent / fault.part)

    def _empty(self, disk: pathlib.Path) -> None:
        """An empty disk for a coordinator, but for the cluster's token, which is a secret that its operator gives."""
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        shutil.copy(self.cluster.token_file, disk / "token")

    async def end(self, fault: PartFault) -> None:
        """Start the part again, or let it go on."""
        part = fault.part
        is_node = part in NODES
        match fault.harm:
            case Harm.PARTITION:
                self._hosts.bring_back(part)
            case Harm.STOP if is_node:
                self._nodes.signal(NODES.index(part), signal.SIGCONT)
            case Harm.STOP:
                self.cluster.unpause(part)
            case harm if is_node:
                self._nodes.start(NODES.index(part), is_new=harm is not Harm.EMPTY)
            case _:
                await self.cluster.restart(part)

    async def is_felt(self, fault: PartFault) -> bool:
        """Whether the part does not answer."""
        if fault.part in NODES:
            return not await asyncio.to_thread(self._nodes.is_healthy, NODES.index(fault.part))
        return bool(await self._lacks_coordinator(fault.part))

    async def leading_node(self) -> str:
        """The etcd node that leads."""
        return NODES[await asyncio.to_thread(self._nodes.leader)]

    async def busiest_coordinator(self) -> str:
        """The one that holds the most agents."""
        held = {}
        for name in COORDINATORS:
            for line in (await self._asked(name, "/metrics"))[1].splitlines():
                if line.startswith('kvxfer_coordinator_members{state="live"}'):
                    held[name] = float(line.split()[-1])
        return max(held, key=lambda name: held[name])

    # --- looking at it ---

    async def whole(self, within_s: float, *, for_s: float = STEADY_S) -> float:
        """Wait until every coordinator, router and agent is in touch, knows all workers and doubts none, and has for
        ``for_s``: one that was stopped says at first what it knew. Returns after how many seconds that began."""
        began_s = time.monotonic()
        since_s: float | None = None
        missing: list[str] = []
        while True:
            found = [what for what in await asyncio.gather(*self._looks()) if what]
            now_s = time.monotonic()
            if found and found != missing:
                print(f"  {now_s - began_s:.2f} s: {'; '.join(found)}")
            if found:
                since_s, missing = None, found
            elif since_s is None:
                since_s = now_s
            if since_s is not None and now_s - since_s >= for_s:
                return since_s - began_s
            if since_s is None:
                assert now_s - began_s <= within_s, f"not whole after {now_s - began_s:.1f} s: {missing}"
            await asyncio.sleep(POLL_S)

    def _looks(self) -> list[Any]:
        at_coordinators = [self._lacks_coordinator(name) for name in COORDINATORS]
        return [*at_coordinators, *map(self._lacks_router, ROUTERS), *map(self._lacks_agent, WORKERS)]

    async def _lacks_coordinator(self, name: str) -> str:
        try:
            view = await list_members(
                f"{self._hosts.address(name)}:{PORT}", load_token(self.cluster.token_file), timeout_s=LOOK_S
            )
        except KvxferError as error:
            return f"{name}: {error}"
        for member in view.members:
            first = self._refs.setdefault(member.ref.agent_id, member.ref)
            assert member.ref == first, f"{name} has {member.ref}, which was {first}"
        return _lacks(name, {member.ref.agent_id: member.is_suspect for member in view.members})

    async def _lacks_router(self, name: str) -> str:
        try:
            known = await self.cluster.directory(name)
        except httpx.TransportError as error:  # such as the end of a connection that was idle for long
            return f"{name}: {error!r}"
        return _lacks(name, {agent_id: entry["is_suspect"] for agent_id, entry in known.items()})

    async def _lacks_agent(self, name: str) -> str:
        try:
            agent = (await self.cluster.statistics(name))["agent"]
        except httpx.TransportError as error:
            return f"{name}: {error!r}"
        return "" if agent["is_coordinator_connected"] else f"{name} hears no coordinator"

    async def settled(self, within_s: float) -> float:
        """Wait until every etcd node is healthy and every coordinator says that it has its store; how long that took,
        in seconds."""
        began_s = time.monotonic()
        await asyncio.to_thread(self._nodes.healthy)

        async def are_ready() -> bool:
            answers = await asyncio.gather(*(self._asked(name, "/ready") for name in COORDINATORS))
            return all(status == 200 for status, _ in answers)

        await until(are_ready, "every coordinator has its store", within_s=within_s)
        return time.monotonic() - began_s

    async def _asked(self, name: str, path: str) -> tuple[int, str]:
        async with connected(LOOK_S) as client:
            try:
                answer = await client.get(f"http://{self._hosts.address(name)}:{PORT + 1}{path}")
            except httpx.HTTPError as error:
                return 0, str(error)
            return answer.status_code, answer.text

    async def incarnations(self) -> dict[str, Any]:
        """Of all workers, as each router knows them."""
        return {
            f"{worker} at {router}": entry["incarnation"]
            for router in ROUTERS
            for worker, entry in (await self.cluster.directory(router)).items()
            if worker in WORKERS
        }

    async def fresh_number(self, timeout_s: float) -> int:
        """Register one more agent, which no request is for, and take it back; its incarnation's number, which must be
        above all before."""
        session = CoordinatorSession(
            self.coordinators,
            load_token(self.cluster.token_file),
            secrets.token_bytes(16),
            WorkerInfo(f"fresh-{secrets.token_hex(4)}", Role.DECODE, "other", ""),
            DataAddress("127.0.0.1", 9, "", "host"),
            on_membership=lambda _: None,
        )
        try:
            ref: AgentRef = await session.start(timeout_s)
        finally:
            await session.close()
        number = ref.incarnation.number
        assert number > self._freshest, f"number {number} after {self._freshest}"
        self._freshest = number
        return number


def _lacks(name: str, suspects: dict[str, bool]) -> str:
    """What is wrong with a view of who is suspect; nothing where all workers are there and none is."""
    known = {worker: suspects.get(worker) for worker in WORKERS}
    wrong = [
        f"{worker} is {'missing' if doubt is None else 'suspect'}"
        for worker, doubt in known.items()
        if doubt is not False
    ]
    wrong += [f"{other} is there" for other in set(suspects) - set(WORKERS)]
    return f"{name}: {', '.join(wrong)}" if wrong else ""


@contextlib.asynccontextmanager
async def control_plane(directory: pathlib.Path, model: pathlib.Path) -> AsyncIterator[ControlPlane]:
    """All of it, in ``directory``. Skips the test where there can be no network namespaces."""
    with switched(*COORDINATORS, *NODES) as hosts:
        addresses, commands = [hosts.address(name) for name in NODES], [hosts.command(name) for name in NODES]
        (directory / "etcd").mkdir()
        with etcd_nodes(directory / "etcd", len(NODES), hosts=addresses, commands=commands) as nodes:
            async with Cluster(directory, model) as cluster:
                plane = ControlPlane(cluster, nodes, hosts)
                await plane.start(directory)
                await plane.whole(60.0, for_s=0.0)
                yield plane
