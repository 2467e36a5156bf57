"""A development CA: made once, in a directory, and certificates that it signs. Needs ``cryptography``.

Decides what such a certificate says and where its files lie; it must never overwrite one. A cluster that has a CA of
its own (cert-manager, Vault) does not need this: docs/security.md says what a certificate must say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.trust.files import fingerprint, read_file
from kvxfer.trust.identity import CertIdentity, CertRole, check_cluster, identity_among

CA_CERT, CA_KEY = "ca.pem", "ca.key"
DAYS_MAX = 3650
NEAR_SHARE, NEAR_DAYS = 1 / 3, 30.0
"""A certificate is near its end in the last third of its time, and at most so many days before it."""
BEFORE = datetime.timedelta(minutes=5)
"""How long ago a new certificate began: clocks of other hosts may be late."""
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Issued:
    """Files that were written."""

    cert_file: pathlib.Path
    key_file: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Shown:
    """What one certificate says. ``identity`` is None of a CA, and of a certificate of no cluster."""

    subject: str
    identity: CertIdentity | None
    is_ca: bool
    hosts: tuple[str, ...]
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str

    def is_near_end(self, now: datetime.datetime) -> bool:
        whole = self.ends - self.begins
        return self.ends - now < min(whole * NEAR_SHARE, datetime.timedelta(days=NEAR_DAYS))


def init(directory: pathlib.Path, cluster: str, *, days: float, now: datetime.datetime) -> Issued:
    """Make the CA of ``cluster``. Raises ConfigError where there is one already, or the files cannot be written."""
    from cryptography import x509

    check_cluster(cluster)
    key, name = _new_key(), _name(f"kvxfer {cluster} CA")
    builder = _builder(name, name, key, days, now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(is_ca=True), critical=True)
    certificate = builder.sign(key, _sha256())
    return _write(directory, CA_CERT, CA_KEY, _pem(certificate), key)


def issue(
    directory: pathlib.Path,
    identity: CertIdentity,
    *,
    hosts: Iterable[str],
    days: float,
    now: datetime.datetime,
    out: pathlib.Path | None = None,
) -> Issued:
    """Sign a certificate for ``identity`` with the CA in ``directory``; the files are written to ``out`` (empty:
    beside the CA) as ``ROLE-NAME.pem`` and ``.key``.

    ``hosts`` are the names and addresses by which others reach the holder. Raises ConfigError where there is no CA,
    the files are there already, or cannot be written; InvalidArgumentError for a host that is none.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca, ca_key = _load_ca(directory)
    key, names = _new_key(), _alternative_names(identity, hosts)
    builder = _builder(_name(f"{identity.role} {identity.name}"[:64]), ca.subject, key, days, now)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for extension, is_critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(is_ca=False), True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=is_critical)
    certificate = builder.sign(ca_key, _sha256())
    stem = f"{identity.role}-{identity.name}"
    return _write(out or directory, f"{stem}.pem", f"{stem}.key", _pem(certificate), key)


def show(path: str | os.PathLike[str]) -> Shown:
    """What the first certificate of a file says. Raises ConfigError for a file without one."""
    from cryptography import x509

    pem = read_file("certificate", os.fspath(path))
    try:
        certificate = x509.load_pem_x509_certificates(pem)[0]
    except ValueError:
        raise ConfigError(f"{os.fspath(path)} holds no certificate in PEM form") from None
    uris, hosts, is_ca = [], [], False
    with contextlib.suppress(x509.ExtensionNotFound):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = list(names.get_values_for_type(x509.UniformResourceIdentifier))
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    with contextlib.suppress(x509.ExtensionNotFound):
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    identity = None
    with contextlib.suppress(InvalidArgumentError):
        identity = identity_among(uris)
    return Shown(
        certificate.subject.rfc4514_string(),
        identity,
        is_ca,
        tuple(hosts),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        fingerprint(_pem(certificate)),
    )


def cluster_of(directory: pathlib.Path) -> str:
    """The cluster whose CA is in ``directory``. Raises ConfigError where there is none."""
    _load_ca(directory)
    found = re.fullmatch(r"CN=kvxfer (\S+) CA", show(directory / CA_CERT).subject)
    if found is None:
        raise ConfigError(f"{directory / CA_CERT} is no CA that `kvxfer certs init` made")
    return found[1]


def _alternative_names(identity: CertIdentity, hosts: Iterable[str]) -> list[Any]:
    from cryptography import x509

    names: list[Any] = [x509.UniformResourceIdentifier(str(identity))]
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host.strip("[]"))))
        except ValueError:
            if _HOST.fullmatch(host) is None or ".." in host:
                raise InvalidArgumentError(f"a host is an address or a DNS name, not {host!r:.100}") from None
            if host.lower().endswith(".kvxfer.internal"):
                raise InvalidArgumentError(f"{host} is a name by which coordinators are known") from None
            names.append(x509.DNSName(host))
    if identity.role is CertRole.COORDINATOR:
        names.append(x509.DNSName(identity.coordinator_host))
    return names


def _load_ca(directory: pathlib.Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        cert_pem, key_pem = (directory / CA_CERT).read_bytes(), (directory / CA_KEY).read_bytes()
    except OSError as error:
        hint = "; `kvxfer certs init` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the CA: {error.filename}: {error.strerror}{hint}") from None
    try:
        certificate = x509.load_pem_x509_certificate(cert_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):
        raise ConfigError(f"{directory} holds no CA: its {CA_CERT} or {CA_KEY} is not in PEM form") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{directory / CA_KEY} is not the key of {directory / CA_CERT}")
    return certificate, key


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: Any, issuer: Any, key: Any, days: float, now: datetime.datetime) -> Any:
    from cryptography import x509

    if not 0 < days <= DAYS_MAX:
        raise InvalidArgumentError(f"days must be above 0 and at most {DAYS_MAX}, not {days:g}")
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_ca: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _write(directory: pathlib.Path, cert_name: str, key_name: str, cert: bytes, key: Any) -> Issued:
    """Both files or none: the key (0600) first, because a certificate without its key is of no use."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    issued = Issued(directory / cert_name, directory / key_name)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if issued.cert_file.exists():
            raise FileExistsError(None, None, str(issued.cert_file))
        _create(issued.key_file, pem, 0o600)
        try:
            _create(issued.cert_file, cert, 0o644)
        except OSError:
            issued.key_file.unlink()
            raise
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is there already, and nothing is overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or directory}: {error.strerror}") from None
    return issued


def _create(path: pathlib.Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
