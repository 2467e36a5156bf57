"""How each planned fault is made and taken back. Decides nothing of which one comes next."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import struct
import subprocess
from collections.abc import AsyncIterator

from kvxfer.errors import ConfigError
from soaking.box import BRIDGE, Host, arun, keep_packets_plain
from soaking.cluster import SoakedCluster
from soaking.plan import BEFALLS, PlannedFault
from soaking.relay import Relay

SHIM = pathlib.Path(__file__).with_name("wall_clock.cpp")
COMPILER = "g++"


class Faults:
    """``left_out``: kinds that cannot be made here, and why."""

    def __init__(self, cluster: SoakedCluster, folder: pathlib.Path) -> None:
        self.left_out: dict[str, str] = {}
        self._cluster, self._folder = cluster, folder
        self._prepare_clocks()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in BEFALLS if kind not in self.left_out)

    @contextlib.asynccontextmanager
    async def made(self, fault: PlannedFault) -> AsyncIterator[None]:
        """Inside, the fault is there; afterwards, what it did is undone, and the part has been started again."""
        part = self._cluster.parts[fault.victim]
        host = part.host
        match fault.kind:
            case "kill":
                await self._cluster.kill(fault.victim)
                yield
                await self._cluster.begin(fault.victim)
            case "stop":
                self._cluster.signal(fault.victim, signal.SIGSTOP)
                yield
                self._cluster.signal(fault.victim, signal.SIGCONT)
            case "restart":
                await self._cluster.end(fault.victim)
                yield
                await self._cluster.begin(fault.victim)
            case "partition":
                await host.unplug()
                yield
                await host.plug()
            case "apart":
                other = self._cluster.parts[fault.peer].host
                await host.part_from(other)
                yield
                await host.join(other)
            case "disk":
                full_s = self._cluster.now_s()
                await asyncio.to_thread(host.fill)
                yield
                host.empty()
                await self._after_full_disk(fault.victim, full_s)
            case "clock":
                self._set_clock(fault.victim, fault.amount)
                yield
                self._set_clock(fault.victim, 0.0)
            case "rate":
                await host.limit(fault.amount)
                yield
                await host.unlimit()
            case "delay" | "loss":
                async with relayed(host, fault):
                    yield
            case kind:
                raise ConfigError(f"there is no fault {kind}")

    async def _after_full_disk(self, name: str, full_s: float) -> None:
        """etcd ends itself where it cannot write; an operator starts it again. Its endings since ``full_s`` are no
        wonder."""
        part = self._cluster.parts[name]
        if part.role == "etcd" and part.pid is None:
            kept = [each for each in self._cluster.endings if each["part"] != name or each["at_s"] < full_s]
            self._cluster.endings = kept
            await self._cluster.begin(name)

    # --- clocks ---

    def _prepare_clocks(self) -> None:
        library = self._folder / "wall_clock.so"
        command = [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM), "-ldl", "-pthread"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            self.left_out["clock"] = f"{COMPILER}: {error.strerror}"
            return
        if done.returncode != 0:
            self.left_out["clock"] = f"{COMPILER}: {done.stderr.strip()[:200]}"
            return
        self._cluster.preload = str(library)
        for part in self._cluster.parts.values():
            if part.role in BEFALLS["clock"]:
                self._cluster.clock_files[part.name] = self._folder / f"{part.name}.clock"
                self._set_clock(part.name, 0.0)

    def _set_clock(self, name: str, seconds: float) -> None:
        """In place: the process has the file mapped."""
        path = self._cluster.clock_files[name]
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.write(struct.pack("=q", int(seconds * 1e9)))


@contextlib.asynccontextmanager
async def relayed(host: Host, fault: PlannedFault) -> AsyncIterator[None]:
    """The host's link leads through a relay; its connections stay."""
    near, far = f"r{host.link}", f"s{host.link}"
    await arun("ip", "link", "add", near, "type", "veth", "peer", far)
    keep_packets_plain(near)
    keep_packets_plain(far)
    await arun("ip", "link", "set", near, "up")
    await arun("ip", "link", "set", far, "up")
    await host.unplug()
    await arun("ip", "link", "set", far, "master", BRIDGE)
    delay_s = fault.amount / 1000 if fault.kind == "delay" else 0.0
    relay = Relay(host.link, near, delay_s=delay_s, loss=fault.amount if fault.kind == "loss" else 0.0)
    try:
        yield
    finally:
        relay.close()
        await arun("ip", "link", "delete", near)
        await host.plug()
