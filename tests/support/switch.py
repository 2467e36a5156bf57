"""Several hosts on one machine: a network namespace for each, all on one bridge, which this machine's own namespace
reaches too. Decides how they are made and how one is cut off; must never know what runs inside.

Needs root and iproute2's ``ip``::

    with SwitchedHosts("a", "b") as hosts:
        subprocess.Popen([*hosts.command("a"), "some", "server", hosts.address("a")])
        hosts.cut_off("a")
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from types import TracebackType

import pytest

from kvxfer.errors import ConfigError
from tests.support.netns import ip, obstacle

INTERFACE = "kvxfer-veth"
PREFIX_BITS = 27
HOSTS_MAX = (1 << (32 - PREFIX_BITS)) - 3


class SwitchedHosts:
    """A context manager. Raises ConfigError where the system does not let us.

    The addresses are of 198.18.0.0/15, which RFC 2544 reserves for tests of networks.
    """

    def __init__(self, *names: str) -> None:
        if len(names) > HOSTS_MAX:
            raise ConfigError(f"a switch has at most {HOSTS_MAX} hosts")
        block = secrets.randbelow(1 << 12)
        first = (198 << 24) + (18 << 16) + (block << (32 - PREFIX_BITS))
        ours, *theirs = (".".join(map(str, (first + n).to_bytes(4, "big"))) for n in range(1, len(names) + 2))
        self.own_address = ours
        """This machine's, as the hosts see it."""
        self.tag = secrets.token_hex(3)
        """In every name that is made."""
        self._bridge = f"kvxb{self.tag}"
        self._addresses = dict(zip(names, theirs, strict=True))
        self._made: list[str] = []

    def __repr__(self) -> str:
        return f"<SwitchedHosts {' '.join(self._addresses)} on {self._bridge}>"

    def __enter__(self) -> SwitchedHosts:
        why = obstacle()
        if why:
            raise ConfigError(why)
        try:
            # Its own hardware address: otherwise it is the lowest of its ports', and changes with them.
            ip("link", "add", self._bridge, "address", f"02:{secrets.token_bytes(5).hex(':')}", "type", "bridge")
            ip("address", "add", f"{self.own_address}/{PREFIX_BITS}", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for name, address in self._addresses.items():
                self._add(self._namespace(name), self._port(name), address)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, name: str) -> str:
        return self._addresses[name]

    def command(self, name: str) -> list[str]:
        """What goes before a command so that it runs on that host. It becomes that command: the pid stays."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def cut_off(self, name: str) -> None:
        """Nothing from this host or to it passes any more. Its own interface stays up, so no end is told."""
        ip("link", "set", self._port(name), "nomaster")

    def bring_back(self, name: str) -> None:
        ip("link", "set", self._port(name), "master", self._bridge)

    def _namespace(self, name: str) -> str:
        return f"kvxfer-{os.getpid()}-{self.tag}-{name}"

    def _port(self, name: str) -> str:
        return f"kvxp{self.tag}{list(self._addresses).index(name)}"

    def _add(self, namespace: str, port: str, address: str) -> None:
        ip("netns", "add", namespace)
        self._made.append(namespace)
        ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        ip("link", "set", port, "master", self._bridge)
        ip("link", "set", port, "up")
        ip("-n", namespace, "address", "add", f"{address}/{PREFIX_BITS}", "dev", INTERFACE)
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        """All ports first: the kernel takes its time over those of a namespace that is gone."""
        ports = [("link", "delete", self._port(name)) for name in self._addresses]
        namespaces = [("netns", "delete", name) for name in self._made]
        self._made.clear()
        for words in (*ports, *namespaces, ("link", "delete", self._bridge)):
            with contextlib.suppress(ConfigError):
                ip(*words)


@contextlib.contextmanager
def switched(*names: str) -> Iterator[SwitchedHosts]:
    """The hosts; the test is skipped, with the reason, where the system lets root have none (a container)."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(SwitchedHosts(*names))
        except ConfigError as error:
            pytest.skip(f"no network namespaces: {error}")
        yield hosts
