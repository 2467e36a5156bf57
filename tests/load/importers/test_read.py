"""Which file of a directory is read, and what is said where none is."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.errors import ConfigError
from kvxfer.load.importers.read import read_results


def test_a_result_of_our_own_is_for_the_report(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="use kvxfer load report"):
        read_results(tmp_path)
