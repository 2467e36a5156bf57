"""Two hosts on one machine: two network namespaces joined by a link that can be taken down. Decides how they are made,
and that nothing of them stays; must never know what runs inside.

Needs root and iproute2's ``ip``::

    with Namespaces() as hosts:
        subprocess.Popen([*hosts.command(0), "some", "server", hosts.addresses[0]])
        hosts.take_link_down()
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from types import TracebackType

from kvxfer.errors import ConfigError

INTERFACE = "kvxfer-veth"
PREFIX_BITS = 30
CARRIES_S = 10.0
_PROBE = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            probe.connect((sys.argv[1], 1))
        except ConnectionRefusedError:
            sys.exit()
        except OSError:
            time.sleep(0.02)
sys.exit("nothing comes back from the other end")
"""


def obstacle() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's ip"
    return ""


class Namespaces:
    """A context manager; both ends are 0 and 1. Raises ConfigError where the system does not let us."""

    addresses = ("192.0.2.1", "192.0.2.2")

    def __init__(self) -> None:
        self._names: list[str] = []

    def __repr__(self) -> str:
        return f"<Namespaces {' and '.join(self._names) or 'none'}>"

    def __enter__(self) -> Namespaces:
        why = obstacle()
        if why:
            raise ConfigError(why)
        try:
            for end in range(2):
                name = f"kvxfer-{os.getpid()}-{secrets.token_hex(3)}-{end}"
                ip("netns", "add", name)
                self._names.append(name)
            one, other = self._names
            pair = ("link", "add", INTERFACE, "netns", one, "type", "veth", "peer", INTERFACE, "netns", other)
            ip(*pair)
            for name, address in zip(self._names, self.addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/{PREFIX_BITS}", "dev", INTERFACE)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", INTERFACE, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, end: int) -> list[str]:
        """What goes before a command so that it runs at that end. It becomes that command: the pid stays."""
        return ["ip", "netns", "exec", self._names[end]]

    def take_link_down(self, end: int = 0) -> None:
        """The link goes down at ``end``: that one knows, the other only hears nothing any more."""
        ip("-n", self._names[end], "link", "set", INTERFACE, "down")

    def bring_link_up(self, end: int = 0) -> None:
        """The link comes up again. What is sent at once may be lost, and sent anew only a second later: the far end has
        yet to notice, and both have to ask for each other's address. See :meth:`wait_carries`."""
        ip("-n", self._names[end], "link", "set", INTERFACE, "up")

    def wait_carries(self) -> None:
        """Until the link carries both ways. Raises ConfigError where it does not within CARRIES_S."""
        run_command([*self.command(1), sys.executable, "-I", "-S", "-c", _PROBE, self.addresses[0], str(CARRIES_S)])

    def keep_neighbour(self, end: int = 1) -> None:
        """``end`` has not to ask anew for the other's hardware address, once a second, when the link comes back."""
        other = 1 - end
        address = ip("-n", self._names[other], "-brief", "link", "show", INTERFACE).split()[2]
        neighbour = (self.addresses[other], "lladdr", address, "dev", INTERFACE, "nud", "permanent")
        ip("-n", self._names[end], "neighbour", "replace", *neighbour)

    def limit_rate(self, megabits: int, end: int = 0) -> None:
        """What ``end`` sends takes its time. Raises ConfigError where ``tc`` or its token bucket is missing."""
        if shutil.which("tc") is None:
            raise ConfigError("a rate needs iproute2's tc")
        shape = ["rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms"]
        run_command(["tc", "-n", self._names[end], "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape])

    def _remove(self) -> None:
        while self._names:
            with contextlib.suppress(ConfigError):
                ip("netns", "delete", self._names.pop())


def ip(*arguments: str) -> str:
    """iproute2's ``ip``; what it says. Raises ConfigError where it fails."""
    return run_command(["ip", *arguments])


def run_command(command: list[str]) -> str:
    """What a command says. Raises ConfigError where it fails, with its reason."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
