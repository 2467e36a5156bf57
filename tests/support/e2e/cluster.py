"""A whole kvxfer on this machine, every part its own process started through the command line.

Decides how parts are started, hurt and brought back, and when a worker counts as drained. It must never look into a
process but through its HTTP face: what these tests say holds for every run of the same commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar

import httpx

from kvxfer.cli.flags import to_flags
from kvxfer.cli.stack import worker_environment
from kvxfer.cli.supervise import Child, ChildSpec, Supervisor
from tests.support.e2e.client import TEST_LEG_KEY

START_S = 90.0
"""A worker loads in 3 to 5 s on an idle machine; several that start on 2 busy cores take turns."""
POLL_S = 0.02
DRAIN_S = 2.0
"""How soon after a failure no block may be held any more, where no death must be inferred."""
DEAD_AFTER_S = 3.0
"""The coordinator's default: so long after its last heartbeat an agent is gone."""
SLOW_TTL_S = 2.0
"""Grant TTL of the slow cluster's prefill worker."""
RECONNECT_S = 3.0
"""The agent's default: so long a transfer tries to reach its source again."""
RECOMPUTE_S = 15.0
"""Slack for one prompt of the slow model, computed anew, and its answer: 2 to 3 s on an idle machine."""


class Cluster:
    """Parts by name, on one coordinator. Leaving the context ends all of them, stopped ones too."""

    live: ClassVar[weakref.WeakSet[Cluster]] = weakref.WeakSet()

    def __init__(self, directory: pathlib.Path, model: pathlib.Path | str) -> None:
        self.token_file = directory / "cluster-token"
        self.model = model
        self.lines: list[str] = []
        self._supervisors = {"": Supervisor(on_line=self._on_line)}
        self._children: dict[str, Child] = {}
        self._flags: dict[str, tuple[str, dict[str, Any]]] = {}
        self._standing: dict[str, tuple[str, dict[str, Any]]] = {}
        self._paused: set[str] = set()
        self._last_address: dict[str, str] = {}
        self._leg_key_file = directory / "leg-key"
        self._leg_key_file.touch(0o600)
        self._leg_key_file.write_text(TEST_LEG_KEY)
        # A server closes idle connections after some seconds: one that is used again at that moment fails.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=30.0,
            headers={"x-kvxfer-leg-key": TEST_LEG_KEY},
            limits=httpx.Limits(keepalive_expiry=1.0),
        )

    def _on_line(self, name: str, line: str) -> None:
        self.lines.append(f"[{name}] {line}")

    async def __aenter__(self) -> Cluster:
        Cluster.live.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        Cluster.live.discard(self)
        await self._client.aclose()
        for name in reversed(list(self._children)):
            await self.kill(name)

    # --- parts ---

    def place(self, name: str, command: Sequence[str]) -> None:
        """Have the part of this name started with ``command`` before its own: on another host."""
        whole = (*command, sys.executable, "-P", "-m", "kvxfer.cli")
        self._supervisors[name] = Supervisor(command=whole, on_line=self._on_line)

    def _supervisor(self, name: str) -> Supervisor:
        return self._supervisors.get(name) or self._supervisors[""]

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def url(self, name: str) -> str:
        return self._children[name].http_url

    @property
    def workers(self) -> list[str]:
        """Workers that run and are not paused."""
        return [n for n in self._children if self._flags[n][0] == "worker" and n not in self._paused]

    async def coordinator(self, name: str = "coordinator", **flags: Any) -> Child:
        return await self._start(name, "coordinator", {"port": 0, **flags})

    async def worker(self, name: str, role: str, **flags: Any) -> Child:
        values = {"role": role, "model": str(self.model), "agent_id": name, "threads": 1, "kv_cache_mb": 64}
        values["leg_key_file"] = str(self._leg_key_file)
        return await self._start(name, "worker", {**values, **self._told(flags), **flags})

    async def router(self, name: str = "router", **flags: Any) -> Child:
        return await self._start(name, "router", {"request_timeout_s": 60.0, **self._told(flags), **flags})

    def _told(self, flags: dict[str, Any]) -> dict[str, Any]:
        return {} if "coordinator" in flags else {"coordinator": self.address}

    async def whole(self, workers: dict[str, dict[str, Any]], **router_flags: Any) -> None:
        """A coordinator, the workers (role: the name up to its first digit), a router that sees all of them."""
        roles = {"p": "prefill", "d": "decode", "b": "both"}
        await self.coordinator()
        await together(
            self.router(**router_flags),
            *(self.worker(name, roles[name[0]], **flags) for name, flags in workers.items()),
        )
        await self.seen(*workers)
        self._standing = dict(self._flags)

    async def restore(self) -> None:
        """Make the whole again what it was when it was started: end what was added or changed, restart what is not."""
        for name in list(self._children):
            is_over = self._children[name].process.returncode is not None
            if is_over or name in self._paused or self._flags[name] != self._standing.get(name):
                await self.kill(name)
        missing = [name for name in self._standing if name not in self._children]
        if "coordinator" in missing:
            await self.restart("coordinator")
            missing.remove("coordinator")
        for name in missing:
            self._flags[name] = self._standing[name]
        await together(*map(self.restart, missing))
        workers = [name for name, (command, _) in self._standing.items() if command == "worker"]
        for name, (command, _) in self._standing.items():
            if command == "router":
                await self.seen(*workers, router=name)

    @property
    def address(self) -> str:
        return self._children["coordinator"].address

    async def _start(self, name: str, command: str, values: dict[str, Any]) -> Child:
        self._flags[name] = (command, values)
        words = [command, *to_flags({"token_file": str(self.token_file), **values})]
        spec = ChildSpec(name, words, worker_environment(1))
        child = await self._supervisor(name).start(spec, timeout_s=START_S)
        self._children[name] = child
        return child

    async def restart(self, name: str, **changed: Any) -> Child:
        """Start a part that was ended again, with the flags it had; the coordinator and routers on the same port."""
        command, values = self._flags[name]
        if command != "worker":
            values = {**values, "port": int(self._last_address[name].rpartition(":")[2])}
        return await self._start(name, command, {**values, **changed})

    async def kill(self, name: str) -> None:
        """kill -9."""
        child = self._children.pop(name)
        self._paused.discard(name)
        self._last_address[name] = child.address
        child.is_stopping = True
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()
        await self._supervisor(name).stop(child)

    async def stop(self, name: str) -> int:
        """SIGTERM; the exit code."""
        child = self._children.pop(name)
        self._last_address[name] = child.address
        await self._supervisor(name).stop(child)
        assert child.process.returncode is not None
        return child.process.returncode

    def pause(self, name: str) -> None:
        self._paused.add(name)
        self._children[name].process.send_signal(signal.SIGSTOP)

    def unpause(self, name: str) -> None:
        self._children[name].process.send_signal(signal.SIGCONT)
        self._paused.discard(name)

    # --- looking at them ---

    async def statistics(self, name: str) -> dict[str, Any]:
        answer = await self._client.get(f"{self.url(name)}/statistics")
        assert answer.status_code == 200, answer.text
        values: dict[str, Any] = answer.json()
        return values

    async def digests(self, name: str) -> dict[str, Any]:
        """Digests of committed blocks by ``<transfer id>/<side>``; the worker needs ``record_block_digests``."""
        answer = await self._client.get(f"{self.url(name)}/debug/block-digests")
        assert answer.status_code == 200, answer.text
        values: dict[str, Any] = answer.json()
        return values

    async def directory(self, router: str = "router") -> dict[str, dict[str, Any]]:
        """The workers that the router knows, by agent id."""
        answer = await self._client.get(f"{self.url(router)}/v1/workers")
        assert answer.status_code == 200, answer.text
        return {entry["agent_id"]: entry for entry in answer.json()["data"]}

    async def seen(self, *names: str, router: str = "router", within_s: float = 20.0) -> None:
        """Wait until the router knows exactly these workers, and doubts none of them."""

        async def are_known() -> bool:
            known = await self.directory(router)
            return set(known) == set(names) and not any(entry["is_suspect"] for entry in known.values())

        await until(are_known, f"the router knows {names}", within_s=within_s)

    async def mid_pull(self, reader: str, *sources: str, blocks: int = 8) -> str:
        """Wait until ``reader`` pulls and one of ``sources`` has computed ``blocks`` blocks more; which one that is."""
        before = {name: (await self.statistics(name))["engine"]["prefill_tokens"] for name in sources}
        found: list[str] = []

        async def is_reading() -> bool:
            if (await self.statistics(reader))["agent"]["transfers_live"] == 0:
                return False
            for name in sources:
                now = await self.statistics(name)
                done = now["engine"]["prefill_tokens"] - before[name] >= blocks * now["pool"]["block_tokens"]
                if done and now["agent"]["grants"]["alive"] and now["engine"]["computing"]:
                    found.append(name)
            return bool(found)

        await until(is_reading, f"{reader} pulls from one of {sources}", within_s=20.0)
        return found[0]

    async def assert_drained(self, within_s: float = DRAIN_S) -> float:
        """Every live worker holds nothing within ``within_s``; how long it took."""
        started_s = time.monotonic()
        held: dict[str, Any] = {}
        while True:
            for name in self.workers:
                held[name] = what_is_held(await self.statistics(name))
            took_s = time.monotonic() - started_s
            if not any(held[name] for name in self.workers):
                return took_s
            assert took_s <= within_s, f"still held after {took_s:.2f} s: {held}"
            await asyncio.sleep(POLL_S)


