"""Certificates that a test makes for itself, with the openssl command."""

from __future__ import annotations

import dataclasses
import pathlib
import ssl
import subprocess

CONFIG = """
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
subjectAltName = DNS:localhost,IP:127.0.0.1
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclasses.dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files."""

    cert: str
    key: str


class Authority:
    """A CA in a directory; ``name`` tells several apart."""

    def __init__(self, directory: pathlib.Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self._config = directory / f"{name}.cnf"
        self._config.write_text(CONFIG)
        made = self._make(name, "ca")
        self.cert = made.cert
        self._key = made.key

    def issue(self, name: str) -> Identity:
        """A certificate for ``localhost`` and ``127.0.0.1`` with the common name ``name``, for servers and clients."""
        return self._make(f"{self._name}-{name}", "leaf", "-CA", self.cert, "-CAkey", self._key)

    def client_context(self, identity: Identity | None = None) -> ssl.SSLContext:
        """Of a client that believes this CA alone, and shows ``identity``."""
        context = ssl.create_default_context(cafile=self.cert)
        if identity is not None:
            context.load_cert_chain(identity.cert, identity.key)
        return context

    def _make(self, name: str, kind: str, *more: str) -> Identity:
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        command = ["openssl", "req", "-x509", "-config", str(self._config), "-extensions", kind, "-days", "2"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"]
        command += ["-keyout", str(key), "-out", str(cert), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Identity(str(cert), str(key))


def common_name(certificate: dict[str, object]) -> str:
    """The subject's, of what ``getpeercert`` gives."""
    subject: tuple[tuple[tuple[str, str], ...], ...] = certificate["subject"]  # type: ignore[assignment]
    return next(value for part in subject for name, value in part if name == "commonName")
