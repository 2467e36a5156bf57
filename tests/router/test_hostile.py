"""Hostile clients and engines, and careless operators: what they can not do to a router."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.router.keyfile import read_key_file


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_of_keys_that_others_may_read_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-this-is-a-secret")
    path.chmod(mode)
    assert len(read_key_file(str(path))) == 1
    assert ("may be read by others" in caplog.text) is warns
