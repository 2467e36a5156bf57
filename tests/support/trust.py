"""A CA for a test, with certificates by role and name, and the coordinator as a real process that asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvxfer.rpc import CoordinatorSession, MembershipWatch
from kvxfer.rpc.proof import SETTINGS
from kvxfer.trust import authority
from kvxfer.trust.files import FollowedFiles, IdentityFiles, Keyed
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.types import DataAddress, Membership, Role, WorkerInfo


class ClusterAuthority:
    """A development CA in a directory."""

    def __init__(self, directory: pathlib.Path, cluster: str = "default") -> None:
        self.directory = directory
        self.cluster = cluster
        authority.init(directory, cluster, days=30, now=_now())

    @property
    def ca_file(self) -> str:
        return str(self.directory / authority.CA_CERT)

    @property
    def ca_bytes(self) -> bytes:
        return (self.directory / authority.CA_CERT).read_bytes()

    def issue(
        self, role: CertRole, name: str, *, days: float = 5, hosts: Sequence[str] = ("127.0.0.1",)
    ) -> authority.Issued:
        """New files for that name, at these hosts; files of an earlier certificate of that name are gone."""
        for ending in ("pem", "key"):
            (self.directory / f"{role}-{name}.{ending}").unlink(missing_ok=True)
        identity = CertIdentity(self.cluster, role, name)
        return authority.issue(self.directory, identity, hosts=hosts, days=days, now=_now())

    def followed(self, role: CertRole, name: str, *, ca_file: str = "") -> FollowedFiles:
        """What a client shows. ``ca_file``: what it believes, if not this CA."""
        issued = self.issue(role, name)
        own = IdentityFiles(str(issued.cert_file), str(issued.key_file), self.ca_file, SETTINGS)
        if not ca_file:
            return FollowedFiles(own)
        return ForcedFiles(own, ca=pathlib.Path(ca_file).read_bytes())

    def coordinator_options(self, name: str = "c0", *, days: float = 5) -> dict[str, str]:
        """The coordinator's options."""
        issued = self.issue(CertRole.COORDINATOR, name, days=days)
        return {
            "tls_cert_file": str(issued.cert_file),
            "tls_key_file": str(issued.key_file),
            "tls_client_ca_file": self.ca_file,
        }


class ForcedFiles(FollowedFiles):
    """What no files say that fit together: ``changed`` are fields of what is read, as a test wants them."""

    def __init__(self, files: IdentityFiles, **changed: Any) -> None:
        super().__init__(files)
        self._newest = dataclasses.replace(self._newest, **changed)

    def look(self) -> Keyed:
        return self._newest


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class CoordinatorProcess:
    """``kvxfer coordinator`` as a child; its lines of log are in ``lines``."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.process = process
        self.address = str(ready["address"])
        self.metrics_url = str(ready["http_url"] or "")
        self.lines: list[dict[str, Any]] = []

    def audited(self, **fields: Any) -> list[dict[str, Any]]:
        """The lines of the audit log that have these fields."""
        lines = [line for line in self.lines if line.get("logger") == "kvxfer.audit"]
        return [line for line in lines if fields.items() <= line.items()]

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(raw))


@contextlib.asynccontextmanager
async def coordinator_process(
    directory: pathlib.Path, options: dict[str, Any], *more: str
) -> AsyncIterator[CoordinatorProcess]:
    """Runs within the block, on any free port."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "kvxfer.cli",
            "coordinator",
            "--log-style=json",
            f"--exit-with-parent={os.getpid()}",
        ),
        *(f"--token-file={directory / 'coordinator-token'}", *words, *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise RuntimeError((await process.stderr.read()).decode())
        coordinator = CoordinatorProcess(process, json.loads(line))
        reading = asyncio.create_task(coordinator.read())
        try:
            yield coordinator
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await reading
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class CertifiedAgent:
    """One agent's session, with what it heard."""

    def __init__(
        self,
        address: str,
        agent_id: str,
        tls: FollowedFiles | None,
        *,
        role: Role = Role.BOTH,
        http_url: str = "",
        token: bytes = b"",
    ) -> None:
        self.states: list[bool] = []
        self.gone: list[str] = []
        self.session = CoordinatorSession(
            address,
            token,
            secrets.token_bytes(16),
            WorkerInfo(agent_id, role, "m", http_url),
            DataAddress("127.0.0.1", 4000, "/run/x", "host"),
            on_membership=self._heard,
            on_state=self.states.append,
            tls=tls,
        )

    def _heard(self, membership: Membership) -> None:
        self.gone += [ref.agent_id for ref in membership.gone]

    def cut(self) -> None:
        """Vanish as a killed process does: no goodbye."""
        assert self.session._task is not None
        self.session._task.cancel()

    @property
    def keys(self) -> dict[str, bytes]:
        """By agent: the session keys that the coordinator handed out."""
        return {member.ref.agent_id: member.session_key for member in self.session.membership.members}


async def register(address: str, agent_id: str, tls: FollowedFiles | None, **more: Any) -> None:
    """Register and leave again. Raises what the registration raises."""
    timeout_s = more.pop("timeout_s", 10.0)
    agent = CertifiedAgent(address, agent_id, tls, **more)
    try:
        await agent.session.start(timeout_s)
    finally:
        await agent.session.close()


async def watch(address: str, tls: FollowedFiles | None, timeout_s: float = 10.0, token: bytes = b"") -> Sequence[str]:
    """The members' names, as a watcher sees them. Raises what the call raises."""
    async with MembershipWatch(address, token, tls=tls) as watching:
        membership = await watching.wait_connected(timeout_s)
        assert all(not member.session_key for member in membership.members)
        return [member.ref.agent_id for member in membership.members]
