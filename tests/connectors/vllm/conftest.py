"""Fixtures of several files."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.connectors.common import file_digests
from tests.support.vllm_connector.pair import Rank, ranks

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where engines listen for arrivals: of this test alone."""
    directory = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory / "kvxfer"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The directory that digests are kept in: of this test alone."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    file_digests.shared_cache.cache_clear()
    return home / "kvxfer" / "digests"


@pytest.fixture
def p(ranks: tuple[Rank, Rank]) -> Rank:
    """The source of :func:`ranks`."""
    return ranks[0]


@pytest.fixture
def d(ranks: tuple[Rank, Rank]) -> Rank:
    """The reader of :func:`ranks`."""
    return ranks[1]
