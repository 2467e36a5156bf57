"""Certificate, key and CAs of one process, from files that are read again when they change.

Decides whether files fit together: the certificate is believed by the CAs beside it, is in its time, belongs to the
key, and names one identity. It must never know which connection they are for.

The identity is read by a TLS handshake of the process with itself, in memory. So OpenSSL judges the chain as it would
for a peer, and no code of ours parses a certificate.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import ssl
import threading
from typing import Any

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.trust.identity import CertIdentity, identity_among

log = logging.getLogger("kvxfer.trust")

FILE_BYTES_MAX = 1 << 20
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Keyed:
    """What the files say, at one moment. ``authorities``: fingerprints of the CAs, ``ends_s``: Unix seconds."""

    identity: CertIdentity
    ends_s: float
    cert: bytes = dataclasses.field(repr=False)
    key: bytes = dataclasses.field(repr=False)
    ca: bytes = dataclasses.field(repr=False)
    authorities: frozenset[str]


@dataclasses.dataclass(frozen=True)
class IdentityFiles:
    """PEM files. An empty ``key_file``: the certificate's file has the key. ``settings`` are the names, in errors, of
    the settings that name the certificate and the CAs."""

    cert_file: str
    key_file: str
    ca_file: str
    settings: tuple[str, str]
    is_server: bool = False

    def contents(self) -> tuple[bytes, bytes, bytes]:
        """The bytes of certificate, key and CAs. Raises ConfigError for a file that cannot be read."""
        cert_setting, ca_setting = self.settings
        return (
            read_file(cert_setting, self.cert_file),
            read_file(cert_setting, self.key_file or self.cert_file),
            read_file(ca_setting, self.ca_file),
        )

    def load(self) -> Keyed:
        """Raises ConfigError that names the setting and the file."""
        cert, key, ca = self.contents()
        found = self._shown_to_itself()
        if self.contents() != (cert, key, ca):
            raise ConfigError(f"{self.settings[0]}: {self.cert_file} changes while it is read")
        try:
            identity = identity_among(value for kind, value in found["subjectAltName"] if kind == "URI")
        except (InvalidArgumentError, KeyError) as error:
            why = error if isinstance(error, InvalidArgumentError) else "it has no alternative names"
            raise ConfigError(f"{self.settings[0]}: {self.cert_file} is no certificate of a cluster: {why}") from None
        ends_s = float(ssl.cert_time_to_seconds(found["notAfter"]))
        return Keyed(identity, ends_s, cert, key, ca, frozenset(map(fingerprint, _PEM.findall(ca))))

    def _shown_to_itself(self) -> dict[str, Any]:
        """What a peer that believes the CAs sees of the certificate."""
        cert_setting, ca_setting = self.settings
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        judge = client if self.is_server else server
        other = server if self.is_server else client
        load_identity(server, cert_setting, self.cert_file, self.key_file)
        if not self.is_server:
            load_identity(client, cert_setting, self.cert_file, self.key_file)
            other.verify_mode = ssl.CERT_NONE
        load_authorities(judge, ca_setting, self.ca_file)
        judge.verify_mode = ssl.CERT_REQUIRED
        try:
            return _handshake(server, client, is_seen_by_client=self.is_server)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{cert_setting}: with {ca_setting} {self.ca_file} no peer believes {self.cert_file}: "
                f"{error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(f"{cert_setting}: cannot use {self.cert_file}: {_reason(error)}") from None


class FollowedFiles:
    """The newest files that fit together, and are of the same identity as the first ones. From any thread."""

    def __init__(self, files: IdentityFiles) -> None:
        """Raises ConfigError for files that are wrong now; files that are wrong later change nothing."""
        self.files = files
        self._lock = threading.Lock()
        self._seen: tuple[bytes, bytes, bytes] | str = ""
        self._newest = files.load()
        self._seen = self._newest.cert, self._newest.key, self._newest.ca
        self._believed = self._newest.authorities

    @property
    def newest(self) -> Keyed:
        """What was read last, without a look at the files."""
        return self._newest

    def look(self) -> Keyed:
        """Read the files again if they changed. Those that are wrong get one warning for each of their states."""
        with self._lock:
            try:
                contents: tuple[bytes, bytes, bytes] | str = self.files.contents()
            except ConfigError as error:
                contents = str(error)
            if contents == self._seen:
                return self._newest
            self._seen = contents
            try:
                found = self.files.load()
                if found.identity != self._newest.identity:
                    raise ConfigError(f"{self.files.cert_file} is of {found.identity}, not of {self._newest.identity}")
                self._newest = found
                self._believed |= found.authorities
                log.info("certificate and CAs were read again", extra={"paths": self._paths()})
            except ConfigError as error:
                log.warning("certificate and CAs are not taken, the last ones stay: %s", error)
            return self._newest

    @property
    def dropped(self) -> frozenset[str]:
        """Fingerprints of CAs that were believed at some time since :meth:`forget`, and are not now."""
        with self._lock:
            return self._believed - self._newest.authorities

    def forget(self) -> None:
        """No connection is left from before now."""
        with self._lock:
            self._believed = self._newest.authorities

    def _paths(self) -> str:
        return ", ".join(path for path in (self.files.cert_file, self.files.key_file, self.files.ca_file) if path)

    def __repr__(self) -> str:
        return f"<FollowedFiles of {self._newest.identity}>"


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, in hex. Raises ValueError for bytes that are none."""
    return der_fingerprint(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))


def der_fingerprint(der: bytes) -> str:
    """As :func:`fingerprint`, of a certificate as TLS carries it."""
    return hashlib.sha256(der).hexdigest()


def read_file(setting: str, path: str) -> bytes:
    """Its bytes. Raises ConfigError that names setting and file."""
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot use {path}: {_reason(error)}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{setting}: {path} is longer than {FILE_BYTES_MAX} bytes")
    return content


def load_identity(context: ssl.SSLContext, setting: str, cert_file: str, key_file: str) -> None:
    """Present a certificate. Raises ConfigError that names the setting and the files."""

    def no_password() -> str:
        raise ConfigError(f"{setting}: the key of {key_file or cert_file} has a password, and none can be given")

    try:
        context.load_cert_chain(cert_file, key_file or None, password=no_password)
    except (OSError, ValueError) as error:
        files = " and ".join(dict.fromkeys(path for path in (cert_file, key_file) if path))
        raise ConfigError(f"{setting}: cannot use {files}: {_reason(error)}") from None


def load_authorities(context: ssl.SSLContext, setting: str, ca_file: str) -> None:
    """Believe the certificates that these sign. Raises ConfigError that names the setting and the file."""
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot use {ca_file}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return "no certificate in PEM form, or no key that belongs to it, is there" if "pem lib" in reason else reason
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, *, is_seen_by_client: bool) -> dict[str, Any]:
    """The certificate that one side saw of the other; raises what the handshake raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(sides)
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
    return dict(sides[0 if is_seen_by_client else 1].getpeercert() or {})
