"""The token file: made once, private, whole, and refused when it is not."""

from __future__ import annotations

import concurrent.futures
import pathlib
import stat

import pytest

from kvxfer.errors import ConfigError
from kvxfer.rpc import default_token_path, load_or_create_token, load_token, member_token


def test_a_missing_token_is_made_private_and_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state" / "kvxfer" / "cluster-token"
    token = load_or_create_token(path)
    assert len(bytes.fromhex(token.decode())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_token(path) == load_token(path) == token
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster-token"]


def test_many_makers_at_once_agree(tmp_path: pathlib.Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: load_or_create_token(tmp_path / "token"), range(64)))
    assert len(tokens) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    path = tmp_path / "token"
    load_or_create_token(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"may be read by others \(mode 0{mode:o}\); chmod 600 it"):
        load_or_create_token(path)


@pytest.mark.parametrize("text", [b"", b"short", b"with a space in the middle", b"\xff" * 32, b"x" * 5000])
def test_load_token_of_a_wrong_file_is_refused(tmp_path: pathlib.Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="must hold 16 to 4096 printable characters"):
        load_token(path)


def test_white_space_around_a_token_does_not_count(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"  abcdefghijklmnop\r\n")
    path.chmod(0o600)
    assert load_token(path) == b"abcdefghijklmnop"


def test_files_that_cannot_be_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_token(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        load_or_create_token(tmp_path / "file" / "token")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_or_create_token(tmp_path)


def test_where_the_token_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("KVXFER_TOKEN_FILE", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_token_path() == tmp_path / ".local/state/kvxfer/cluster-token"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    assert default_token_path() == tmp_path / "s/kvxfer/cluster-token"
    monkeypatch.setenv("KVXFER_TOKEN_FILE", "/run/secrets/kvxfer")
    assert default_token_path() == pathlib.Path("/run/secrets/kvxfer")


def test_a_named_file_is_only_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "mistyped" / "token"
    with pytest.raises(ConfigError, match="mistyped"):
        member_token(str(named))
    assert not named.parent.exists()
    monkeypatch.setenv("KVXFER_TOKEN_FILE", str(tmp_path / "default"))
    assert member_token("") == load_token(tmp_path / "default")
