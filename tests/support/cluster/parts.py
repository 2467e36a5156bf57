"""The processes of the cluster on one machine: started, killed, started again, and seen from outside.

Decides when a part is up and when the whole is whole: each router would place requests at every worker, each
coordinator names every worker and doubts none, and each node of etcd says that it belongs to a majority.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import shutil
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import httpx

from kvxfer import cli
from kvxfer.cli.console import duration
from kvxfer.cli.stack import worker_environment
from kvxfer.cli.supervise import Child, ChildSpec, Supervisor
from kvxfer.errors import ConfigError, CoordinatorUnavailableError, DeadlineExceededError, KvxferError
from kvxfer.rpc import list_members
from kvxfer.rpc.proof import coordinator_tls
from tests.support.cluster import plan

START_S = 180.0
WHOLE_S = 120.0
POLL_S = 0.1
ASK_S = 5.0
STOP_S = 10.0
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before etcd, which knows nothing of a parent. Everything of kvxfer's watches its parent itself."""


def etcd_binary() -> str:
    """Raises ConfigError where there is none."""
    found = shutil.which("etcd")
    if found is None:
        raise ConfigError("the program etcd is not on PATH: sudo apt-get install -y etcd-server")
    return found


class ClusterParts:
    """An async context manager; leaving it ends every part. ``lost``: which parts ended unasked, as sentences."""

    def __init__(self, made: plan.ClusterPlan, folder: pathlib.Path) -> None:
        self.plan = made
        self.lost: list[str] = []
        self._folder = folder
        self.on_ready: Callable[[str, str], None] = lambda name, how: None
        """Called as each part is up."""
        self._logs: dict[str, BinaryIO] = {}
        self._nodes: dict[str, asyncio.subprocess.Process] = {}
        self._children: dict[str, Child] = {}
        self._supervisor = Supervisor(on_lost=self._was_lost, on_line=self._on_line)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ClusterParts:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        for group in (plan.ROUTERS, plan.WORKERS, plan.COORDINATORS):
            children = [self._children.pop(name) for name in group if name in self._children]
            await asyncio.gather(*map(self._supervisor.stop, children))
        async with self._supervisor:
            pass  # it ends those that were not ready yet
        await asyncio.gather(*map(self._stop_node, list(self._nodes)))
        for log in self._logs.values():
            log.close()

    # --- start ---

    def issue(self) -> None:
        """The CAs, and a certificate for each part. Raises KvxferError with what was said."""
        for words in self.plan.certs():
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = cli.main(words)
            if code:
                raise KvxferError(f"`kvxfer {' '.join(words)}` ended with code {code}: {said.getvalue().strip()}")

    async def start(self) -> None:
        """Raises what a part's start raises, and DeadlineExceededError."""
        self._caller = coordinator_tls(self.plan.ca_file, *self.plan.certificate("operator", plan.CALLER))
        etcd_context = ssl.create_default_context(cafile=self.plan.etcd_ca_file)
        etcd_context.load_cert_chain(*self.plan.certificate("operator", plan.CALLER, of_etcd=True))
        self._etcd = await self._stack.enter_async_context(_client(etcd_context))
        self._http = await self._stack.enter_async_context(
            _client(ssl.create_default_context(cafile=self.plan.ca_file))
        )
        for group in (plan.ETCD, plan.COORDINATORS, (*plan.WORKERS, *plan.ROUTERS)):
            await _together(*map(self.begin, group))
        await self.whole()

    async def begin(self, name: str) -> None:
        """Start a part, and wait until it is up: a service has said so, a node of etcd has a majority."""
        began_s = time.monotonic()
        if name in plan.ETCD:
            where = await self._begin_node(name)
        else:
            spec = ChildSpec(name, self.plan.service(name), worker_environment(1))
            child = self._children[name] = await self._supervisor.start(spec, timeout_s=START_S)
            where = f"{child.address}, process {child.process.pid}"
        self.on_ready(name, f"ready after {duration(time.monotonic() - began_s)}  ({where})")

    async def _begin_node(self, name: str) -> str:
        log = self._log(name)
        process = await asyncio.create_subprocess_exec(
            *(_DIES_WITH_US if shutil.which(_DIES_WITH_US[0]) else ()), etcd_binary(), *self.plan.etcd(name),
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self._nodes[name] = process

        async def is_up() -> bool:
            if process.returncode is not None:
                raise KvxferError(f"etcd's node {name} ended with code {process.returncode}; its log says why")
            return await self._is_healthy(name)

        await _until(is_up, f"etcd's node {name} to belong to a majority", START_S)
        return f"{self.plan.address(name)}, process {process.pid}"

    # --- hurt ---

    async def kill(self, name: str) -> None:
        """kill -9."""
        if name in plan.ETCD:
            node = self._nodes.pop(name)
            node.kill()
            await node.wait()
            return
        child = self._children.pop(name)
        child.is_stopping = True
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await self._supervisor.stop(child)

    # --- look ---

    async def whole(self) -> float:
        """Wait until the whole is whole; how many seconds it took. Raises DeadlineExceededError."""
        return await _until(self._is_whole, "all parts to see each other", WHOLE_S)

    async def _is_whole(self) -> bool:
        views = (*map(self._is_healthy, plan.ETCD), *map(self._names_all, plan.COORDINATORS))
        return all(await asyncio.gather(*views, *map(self._places_at_all, plan.ROUTERS)))

    async def _is_healthy(self, node: str) -> bool:
        answer = await _answer(self._etcd, f"https://{self.plan.address(node)}/health")
        return answer.get("health") == "true"

    async def _places_at_all(self, router: str) -> bool:
        entries = (await _answer(self._http, f"https://{self.plan.address(router)}/v1/workers")).get("data", [])
        ready = [entry["agent_id"] for entry in entries if entry["is_ready"] and not entry["is_suspect"]]
        return len(entries) == len(ready) and sorted(ready) == sorted(plan.WORKERS)

    async def _names_all(self, coordinator: str) -> bool:
        try:
            view = await list_members(self.plan.address(coordinator), b"", timeout_s=ASK_S, tls=self._caller)
        except CoordinatorUnavailableError:
            return False
        names = [member.ref.agent_id for member in view.members if not member.is_suspect]
        return len(names) == len(view.members) and sorted(names) == sorted(plan.WORKERS)

    # --- inside ---

    def _log(self, name: str) -> BinaryIO:
        if name not in self._logs:
            self._logs[name] = (self._folder / f"{name}.log").open("ab")
        return self._logs[name]

    def _on_line(self, name: str, line: str) -> None:
        log = self._log(name)
        log.write(f"{line}\n".encode())
        log.flush()

    def _was_lost(self, child: Child) -> None:
        self.lost.append(f"{child.spec.name} {child.ending()}, and nobody asked it to")

    async def _stop_node(self, name: str) -> None:
        node = self._nodes.pop(name)
        if node.returncode is not None:
            self.lost.append(f"{name} ended with code {node.returncode}, and nobody asked it to")
            return
        node.terminate()
        try:
            await asyncio.wait_for(node.wait(), STOP_S)
        except TimeoutError:
            node.kill()
            await node.wait()


def _client(context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, verify=context, timeout=ASK_S)


async def _answer(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The object there; empty where none comes now."""
    try:
        value = (await client.get(url)).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


async def _until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float) -> float:
    began_s = time.monotonic()
    while not await condition():
        if time.monotonic() - began_s > within_s:
            raise DeadlineExceededError(f"waited {within_s:g} s for {what}")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_s


async def _together(*starts: Awaitable[None]) -> None:
    """All at once; the first failure is raised, once no other start is on its way."""
    for result in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
