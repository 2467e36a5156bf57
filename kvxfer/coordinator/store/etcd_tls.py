"""What a connection to etcd believes and shows: CAs, certificate and key, from files that are followed as they change.

Decides whether files can be used. etcd's CA is not that of the cluster (docs/control-plane.md says why), so no identity
is looked for in the certificate. It must never know what is asked of etcd.
"""

from __future__ import annotations

import dataclasses
import logging
import ssl
import time

import grpc

from kvxfer.errors import ConfigError
from kvxfer.trust.files import load_authorities, load_identity, read_file

log = logging.getLogger("kvxfer.coordinator")

LOOK_S = 1.0
"""How often the files are looked at."""

Contents = tuple[bytes, bytes | None, bytes | None]
"""Of the CAs, the key and the certificate."""


@dataclasses.dataclass(frozen=True)
class EtcdFiles:
    """PEM files. An empty ``cert_file``: none is shown; an empty ``key_file``: the certificate's file has the key."""

    ca_file: str
    cert_file: str = ""
    key_file: str = ""

    def contents(self) -> Contents:
        """Raises ConfigError for a file that cannot be read."""
        ca = read_file("store_ca_file", self.ca_file)
        if not self.cert_file:
            return ca, None, None
        key = read_file("store_key_file" if self.key_file else "store_cert_file", self.key_file or self.cert_file)
        return ca, key, read_file("store_cert_file", self.cert_file)

    def load(self) -> Contents:
        """What gRPC would accept in silence, and then never connect with, is refused here. Raises ConfigError that
        names the setting and the file."""
        contents = self.contents()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "store_ca_file", self.ca_file)
        if self.cert_file:
            load_identity(context, "store_cert_file", self.cert_file, self.key_file)
        if self.contents() != contents:
            raise ConfigError(f"store_ca_file: {self.ca_file}, or what goes with it, changes while it is read")
        return contents


class EtcdProof:
    """The newest files that can be used."""

    def __init__(self, files: EtcdFiles) -> None:
        """Raises ConfigError for files that are wrong now; files that are wrong later change nothing."""
        self._files = files
        self._newest = files.load()
        self._seen: Contents | str = self._newest
        self._looked_s = time.monotonic()
        self.number = 0
        """Higher after each change."""

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        ca, key, cert = self._newest
        return grpc.ssl_channel_credentials(ca, key, cert)

    def look(self) -> None:
        """Read the files again if they changed. Those that are wrong get one warning for each of their states."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            contents: Contents | str = self._files.contents()
        except ConfigError as error:
            contents = str(error)
        if contents == self._seen:
            return
        self._seen = contents
        try:
            self._newest = self._files.load()
            self.number += 1
            log.info("the certificate and CAs for the store were read again")
        except ConfigError as error:
            log.warning("the certificate and CAs for the store are not taken, the last ones stay: %s", error)
