"""TLS of a server of ours: a context from files, and another one when they change.

Decides what a connection must speak: TLS 1.2 at least, HTTP/1.1 within. Where clients show certificates it is TLS 1.3,
and no session is resumed: a handshake that resumes one does not judge the client's certificate, so a client could come
back again and again after its certificate has ended. It must never know what is served.
"""

from __future__ import annotations

import dataclasses
import ssl

from kvxfer.serving.watching import POLL_S, WatchedFiles
from kvxfer.trust.files import load_authorities, load_identity


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """PEM files. An empty ``key_file``: the certificate's file has the key. Empty ``client_ca_file``: clients need no
    certificate."""

    cert_file: str
    key_file: str = ""
    client_ca_file: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert_file, self.key_file, self.client_ca_file) if path)

    def context(self) -> ssl.SSLContext:
        """A new context. Raises ConfigError that names the file that is wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(["http/1.1"])
        load_identity(context, "tls_cert_file", self.cert_file, self.key_file)
        if self.client_ca_file:
            load_authorities(context, "tls_client_ca_file", self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3  # 1.2 resumes by session id too, and Python cannot say no
            context.num_tickets = 0
        return context


class ServerTls:
    """The context for new connections; connections that are open keep theirs. Raises ConfigError for bad files."""

    keeps_handshakes = True
    """Whether a connection goes on that began under a context of before, and became one under this."""

    def __init__(self, files: TlsFiles, *, poll_s: float = POLL_S) -> None:
        self._files = files
        self.watched = WatchedFiles(files.paths, self.load, what="certificates", poll_s=poll_s)
        """An async context manager: within it changed files are read again."""
        self.context = files.context()

    def load(self) -> None:
        """Read the files again. Raises ConfigError, and then the context stays."""
        self.context = self._files.context()
