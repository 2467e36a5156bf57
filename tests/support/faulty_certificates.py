"""Certificates with one thing wrong each, of a CA that is believed or of one that only looks like it."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import pathlib
import ssl
from collections.abc import Callable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclasses.dataclass(frozen=True)
class Signer:
    """What signs: its own certificate and key."""

    certificate: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class Files:
    cert: str
    key: str

    @property
    def fingerprint(self) -> str:
        """As ``kvxfer certs show`` prints it."""
        found = x509.load_pem_x509_certificate(pathlib.Path(self.cert).read_bytes())
        return found.fingerprint(hashes.SHA256()).hex()


def read_ca(directory: pathlib.Path) -> Signer:
    """The CA that ``kvxfer certs init`` made there."""
    return Signer(
        x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes()),
        serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None),
    )


def made(
    signer: Signer | None,
    *uris: str,
    subject: str = "x",
    hosts: tuple[str, ...] = ("127.0.0.1",),
    begins: datetime.timedelta = -DAY,
    ends: datetime.timedelta = DAY,
    usages: tuple[Any, ...] = BOTH,
    is_ca: bool = False,
) -> Signer:
    """A certificate that ``signer`` signs; itself where that is None."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    issuer = name if signer is None else signer.certificate.subject
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    alternative: list[Any] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    for host in hosts:
        try:
            alternative.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            alternative.append(x509.DNSName(host))
    if alternative:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    signing = key if signer is None else signer.key
    return Signer(builder.sign(signing, hashes.SHA256()), key)


def written(directory: pathlib.Path, name: str, one: Signer, *chain: Signer) -> Files:
    """As PEM files, with the certificates that are sent along."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    encoding = serialization.Encoding.PEM
    cert.write_bytes(b"".join(each.certificate.public_bytes(encoding) for each in (one, *chain)))
    key.write_bytes(one.key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return Files(str(cert), str(key))


def not_believed(ca: Signer, uri: str, **more: Any) -> dict[str, Callable[[], tuple[Signer, ...]]]:
    """By what is wrong: a certificate, and what is sent along, that no end believes which knows only ``ca``. Each says
    that it is ``uri``."""

    def lookalike() -> Signer:
        name = ca.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        return made(None, subject=str(name), is_ca=True, hosts=(), usages=())

    def by_leaf() -> tuple[Signer, ...]:
        leaf = made(ca, uri, **more)
        return made(leaf, uri, **more), leaf

    def by_expired_middle() -> tuple[Signer, ...]:
        middle = made(ca, subject="middle", hosts=(), usages=(), is_ca=True, begins=-3 * DAY, ends=-DAY)
        return made(middle, uri, **more), middle

    def by_lookalike() -> tuple[Signer, ...]:
        other = lookalike()
        return made(other, uri, **more), other

    return {
        "self-signed": lambda: (made(None, uri, **more),),
        "of another CA": lambda: (made(made(None, subject="other", is_ca=True), uri, **more),),
        "of a CA of the same name": by_lookalike,
        "signed by a certificate that is no CA": by_leaf,
        "signed by a CA that has ended": by_expired_middle,
        "ended": lambda: (made(ca, uri, begins=-3 * DAY, ends=-DAY, **more),),
        "ended a moment ago": lambda: (made(ca, uri, ends=datetime.timedelta(seconds=-5), **more),),
        "not yet valid": lambda: (made(ca, uri, begins=DAY, ends=2 * DAY, **more),),
    }


def client(ca_file: str, shown: Files | None = None, *, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Of a client that believes ``ca_file``, and speaks that version alone."""
    context = ssl.create_default_context(cafile=ca_file)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context
