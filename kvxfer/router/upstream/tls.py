"""How the router speaks TLS to engines: which certificates it believes, and which one it shows.

Decides which certificate a worker must have; it must never know what is asked of a worker.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable, Collection
from typing import Any

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.router.upstream.limits import UpstreamLimits
from kvxfer.router.upstream.pool import UpstreamPool
from kvxfer.serving.watching import WatchedFiles
from kvxfer.trust.files import IdentityFiles, load_authorities, load_identity
from kvxfer.trust.identity import identity_among
from kvxfer.trust.permissions import SERVES

SETTINGS = ("worker_cert_file", "worker_ca_file")
LOOK_S = 1.0
"""How often it is looked whether the files have changed, if connections are asked for."""


def worker_context(ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """Names are checked. Empty ``ca_file``: the system's CAs; empty ``cert_file``: no certificate of ours. Raises
    ConfigError that names the setting and the file."""
    try:
        context = ssl.create_default_context()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the system's CAs cannot be read: {error}") from None
    if ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "worker_ca_file", ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert_file:
        load_identity(context, "worker_cert_file", cert_file, key_file)
    return context


class WorkerPools:
    """Makes the pool of an address, as ``UpstreamPool`` itself does, with one context for all https:// addresses: a new
    one when the files have changed."""

    def __init__(
        self, ca_file: str = "", cert_file: str = "", key_file: str = "", *, knows_identities: bool = False
    ) -> None:
        """``knows_identities``: a worker is known by the identity in its certificate, which must be of the cluster of
        ``cert_file`` and a worker's, and not by its host."""
        self._files = (ca_file, cert_file, key_file)
        self._knows_identities = knows_identities
        self._cluster = ""
        self.agents_at: Callable[[str], Collection[str]] = lambda url: ()
        """The agents, one of which a worker at that address must be; none: any worker may be there."""
        self._watched = WatchedFiles(self._files, self._load, what="certificates for workers")
        self._looked_s = time.monotonic()
        self._context: ssl.SSLContext | None = None
        if any(self._files):
            self._load()

    def __call__(self, url: str, limits: UpstreamLimits | None = None) -> UpstreamPool:
        if not url.startswith("https://"):
            return UpstreamPool(url, limits or UpstreamLimits())
        check = functools.partial(self._check, url) if self._knows_identities else None
        return UpstreamPool(url, limits or UpstreamLimits(), tls=self.context, check_peer=check)

    def context(self) -> ssl.SSLContext:
        """Of new connections. Raises ConfigError where there is none yet and none can be made."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            self._watched.poll()
        if self._context is None:
            self._load()
        assert self._context is not None
        return self._context

    def _load(self) -> None:
        context = worker_context(*self._files)
        if self._knows_identities:
            ca_file, cert_file, key_file = self._files
            self._cluster = IdentityFiles(cert_file, key_file, ca_file, SETTINGS).load().identity.cluster
            context.check_hostname = False
        self._context = context

    def _check(self, url: str, tls: ssl.SSLObject) -> None:
        """Raises SSLCertVerificationError."""
        shown: Any = tls.getpeercert() or {}
        try:
            identity = identity_among(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
        except InvalidArgumentError as error:
            raise ssl.SSLCertVerificationError(f"the worker's certificate: {error}") from None
        if identity.cluster != self._cluster or not SERVES.get(identity.role):
            raise ssl.SSLCertVerificationError(f"{identity} is no worker of cluster {self._cluster}")
        agents = self.agents_at(url)
        if agents and not any(map(identity.speaks_for, agents)):
            raise ssl.SSLCertVerificationError(f"{identity} answers in place of {', '.join(sorted(agents)):.200}")
