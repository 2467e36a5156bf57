"""How the router speaks TLS to engines: which certificates it believes, and which one it shows.

Decides nothing about a connection; it must never know which engine is reached.
"""

from __future__ import annotations

import ssl
import time

from kvxfer.errors import ConfigError
from kvxfer.router.upstream.limits import UpstreamLimits
from kvxfer.router.upstream.pool import UpstreamPool
from kvxfer.serving.watching import WatchedFiles
from kvxfer.trust.files import load_authorities, load_identity

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

    def __init__(self, ca_file: str = "", cert_file: str = "", key_file: str = "") -> None:
        self._files = (ca_file, cert_file, key_file)
        self._watched = WatchedFiles(self._files, self._load, what="certificates for workers")
        self._looked_s = time.monotonic()
        self._context: ssl.SSLContext | None = None
        if any(self._files):
            self._load()

    def __call__(self, url: str, limits: UpstreamLimits | None = None) -> UpstreamPool:
        return UpstreamPool(url, limits or UpstreamLimits(), tls=self.context if url.startswith("https://") else None)

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
        self._context = worker_context(*self._files)
