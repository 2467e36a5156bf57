"""TLS of a server whose own certificate names it in the cluster, and that asks every client for one.

Decides that changed files count only where they are of the same identity, and that connections of before are then not
kept: the certificate of an open one is not judged again. It must never know what a client may do.
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.errors import ConfigError
from kvxfer.serving.tls import ServerTls, TlsFiles
from kvxfer.serving.watching import POLL_S
from kvxfer.trust.files import IdentityFiles

SETTINGS = ("tls_cert_file", "tls_client_ca_file")


class ClusterTls(ServerTls):
    """As :class:`ServerTls`, of files that name a client CA. Raises ConfigError for files that no client of the cluster
    would believe."""

    keeps_handshakes = False

    def __init__(self, files: TlsFiles, *, poll_s: float = POLL_S) -> None:
        self._named = IdentityFiles(files.cert_file, files.key_file, files.client_ca_file, SETTINGS, is_server=True)
        super().__init__(files, poll_s=poll_s)
        self.identity = self._named.load().identity
        self.on_change: Callable[[], None] = lambda: None
        """Called when new connections speak other TLS than those that are open."""

    def load(self) -> None:
        identity = self._named.load().identity
        if identity != self.identity:
            raise ConfigError(f"{self._named.cert_file} is of {identity}, not of {self.identity}")
        super().load()
        self.on_change()
