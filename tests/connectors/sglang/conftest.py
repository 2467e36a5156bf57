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


@pytest.fixture
def p(ranks: tuple[Rank, Rank]) -> Rank:
    """The source of :func:`ranks`."""
    return ranks[0]


@pytest.fixture
def d(ranks: tuple[Rank, Rank]) -> Rank:
    """The reader of :func:`ranks`."""
    return ranks[1]
