"""Where an agent registers from, and which hosts it may therefore name. Decides by the connection and by what the
operator allows; must never resolve a name.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterable

from kvxfer.errors import RefusedError
from kvxfer.protocol.directory import Hello
from kvxfer.protocol.http_url import HostList, HttpUrl, check_registered_host

OPTION = "--allow-http-host"


class RegisteredHosts:
    """What one coordinator lets agents say of where they serve HTTP."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """Raises ConfigError for an entry that is no address, network or name."""
        self._allowed = HostList("allow_http_host", allowed)

    def check(self, hello: Hello, peer: str) -> None:
        """Raise RefusedError, naming the field, unless the agent behind ``peer`` (as gRPC writes it) may register
        ``hello``'s http_url. An agent without one may always.
        """
        if hello.info.http_url:
            url = HttpUrl.parse("info.http_url", hello.info.http_url)
            check_registered_host(
                "info.http_url", url.host, peer=peer_host(peer), allowed=self._allowed, is_own=is_own, option=OPTION
            )


def peer_host(peer: str) -> str:
    """The address in gRPC's ``ipv4:1.2.3.4:5`` or ``ipv6:%5B::1%5D:5``; empty for a Unix socket.

    Raises RefusedError for a peer that has no address.
    """
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return ""
    host, colon, _ = urllib.parse.unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not colon:
        raise RefusedError(f"an agent registers from {peer[:100]!r}, which is no address")
    return host.strip("[]")


def is_own(address: str) -> bool:
    """Whether ``address`` is one of this machine's: the kernel reaches only those from themselves. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
    except OSError:
        return False
