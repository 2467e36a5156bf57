"""The list of revoked certificates: every text is a list or one error, and a mistake lets nothing back in."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.trust.identity import CertIdentity, CertRole
from kvxfer.trust.revoked import RevokedList, parse
from tests.trust.test_identity import identities

P0 = CertIdentity("default", CertRole.PREFILL, "p0")
P1 = CertIdentity("default", CertRole.PREFILL, "p1")
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
    assert revoked.has(P0, "")
    assert revoked.has(P1, "ab" * 32)
    assert revoked.look()
    assert not revoked.has(P0, "")
    assert revoked.has(P0, "ab" * 32)
    assert not revoked.look()
    assert not RevokedList("").look()


def test_a_file_that_is_written_in_place_lets_nobody_in_for_a_moment(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "revoked"
    path.write_text(f"{P0}\n{P1}\n")
    revoked = RevokedList(str(path))
    for cut in ("", f"{P0}\n", "nonsense", "", f"{P1}\n# {P0}", f"{P0}\n{P1}\n"):
        path.write_text(cut)
        assert not revoked.look()
        assert revoked.has(P0, "")
        assert revoked.has(P1, "")
    path.write_text(f"{P1}\n")
    assert [revoked.look() for _ in range(3)] == [False, True, False]
    assert not revoked.has(P0, "")
    assert revoked.has(P1, "")


CONTENTS = st.one_of(st.just(None), st.sets(st.sampled_from("abcd")).map(frozenset))
"""A look finds a file that is wrong, or these entries."""


@given(st.sets(st.sampled_from("abcd")).map(frozenset), st.lists(CONTENTS, max_size=12))
def test_an_entry_counts_from_the_first_look_on_and_until_the_second_without_it(
    first: frozenset[str], looks: list[frozenset[str] | None]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "revoked"

        def write(letters: frozenset[str] | None) -> None:
            lines = ["nonsense"] if letters is None else [letter * 64 for letter in sorted(letters)]
            path.write_text("\n".join(lines))

        write(first)
        revoked = RevokedList(str(path))
        last: frozenset[str] | None = first
        for found in looks:
            before = {letter for letter in "abcd" if revoked.has(P0, letter * 64)}
            write(found)
            is_changed = revoked.look()
            counted = {letter for letter in "abcd" if revoked.has(P0, letter * 64)}
            expected = before if found is None else found if found == last else before | found
            assert counted == expected
            assert is_changed == (counted != before)
            last = found


@pytest.mark.parametrize("content", ["p0", "kvxfer://default/prefill/", "ab" * 31])
def test_a_wrong_file_at_the_start_is_named(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "revoked"
    path.write_text(f"# one\n{content}\n")
    with pytest.raises(ConfigError, match=rf"revoked_file: {path}: line 2 is no identity and no fingerprint"):
        RevokedList(str(path))
