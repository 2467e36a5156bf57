"""Where a worker says that it serves HTTP, and whether it may say so; must never know how a connection is made.

The router posts prompts to a registered address, so it is no more believed than its sender: a plain ``http`` or
``https`` origin, at the host that the agent registered from, or at one that the operator named. Names are not resolved
here: what a name stands for may be another address the next time, so a name counts only where the operator gave it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence

from kvxfer.config import is_loopback
from kvxfer.errors import ConfigError, InvalidArgumentError, RefusedError

URL_CHARS_MAX = 512
_ORIGIN = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::([0-9]{1,5}))?/?")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_HOST_FIELD = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~-]*)(?::[0-9]{0,5})?")
HOST_FIELD_BYTES_MAX = 512

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclasses.dataclass(frozen=True)
class HttpUrl:
    """An origin: ``host`` is an address without brackets, or a name in small letters."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, name: str, text: str) -> HttpUrl:
        """The origin ``text`` of the field ``name``; raise InvalidArgumentError for anything else: another scheme, a
        user, a path, a query, a fragment, an address that stands for none or for many.
        """
        found = _ORIGIN.fullmatch(text) if len(text) <= URL_CHARS_MAX else None
        if found is None:
            raise InvalidArgumentError(
                f"{name} must be http:// or https://, a host, and a port, with nothing after it, not "
                f"{without_user(text)!r:.200}"
            )
        scheme, host, port_text = found[1], found[2].strip("[]").lower(), found[3]
        port = int(port_text) if port_text else {"http": 80, "https": 443}[scheme]
        if not 0 < port < 65536:
            raise InvalidArgumentError(f"{name} must have a port from 1 to 65535, not {port}")
        address = address_of(host)
        if address is None and (":" in host or not is_name(host)):
            raise InvalidArgumentError(f"{name} must have an IP address or a host name, not {host!r:.200}")
        kind = "" if address is None else no_engine_at(address)
        if kind and kind != LINK_LOCAL:
            raise InvalidArgumentError(f"{name} must have an address that an engine can have, not {host}: it is {kind}")
        return cls(scheme, str(address or host), port)

    @property
    def origin(self) -> str:
        """The one way to write it."""
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def check_routed(self, name: str) -> None:
        """Raise InvalidArgumentError where ``host`` is a link-local address, which stands for another machine on each
        link. What a name stands for is judged when it is dialled."""
        address = address_of(self.host)
        if address is not None and no_engine_at(address):
            raise InvalidArgumentError(
                f"{name} must have an address that is the same on every link, not {self.host}: it is {LINK_LOCAL}"
            )


def without_user(text: str) -> str:
    """A URL, also a wrong one, as errors may show it: what stands before its ``@`` may be a password."""
    return re.sub(r"(?<=://)[^/\s]*(?=@)", "[hidden]", text)


def address_of(host: str) -> Address | None:
    """``host`` as an IP address, an IPv4 one that is written as IPv6 as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


LINK_LOCAL = "link-local"
_LIMITED_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")))
"""Where clouds tell a machine its own credentials; of the large ones, those that are not link-local too."""


def no_engine_at(address: Address) -> str:
    """What kind of address it is, where an engine cannot have it or should not; empty for all others. An IPv4 address
    within an IPv6 one (mapped, compatible, 6to4, NAT64) is judged as itself."""
    inner = _within(address)
    if inner is not None:
        return no_engine_at(inner)
    if address in _METADATA:
        return "a cloud's metadata service"
    if address.is_unspecified or address in _THIS_NETWORK:
        return "unspecified"
    if address.is_multicast:
        return "multicast"
    if address == _LIMITED_BROADCAST:
        return "broadcast"
    return LINK_LOCAL if address.is_link_local else ""


def _within(address: Address) -> Address | None:
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def is_name(host: str) -> bool:
    """Whether ``host`` is a host name. One whose last part is a number (``127.1``, ``0x7f000001``) is none: resolvers
    take it for an address.
    """
    last = host.rpartition(".")[2]
    return _NAME.fullmatch(host) is not None and not re.fullmatch(r"[0-9]+|0[xX][0-9A-Fa-f]*", last)


def is_host_field(value: bytes) -> bool:
    """Whether ``value`` is what a request's Host says: a name or an address, and a port, each of which may be missing.
    Percent signs and the marks that a URL's host may have are refused, as no name in use has them.
    """
    return len(value) <= HOST_FIELD_BYTES_MAX and _HOST_FIELD.fullmatch(value) is not None


def is_one_host(fields: Sequence[bytes], *, is_required: bool) -> bool:
    """Whether a request names one host by its Host fields; or none, where it is of HTTP/1.0 and need not."""
    return (len(fields) == 1 or not (fields or is_required)) and all(map(is_host_field, fields))


class HostList:
    """Hosts that an operator allows: addresses, networks (``10.0.0.0/8``), names, and ``*.name`` for all below one."""

    def __init__(self, option: str, entries: Iterable[str]) -> None:
        """``option`` is the setting's name, for errors. Raises ConfigError for an entry that is none of these."""
        self._networks: list[Network] = []
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        for entry in entries:
            self._add(option, entry.strip().lower())

    def __bool__(self) -> bool:
        return bool(self._networks or self._names or self._suffixes)

    def allows(self, host: str) -> bool:
        """Whether ``host``, as in :class:`HttpUrl`, is one of them."""
        address = address_of(host)
        if address is not None:
            return any(address in network for network in self._networks)
        return host in self._names or any(host.endswith(suffix) for suffix in self._suffixes)

    def _add(self, option: str, entry: str) -> None:
        if entry.startswith("*.") and is_name(entry[2:]):
            self._suffixes.append(entry[1:])
        elif is_name(entry):
            self._names.add(entry)
        else:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]")))
            except ValueError:
                raise ConfigError(f"{option} must name addresses, networks or host names, not {entry!r:.100}") from None


def check_registered_host(
    name: str, host: str, *, peer: str, allowed: HostList, is_own: Callable[[str], bool], option: str
) -> None:
    """Raise RefusedError unless an agent that registers from ``peer`` may say that it serves at ``host``.

    ``peer`` is the address of its connection, or empty for a Unix socket's. From loopback it may name any loopback
    address, or one that ``is_own`` says is this machine's: there the two are neighbours. ``name`` is the field's, and
    ``option`` the setting's that would allow it.
    """
    from_address = address_of(peer)
    host_address = address_of(host)
    is_neighbour = not peer or (from_address is not None and from_address.is_loopback)
    is_its_own = host_address is not None and host_address == from_address
    if is_neighbour:
        is_its_own = is_loopback(host) or (host_address is not None and is_own(str(host_address)))
    if not is_its_own and not allowed.allows(host):
        raise RefusedError(
            f"{name} names the host {host}, and the agent registers from {peer or 'a Unix socket'}: "
            f"let it advertise that address, or allow the host at the coordinator ({option})"
        )
