"""A fixture that is each kind of store in turn, and three etcd nodes for all tests here."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.support.etcd import EtcdNodes, etcd_nodes, needs_etcd
from tests.support.stores import StoreKind, etcd_kind, memory_kind, sqlite_kind


@pytest.fixture(scope="package")
def standing_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as nodes:
        yield nodes


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=needs_etcd)])
def kind(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StoreKind:
    if request.param == "memory":
        return memory_kind()
    if request.param == "sqlite":
        return sqlite_kind(tmp_path / "store.db")
    nodes = request.getfixturevalue("standing_etcd")
    nodes.empty()
    return etcd_kind(nodes)
