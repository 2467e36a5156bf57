"""Where the files of a user lie: which variable counts, and what is said where there is no place."""

from __future__ import annotations

import os
import pathlib
import pwd
import tempfile

import pytest

from kvxfer import places
from kvxfer.errors import ConfigError


def no_user(user_id: int) -> pwd.struct_passwd:
    raise KeyError(f"getpwuid(): uid not found: {user_id}")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)


def test_home_is_the_variable_then_the_passwd_entry_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/here")
    assert places.home() == pathlib.Path("/here")
    for unset in ("", None):
        monkeypatch.delenv("HOME", raising=False) if unset is None else monkeypatch.setenv("HOME", unset)
        assert places.home() == pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    assert places.home() is None


@pytest.mark.usefixtures("homeless")
def test_a_base_directory_without_a_home_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=rf"^there is no place for models: user id {os.getuid()} has no home .*; set A$"
    ):
        places.base_dir("XDG_CACHE_HOME", ".cache", what="models", instead="A")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert places.base_dir("XDG_CACHE_HOME", ".cache", what="models", instead="A") == pathlib.Path("/cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/here")
    assert places.base_dir("XDG_CACHE_HOME", ".cache", what="models", instead="A") == pathlib.Path("/here/.cache")


@pytest.mark.usefixtures("homeless")
def test_a_tilde_without_a_home_is_refused_and_not_taken_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("~", "~/model"):
        with pytest.raises(ConfigError, match=f"^{path}: .* set HOME, or write the whole path$"):
            places.expand(path)
    with pytest.raises(ConfigError, match=r"^~no-such-user/model: there is no such user"):
        places.expand("~no-such-user/model")
    assert places.expand("a/~b") == pathlib.Path("a/~b")
    monkeypatch.setenv("HOME", "/here")
    assert places.expand("~/model") == pathlib.Path("/here/model")


def test_no_temporary_directory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in [...]")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "/tiny")
    with pytest.raises(ConfigError, match=r"^no temporary directory can be written \(/tiny\); set TMPDIR$"):
        places.temporary_dir()


def test_why_nothing_can_be_made_somewhere_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert places.unwritable(tmp_path / "new" / "deep") == ""
    assert places.unwritable(tmp_path / "file" / "below") == f"{tmp_path / 'file'} is no directory"
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert places.unwritable(tmp_path / "new" / "deep") == f"{tmp_path} cannot be written"
