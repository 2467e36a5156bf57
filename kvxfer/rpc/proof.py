"""How a client of the coordinator proves which process it is: a certificate, else the cluster token. Decides which of
the two is read; must never know what the coordinator makes of it."""

from __future__ import annotations

from kvxfer.rpc.token import member_token
from kvxfer.trust.files import FollowedFiles, IdentityFiles

SETTINGS = ("coordinator_cert_file", "coordinator_ca_file")


def coordinator_tls(ca_file: str, cert_file: str, key_file: str = "") -> FollowedFiles | None:
    """The certificate to show, followed as its files change; None where no file is named. Raises ConfigError."""
    if not cert_file:
        return None
    return FollowedFiles(IdentityFiles(cert_file, key_file, ca_file, SETTINGS))


def token_beside(cert_file: str, token_file: str) -> bytes:
    """The cluster token, as :func:`member_token`; empty where a certificate takes its place. Raises ConfigError."""
    return b"" if cert_file else member_token(token_file)
