"""The list of revoked certificates: every text is a list or one error, and a mistake lets nothing back in."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.trust.revoked import RevokedList, parse
from tests.trust.test_identity import identities

P0 = CertIdentity("default", CertRole.PREFILL, "p0")
PRINTS = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(st.sets(identities), st.sets(PRINTS))
def test_a_list_has_what_its_lines_say(names: set[CertIdentity], prints: set[str]) -> None:
    lines = ["# a remark", "", *(f"  {name}  # why" for name in names), *(text.upper() for text in prints)]
    assert parse("\n".join(lines)) == {*map(str, names), *prints}


@given(st.text())
def test_every_other_text_is_one_error_that_names_the_line(text: str) -> None:
    try:
        parse(text)
    except ConfigError as error:
        assert str(error).startswith("line ")  # noqa: PT017


def test_a_fingerprint_may_have_colons() -> None:
    text = ":".join(["Ab"] * 32)
    assert parse(text) == {"ab" * 32}


def test_what_is_wrong_later_changes_nothing(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "revoked"
    path.write_text(str(P0))
    revoked = RevokedList(str(path))
    assert revoked.has(P0, "")
    for content in (b"nonsense", b"\xff\xfe", None):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert not revoked.look()
        assert not revoked.look()
        assert revoked.has(P0, "")
    assert len(caplog.records) == 3
    path.write_text("ab" * 32)
    assert revoked.look()
    assert not revoked.has(P0, "")
    assert revoked.has(P0, "ab" * 32)
    assert not RevokedList("").look()


@pytest.mark.parametrize("content", ["p0", "kvxfer://default/prefill/", "ab" * 31])
def test_a_wrong_file_at_the_start_is_named(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "revoked"
    path.write_text(f"# one\n{content}\n")
    with pytest.raises(ConfigError, match=rf"revoked_file: {path}: line 2 is no identity and no fingerprint"):
        RevokedList(str(path))
