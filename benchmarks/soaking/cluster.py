"""The soaked cluster: real processes, each on a host of its own in the box, with fixed addresses.

Decides which parts there are, how each is started, and when the whole is whole. It must never know which fault befalls
a part, only that its end was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import signal
import sys
import time
from typing import Any

import httpx

from kvxfer.cli.stack import worker_environment
from kvxfer.errors import ConfigError, DeadlineExceededError
from kvxfer.serving.leg_keys import LEG_KEY
from soaking.box import Box, Host

START_S = 120.0
STOP_S = 30.0
WHOLE_S = 30.0
POLL_S = 0.1
CONTROL, HTTP, DATA, METRICS = 7000, 8000, 9000, 9100
CLIENT, PEER = 2379, 2380
ETCD_NODES = 3
DISK_MB = {"etcd": 384}
DISK_MB_ELSE = 32
ROUTER_SAYS_S = 8.0
"""A router waits so long for a worker that says nothing, before it asks another one."""

ROLES = {
    **{f"etcd-{n}": "etcd" for n in range(1, ETCD_NODES + 1)},
    "coordinator-1": "coordinator",
    "coordinator-2": "coordinator",
    "p1": "prefill",
    "p2": "prefill",
    "d1": "decode",
    "d2": "decode",
    "router-1": "router",
    "router-2": "router",
}
WORKERS = tuple(name for name, role in ROLES.items() if role in ("prefill", "decode"))
ROUTERS = tuple(name for name, role in ROLES.items() if role == "router")
COORDINATORS = tuple(name for name, role in ROLES.items() if role == "coordinator")
LANES = {"p1": "mapped,cma,unix,stream", "d1": "mapped,cma,unix,stream", "p2": "stream", "d2": "stream"}
"""Of the four pairs one reads the other's memory and three use TCP, encrypted."""


def obstacle() -> str:
    """Why the cluster cannot be started here, or nothing."""
    return "" if shutil.which("etcd") else "the binary etcd is not here: apt-get install etcd-server"


@dataclasses.dataclass
class Part:
    """``process``: the one that runs, or ended last. ``is_wanted``: it has not been told to end."""

    name: str
    role: str
    host: Host
    process: asyncio.subprocess.Process | None = None
    is_wanted: bool = False
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{HTTP}"

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    @property
    def log(self) -> pathlib.Path:
        return self.host.disk / "log"


