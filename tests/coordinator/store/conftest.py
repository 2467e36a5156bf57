"""A fixture that is each kind of store in turn."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.stores import StoreKind, memory_kind, sqlite_kind


@pytest.fixture(params=["memory", "sqlite"])
def kind(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StoreKind:
    return memory_kind() if request.param == "memory" else sqlite_kind(tmp_path / "store.db")
