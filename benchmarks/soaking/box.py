"""A box that holds a whole cluster: namespaces of network, mounts and processes. Nothing of it outlives the program
that entered it, however that ends.

Decides how a program enters the box, and how hosts, links and disks are made in it. It must never know what runs there.
A host is a network namespace with one address, joined to all others by a bridge; the program itself is at GATEWAY.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

from kvxfer.errors import ConfigError

INSIDE = "KVXFER_SOAK_INSIDE"
NETWORK = "192.0.2"
GATEWAY = f"{NETWORK}.254"
BRIDGE, BRIDGE_ADDRESS = "soak", "02:00:00:00:00:fe"
NOWHERE = "02:00:00:00:00:ff"
FILES_MB = 64
TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
SIOCETHTOOL = 0x8946
NO_CHECKSUMS, NO_GATHER, NO_SEGMENTS, NO_GENERIC_SEGMENTS = 0x17, 0x19, 0x1F, 0x24


def obstacle() -> str:
    """Why no box can be entered here, or nothing."""
    if os.environ.get(INSIDE):
        return ""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the box needs {', '.join(missing)} (util-linux, iproute2)"
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"this user may make no namespaces: {done.stderr.strip()}"


def enter(script: str, arguments: Sequence[str]) -> None:
    """Become the same program inside of the box; return where it is in already. See :func:`obstacle`."""
    if os.environ.get(INSIDE):
        return
    command = [*_unshare(), sys.executable, script, *arguments]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})


def _unshare() -> list[str]:
    as_root = ["--user", "--map-root-user"] if os.geteuid() else []
    return [
        "unshare",
        *as_root,
        "--net",
        "--mount",
        "--propagation=private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]


class Box:
    """Hosts and disks, below ``folder``, which is empty when the program has ended. ``files``: what no fault fills."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self.hosts: dict[str, Host] = {}
        run("mount", "-t", "tmpfs", "-o", f"size={FILES_MB}m", "soak", str(folder))
        self.files.mkdir()
        for name in ("all", "default"):
            pathlib.Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
            pathlib.Path(f"/proc/sys/net/ipv4/conf/{name}/arp_ignore").write_text("1")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", BRIDGE, "address", BRIDGE_ADDRESS, "type", "bridge")
        run("ip", "address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        keep_packets_plain(BRIDGE)

    def add(self, name: str, disk_mb: int) -> Host:
        host = self.hosts[name] = Host(name, len(self.hosts) + 1, self.folder / name, disk_mb)
        return host

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        with contextlib.suppress(ConfigError):
            run("umount", "--lazy", str(self.folder))


class Host:
    """``link`` is the end of its link on the bridge's side. ``disk`` is a file system of its own."""

    def __init__(self, name: str, number: int, disk: pathlib.Path, disk_mb: int) -> None:
        self.name, self.disk = name, disk
        self.address, self.link = f"{NETWORK}.{number}", f"h{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        inner = f"e{number}"
        run("ip", "link", "add", self.link, "type", "veth", "peer", inner, "address", self.hardware)
        keep_packets_plain(inner)
        keep_packets_plain(self.link)
        run("ip", "link", "set", inner, "netns", str(self._holder.pid), "name", "eth0")
        run("ip", "link", "set", self.link, "master", BRIDGE, "up")
        for words in (f"address add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            run(*self.command(), "ip", *words.split())
        disk.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={disk_mb}m", f"disk-{name}", str(disk))

    def command(self) -> list[str]:
        """What goes before a command so that it runs there. It becomes that command: the pid stays."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    # --- its link ---

    async def unplug(self) -> None:
        """What it sends and is sent goes nowhere, and neither end is told."""
        await arun("ip", "link", "set", self.link, "nomaster")

    async def plug(self) -> None:
        await arun("ip", "link", "set", self.link, "master", BRIDGE)

    async def part_from(self, other: Host) -> None:
        """Nothing passes between the two, in silence; all else does."""
        for one, far in ((self, other), (other, self)):
            words = f"neighbour replace {far.address} lladdr {NOWHERE} dev eth0 nud permanent"
            await arun(*one.command(), "ip", *words.split())

    async def join(self, other: Host) -> None:
        for one, far in ((self, other), (other, self)):
            words = f"neighbour replace {far.address} lladdr {far.hardware} dev eth0 nud reachable"
            await arun(*one.command(), "ip", *words.split())

    async def limit(self, megabits: float) -> None:
        """What it sends and is sent takes its time."""
        shape = f"root tbf rate {megabits:g}mbit burst 32kb latency 400ms".split()
        await arun("tc", "qdisc", "add", "dev", self.link, *shape)
        await arun(*self.command(), "tc", "qdisc", "add", "dev", "eth0", *shape)

    async def unlimit(self) -> None:
        await arun("tc", "qdisc", "delete", "dev", self.link, "root")
        await arun(*self.command(), "tc", "qdisc", "delete", "dev", "eth0", "root")

    # --- its disk ---

    def fill(self) -> None:
        """Not one byte more can be written there."""
        block = bytes(1 << 16)
        file = os.open(self.disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            while True:
                try:
                    os.write(file, block)
                except OSError:
                    if len(block) == 1:
                        break
                    block = block[: len(block) // 2]
        finally:
            os.close(file)

    def empty(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)


def keep_packets_plain(interface: str) -> None:
    """Its packets leave as they would over a cable, no longer than its MTU and with their checksums: a relay between
    two sockets can pass them on."""
    with socket.socket() as any_socket:
        for command in (NO_CHECKSUMS, NO_SEGMENTS, NO_GENERIC_SEGMENTS):
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def run(*command: str) -> str:
    """Raises ConfigError with what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


async def arun(*command: str) -> str:
    return await asyncio.to_thread(run, *command)
