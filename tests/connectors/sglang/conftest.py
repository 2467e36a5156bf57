"""Fixtures of several files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.support.sglang_core.cores import Rank, pair


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> Iterator[tuple[Rank, Rank]]:
    with pair(tmp_path) as made:
        yield made