class SoakedCluster:
    """``endings``: what ended although it was not asked to, or otherwise than it was asked to, as sentences."""

    def __init__(self, box: Box, model: pathlib.Path, token_file: pathlib.Path) -> None:
        self.parts = {
            name: Part(name, role, box.add(name, DISK_MB.get(role, DISK_MB_ELSE))) for name, role in ROLES.items()
        }
        self.endings: list[dict[str, Any]] = []
        self.clock_files: dict[str, pathlib.Path] = {}
        self.preload = ""
        self.began_s = time.monotonic()
        self._model, self._token_file = model, token_file
        self._tasks: set[asyncio.Task[None]] = set()
        own_key = secrets.token_hex(16)
        self._leg_key_file = token_file.with_name("leg-key")
        self._leg_key_file.touch(0o600)
        self._leg_key_file.write_text(own_key)
        self._client = httpx.AsyncClient(trust_env=False, timeout=2.0, headers={LEG_KEY.decode(): own_key})

    # --- the whole ---

    async def start(self) -> None:
        """Raises DeadlineExceededError and ConfigError."""
        for roles in (("etcd",), ("coordinator",), ("prefill", "decode", "router")):
            chosen = [name for name, role in ROLES.items() if role in roles]
            await asyncio.gather(*(self.begin(name) for name in chosen))
            if roles == ("etcd",):
                await self._until(self._has_etcd, "etcd to have a leader", START_S)
        await self.whole(START_S)

    async def whole(self, within_s: float = WHOLE_S) -> float:
        """Wait until both routers would place requests at all workers, routers and workers hear a coordinator, and no
        part is missing; how long it took."""
        return await self._until(self._is_whole, "all parts to see each other", within_s)

    async def close(self) -> None:
        """SIGTERM to all, routers first; what does not end is killed and is an ending."""
        for roles in (("router",), ("prefill", "decode"), ("coordinator",), ("etcd",)):
            chosen = [name for name, part in self.parts.items() if part.role in roles and part.pid is not None]
            await asyncio.gather(*(self.end(name) for name in chosen))
        await self._client.aclose()

    def keep_logs(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in self.parts.values():
            with contextlib.suppress(OSError):
                shutil.copyfile(part.log, folder / f"{part.name}.log")

    # --- one part ---

    async def begin(self, name: str) -> None:
        """Start it, and wait until it says that it is ready. Raises DeadlineExceededError."""
        part = self.parts[name]
        part.is_wanted = True
        part.starts += 1
        log = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            part.process = await asyncio.create_subprocess_exec(
                *part.host.command(), *self._command(part), stdout=asyncio.subprocess.PIPE, stderr=log,
                env=self._environment(part), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(log)
        is_ready = asyncio.Event()
        if part.role == "etcd":
            is_ready.set()
        task = asyncio.create_task(self._follow(part, part.process, is_ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        waiting = asyncio.create_task(is_ready.wait())
        await asyncio.wait({waiting, task}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not is_ready.is_set() and part.is_wanted and part.pid is not None:
            raise DeadlineExceededError(f"was not ready within {START_S:g} s")

    async def kill(self, name: str) -> None:
        part = self.parts[name]
        part.is_wanted = False
        if part.process is not None and part.process.returncode is None:
            part.process.kill()
            await part.process.wait()

    async def end(self, name: str) -> float:
        """SIGTERM; how long it took. More than STOP_S, or an exit code other than 0, is an ending."""
        part = self.parts[name]
        part.is_wanted = False
        assert part.process is not None
        if part.process.returncode is not None:
            return 0.0
        began_s = time.monotonic()
        part.process.terminate()
        try:
            code = await asyncio.wait_for(part.process.wait(), STOP_S)
        except TimeoutError:
            self.note(name, f"did not end within {STOP_S:g} s of SIGTERM")
            await self.kill(name)
        else:
            if code and part.role != "etcd":
                self.note(name, f"ended with code {code} after SIGTERM")
        return time.monotonic() - began_s

    def signal(self, name: str, number: signal.Signals) -> None:
        process = self.parts[name].process
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def statistics(self, name: str) -> dict[str, Any] | None:
        """Of a worker; None where it does not answer."""
        try:
            answer = await self._client.get(f"{self.parts[name].url}/statistics")
            return dict(answer.json()) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    # --- inside ---

    def _command(self, part: Part) -> list[str]:
        host = part.host
        python = [sys.executable, "-m", "kvxfer.cli"]
        common = [f"--host={host.address}", "--insecure", f"--token-file={self._token_file}"]
        coordinators = ",".join(f"{self.parts[name].host.address}:{CONTROL}" for name in COORDINATORS)
        if part.role == "etcd":
            return self._etcd(part)
        if part.role == "coordinator":
            nodes = ",".join(f"{p.host.address}:{CLIENT}" for p in self.parts.values() if p.role == "etcd")
            store = [f"--store=etcd:{nodes}", f"--port={CONTROL}", f"--metrics-port={METRICS}"]
            return [*python, "coordinator", *common, *store]
        common += [f"--coordinator={coordinators}", f"--port={HTTP}", "--shutdown-grace-s=5"]
        if part.role == "router":
            bounds = [f"--token-timeout-s={ROUTER_SAYS_S:g}", f"--first-byte-timeout-s={ROUTER_SAYS_S:g}"]
            return [*python, "router", *common, *bounds, "--request-timeout-s=60"]
        model = [f"--model={self._model}", "--threads=1", "--pool-blocks=256", f"--lanes={LANES[part.name]}"]
        own = [f"--role={part.role}", f"--agent-id={part.name}", f"--data-port={DATA}"]
        places = [f"--runtime-dir={host.disk / 'runtime'}", f"--leg-key-file={self._leg_key_file}"]
        return [*python, "worker", *common, *model, *own, *places]

    def _etcd(self, part: Part) -> list[str]:
        if why := obstacle():
            raise ConfigError(why)
        nodes = [other for other in self.parts.values() if other.role == "etcd"]
        client, peer = (f"http://{part.host.address}:{port}" for port in (CLIENT, PEER))
        flags = {
            "name": part.name,
            "data-dir": part.host.disk / "data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{node.name}=http://{node.host.address}:{PEER}" for node in nodes),
            "initial-cluster-state": "new",
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "1000",
            "logger": "zap",
            "log-level": "error",
        }
        return ["etcd", *(f"--{name}={value}" for name, value in flags.items())]

    def _environment(self, part: Part) -> dict[str, str]:
        state = part.host.disk / "state"
        places = {name: str(state) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR")}
        state.mkdir(mode=0o700, exist_ok=True)
        environment = {**os.environ, **worker_environment(1), **places, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment["KVXFER_ENCRYPT"] = "always"
        if part.name in self.clock_files:
            environment |= {"LD_PRELOAD": self.preload, "KVXFER_SOAK_CLOCK": str(self.clock_files[part.name])}
        return environment

    async def _follow(self, part: Part, process: asyncio.subprocess.Process, is_ready: asyncio.Event) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):
                if json.loads(line).get("event") == "ready":
                    is_ready.set()
        code = await process.wait()
        if part.is_wanted and part.process is process:
            part.is_wanted = False
            self.note(part.name, f"ended by itself with code {code}")

    def note(self, name: str, what: str) -> None:
        """Add an ending."""
        self.endings.append({"at_s": self.now_s(), "part": name, "what": what})

    def now_s(self) -> float:
        """Since the load began."""
        return round(time.monotonic() - self.began_s, 2)

    async def _has_etcd(self) -> bool:
        for part in self.parts.values():
            if part.role == "etcd":
                answer = await self._client.get(f"http://{part.host.address}:{CLIENT}/health")
                if answer.json().get("health") != "true":
                    return False
        return True

    async def _is_whole(self) -> bool:
        if any(part.pid is None for part in self.parts.values()):
            return False
        for name in ROUTERS:
            answer = await self._client.get(f"{self.parts[name].url}/v1/workers")
            entries = answer.json()["data"]
            ready = {entry["agent_id"] for entry in entries if entry["is_ready"] and not entry["is_suspect"]}
            if ready != set(WORKERS) or len(entries) != len(WORKERS):
                return False
            answer = await self._client.get(f"{self.parts[name].url}/metrics")
            if metric(answer.text, "kvxfer_router_coordinator_connected") != 1.0:
                return False
        for known in await asyncio.gather(*map(self.statistics, WORKERS)):
            if known is None or not (known["agent"] or {}).get("is_coordinator_connected"):
                return False
        for name in COORDINATORS:
            answer = await self._client.get(f"http://{self.parts[name].host.address}:{METRICS}/ready")
            if answer.status_code != 200:
                return False
        return await self._has_etcd()

    async def _until(self, condition: Any, what: str, within_s: float) -> float:
        began_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                if await condition():
                    return time.monotonic() - began_s
            if time.monotonic() - began_s > within_s:
                raise DeadlineExceededError(f"not within {within_s:g} s: {what}")
            await asyncio.sleep(POLL_S)


def metric(text: str, name: str) -> float:
    """The value of the metric of this name, which has no labels. Raises KeyError."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise KeyError(name)
