"""The development CA: what it writes, what it refuses, and what the command says of it."""

from __future__ import annotations

import datetime
import pathlib
import stat
import subprocess
import sys

import pytest

from kvxfer.cli import main
from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.trust import authority
from kvxfer.trust.files import IdentityFiles
from kvxfer.trust.identity import CertIdentity, CertRole

pytest.importorskip("cryptography")

NOW = datetime.datetime.now(datetime.UTC)
P0 = CertIdentity("default", CertRole.PREFILL, "p0")


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> pathlib.Path:
    authority.init(tmp_path, "default", days=30, now=NOW)
    return tmp_path


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_for_their_owner_alone_and_nothing_is_overwritten(ca: pathlib.Path) -> None:
    issued = authority.issue(ca, P0, hosts=["h"], days=1, now=NOW)
    assert [mode(path) for path in (ca / "ca.key", issued.key_file)] == [0o600, 0o600]
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        authority.init(ca, "other", days=1, now=NOW)
    with pytest.raises(ConfigError, match=r"prefill-p0\.pem is there already"):
        authority.issue(ca, P0, hosts=[], days=1, now=NOW)
    issued.cert_file.unlink()
    with pytest.raises(ConfigError, match=r"prefill-p0\.key is there already"):
        authority.issue(ca, P0, hosts=[], days=1, now=NOW)
    assert not issued.cert_file.exists()


def test_a_certificate_says_who_where_and_until_when(ca: pathlib.Path) -> None:
    issued = authority.issue(ca, P0, hosts=["a.example", "10.0.0.1", "[::1]", "a.example"], days=9, now=NOW)
    shown = authority.show(issued.cert_file)
    assert shown.identity == P0
    assert shown.hosts == ("a.example", "10.0.0.1", "::1")
    assert (shown.ends - NOW).days == 8 or shown.ends - NOW == datetime.timedelta(days=9)
    assert not shown.is_near_end(NOW)
    assert shown.is_near_end(NOW + datetime.timedelta(days=7))
    assert authority.show(ca / "ca.pem").is_ca
    keyed = IdentityFiles(str(issued.cert_file), str(issued.key_file), str(ca / "ca.pem"), ("c", "a")).load()
    assert keyed.identity == P0
    assert keyed.authorities == {authority.show(ca / "ca.pem").fingerprint}


@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_openssl_believes_it_strictly(ca: pathlib.Path, purpose: str) -> None:
    issued = authority.issue(ca, P0, hosts=["a.example"], days=9, now=NOW)
    command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(ca / "ca.pem")]
    done = subprocess.run([*command, str(issued.cert_file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{issued.cert_file}: OK\n"), done.stderr


def test_only_coordinators_have_the_name_by_which_callers_know_them(ca: pathlib.Path) -> None:
    identity = CertIdentity("default", CertRole.COORDINATOR, "c0")
    assert (
        identity.coordinator_host
        in authority.show(authority.issue(ca, identity, hosts=[], days=1, now=NOW).cert_file).hosts
    )
    for host in (identity.coordinator_host, "x.KVXFER.internal"):
        with pytest.raises(InvalidArgumentError, match="by which coordinators are known"):
            authority.issue(ca, P0, hosts=[host], days=1, now=NOW)


@pytest.mark.parametrize("host", ["", "a b", "a..b", "-a", "http://a", "a:1"])
def test_a_host_that_is_none_is_refused(ca: pathlib.Path, host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a host is an address or a DNS name"):
        authority.issue(ca, P0, hosts=[host], days=1, now=NOW)


def test_the_command_makes_a_ca_issues_and_shows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "certs")
    assert main(["certs", "init", "--dir", place, "--cluster", "blue"]) == 0
    assert main(["certs", "issue", "router", "r0", "--dir", place, "--host", "r.example", "--days", "2"]) == 0
    said = capsys.readouterr().out
    assert f"{place}/ca.pem" in said
    assert f"{place}/router-r0.key: kvxfer://blue/router/r0, 2 days" in said
    assert main(["certs", "show", f"{place}/router-r0.pem", f"{place}/ca.pem"]) == 0
    said = capsys.readouterr().out
    for words in ("CN=router r0", "kvxfer://blue/router/r0", "r.example", "UTC (2.0 days left)", "a CA", "fingerprint"):
        assert words in said


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["issue", "router", "r0"], 1, "certs/ca.pem: No such file or directory; `kvxfer certs init` makes one"),
        (["issue", "router", "r.0"], 2, "a name in a certificate"),
        (["init", "--cluster", "UP"], 2, "a cluster's name"),
        (["init", "--days", "0"], 2, "days must be above 0"),
        (["show", "absent.pem"], 2, "cannot use absent.pem: No such file"),
        (["show", __file__], 2, "holds no certificate in PEM form"),
        (["init", "--dir", "/proc/none"], 2, "cannot write /proc/none"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    words: list[str],
    code: int,
    sentence: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "issue" and code == 2:
        assert main(["certs", "init"]) == 0
    assert main(["certs", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("kvxfer: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_without_the_package_the_command_says_what_brings_it(tmp_path: pathlib.Path) -> None:
    code = "import sys; sys.modules['cryptography'] = None; from kvxfer.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "certs", "init", "--dir", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "kvxfer: cryptography is not installed; pip install 'kvxfer[certs]' brings it\n"