def what_is_held(statistics: dict[str, Any]) -> dict[str, Any]:
    """What a worker that does nothing must not hold, as far as this one does."""
    pool, engine, agent = statistics["pool"], statistics["engine"], statistics["agent"]
    held = {name: pool[name] for name in ("used", "reserved", "granted", "quarantined")}
    held |= {name: engine[name] for name in ("waiting", "pulling", "computing", "holding")}
    if agent:
        held |= {name: agent[name] for name in ("transfers_live", "transfers_draining", "quarantines")}
        held |= {"grants": agent["grants"]["alive"], "pulls_waiting": agent["grants"]["pulls_waiting"]}
    return {name: value for name, value in held.items() if value}


async def until(condition: Callable[[], Awaitable[bool]], what: str, *, within_s: float) -> None:
    """Wait until ``condition`` holds; fail saying ``what`` did not come."""
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


async def together(*starts: Awaitable[Any]) -> None:
    """All at once; wait for every one of them, then raise the first failure."""
    ended = await asyncio.gather(*starts, return_exceptions=True)
    for result in ended:
        if isinstance(result, BaseException):
            raise result


@contextlib.asynccontextmanager
async def running(
    directory: pathlib.Path, model: pathlib.Path, workers: dict[str, dict[str, Any]], **router_flags: Any
) -> AsyncIterator[Cluster]:
    """A whole cluster; see :meth:`Cluster.whole`."""
    async with Cluster(directory, model) as cluster:
        await cluster.whole(workers, **router_flags)
        yield cluster
