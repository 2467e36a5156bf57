"""Files of one identity: what fits together is taken, also later; what does not is one sentence and changes nothing."""

from __future__ import annotations

import datetime
import logging
import os
import pathlib

import pytest

from kvxfer.errors import ConfigError
from kvxfer.trust import authority
from kvxfer.trust.files import FollowedFiles, IdentityFiles
from kvxfer.trust.identity import CertIdentity, CertRole
from tests.support.certificates import Authority

pytest.importorskip("cryptography")

NOW = datetime.datetime.now(datetime.UTC)
SETTINGS = ("tls_cert_file", "tls_client_ca_file")


def make(directory: pathlib.Path, name: str = "p0", *, days: float = 5, now: datetime.datetime = NOW) -> IdentityFiles:
    """Files of a new CA and a certificate of it."""
    authority.init(directory, "default", days=30, now=now)
    identity = CertIdentity("default", CertRole.PREFILL, name)
    issued = authority.issue(directory, identity, hosts=[], days=days, now=now)
    return IdentityFiles(str(issued.cert_file), str(issued.key_file), str(directory / "ca.pem"), SETTINGS)


@pytest.mark.parametrize("is_server", [True, False])
def test_one_file_may_hold_certificate_and_key(tmp_path: pathlib.Path, is_server: bool) -> None:
    files = make(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(pathlib.Path(files.cert_file).read_bytes() + pathlib.Path(files.key_file).read_bytes())
    keyed = IdentityFiles(str(both), "", files.ca_file, SETTINGS, is_server).load()
    assert str(keyed.identity) == "kvxfer://default/prefill/p0"
    assert abs(keyed.ends_s - (NOW + datetime.timedelta(days=5)).timestamp()) < 2
    assert b"PRIVATE" in keyed.key
    assert "PRIVATE" not in repr(keyed)


@pytest.mark.parametrize("is_server", [True, False])
def test_what_does_not_fit_is_named(tmp_path: pathlib.Path, is_server: bool) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    old = make(tmp_path / "old", now=NOW - datetime.timedelta(days=9))
    foreign = Authority(tmp_path)
    nameless = foreign.issue("x")
    for cert, key, ca, words in (
        (
            one.cert_file,
            two.key_file,
            one.ca_file,
            "tls_cert_file: cannot use .*one/.* and .*two/.*key values mismatch",
        ),
        (one.cert_file, one.key_file, two.ca_file, "tls_client_ca_file .*two/ca.pem no peer believes .*one/prefill-p0"),
        (old.cert_file, old.key_file, old.ca_file, "certificate has expired"),
        (nameless.cert, nameless.key, foreign.cert, "is no certificate of a cluster: .* exactly one"),
        (one.cert_file, one.key_file, "/absent", "tls_client_ca_file: cannot use /absent: No such file"),
        (one.cert_file, one.key_file, one.key_file, "tls_client_ca_file: cannot use"),
        ("/absent", one.key_file, one.ca_file, "tls_cert_file: cannot use /absent: No such file"),
        (one.ca_file, one.key_file, one.ca_file, "tls_cert_file: cannot use"),
    ):
        with pytest.raises(ConfigError, match=words):
            IdentityFiles(cert, key, ca, SETTINGS, is_server).load()


def test_changed_files_are_taken_once_they_fit(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    files, fresh = make(tmp_path / "a"), make(tmp_path / "b")
    followed = FollowedFiles(files)
    first = followed.newest
    assert followed.look() is first
    with caplog.at_level(logging.INFO, "kvxfer.trust"):
        for at, name in enumerate(("cert_file", "key_file", "ca_file")):
            assert followed.look() is first
            os.replace(getattr(fresh, name), getattr(files, name))
            followed.look()
            followed.look()
            assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == min(at + 1, 2)
    second = followed.newest
    assert second.authorities.isdisjoint(first.authorities)
    assert followed.dropped == first.authorities
    followed.forget()
    assert not followed.dropped
    os.unlink(files.ca_file)
    assert followed.look() is second


def test_a_certificate_of_another_name_is_not_taken(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    files, other = make(tmp_path / "a"), make(tmp_path / "b", "p1")
    followed = FollowedFiles(files)
    for name in ("ca_file", "key_file", "cert_file"):
        os.replace(getattr(other, name), getattr(files, name))
    assert str(followed.look().identity) == "kvxfer://default/prefill/p0"
    assert "is of kvxfer://default/prefill/p1, not of kvxfer://default/prefill/p0" in caplog.text
