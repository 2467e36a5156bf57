"""The coordinator's port: plain or TLS, made anew where a CA was taken away.

Decides how a connection begins; what is said on it is the service's. Certificates are read again for each handshake. A
connection that began under a CA that counts no more is closed with all others: gRPC cannot judge an open one again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvxfer.coordinator.gate import TokenGate
from kvxfer.coordinator.health import HEALTH_SERVICE
from kvxfer.errors import ConfigError
from kvxfer.rpc.convert import MESSAGE_BYTES_MAX
from kvxfer.rpc.link import KEEPALIVE_OPTIONS, PINGS_APART_MIN_MS
from kvxfer.trust.files import FollowedFiles, Keyed

log = logging.getLogger("kvxfer.coordinator")

RECEIVE_BYTES_MAX = 2 << 20
"""No message of an agent is larger, with every list and text at its bound."""
HANDSHAKE_MS = 5_000
"""How long a connection may hold a descriptor before it has begun to speak HTTP/2."""
REBIND_S = 5.0
"""How long the port may stay taken by the server before, when it is made anew."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", PINGS_APART_MIN_MS),
)


class ControlPort:
    """The gRPC server of one coordinator, on one port for as long as it runs."""

    def __init__(
        self,
        host: str,
        port: int,
        add_services: Callable[[grpc.aio.Server], None],
        *,
        token: bytes,
        files: FollowedFiles | None,
        calls_max: int,
    ) -> None:
        """``files``: speak TLS only, and ask for a certificate; None: plain, and ask for ``token``."""
        self.host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        """As it stands in an address: an IPv6 one in brackets."""
        self._port = port
        self._add_services = add_services
        self._gates = () if files else (TokenGate(token, open_prefix=f"/{HEALTH_SERVICE}/"),)
        self._files = files
        self._calls_max = calls_max
        self._server = self._bound()

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def restart(self) -> None:
        """Close every connection, and listen again on the same port. Raises ConfigError if it was taken meanwhile."""
        await self._server.stop(0)
        if self._files is not None:
            self._files.forget()
        deadline_s = asyncio.get_running_loop().time() + REBIND_S
        while True:
            try:
                self._server = self._bound()
                break
            except ConfigError:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
                await asyncio.sleep(0.05)
        await self._server.start()

    def _bound(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=self._gates, options=SERVER_OPTIONS, maximum_concurrent_rpcs=self._calls_max
        )
        self._add_services(server)
        try:
            if self._files is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, server_credentials(self._files))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"the coordinator cannot listen on {self.address}: the port is taken, or the address is not ours"
            )
        self._port = port
        return server


def server_credentials(files: FollowedFiles) -> grpc.ServerCredentials:
    """Of a server that asks every client for a certificate, and reads changed files at the next handshake."""
    used = files.look()

    def changed() -> Any:
        """None: nothing changed."""
        nonlocal used
        newest = files.look()
        if newest is used:
            return None
        used = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), changed, require_client_authentication=True)


def _configuration(keyed: Keyed) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(keyed.key, keyed.cert)], root_certificates=keyed.ca)
