"""Cores in this process, closed when a test is over."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.native.cuda_driver import Driver, build
from tests.support.native.nodes import Node, Nodes


@pytest.fixture
def nodes(private_directories: pathlib.Path) -> Iterator[Nodes]:
    directory = private_directories / "sockets"
    directory.mkdir(mode=0o700, exist_ok=True)
    made = Nodes(directory, [])
    yield made
    for node in made.made:
        node.core.close()
        node.take()


_ids = itertools.count(1)


@pytest.fixture
def new_id() -> Callable[[], bytes]:
    return lambda: next(_ids).to_bytes(4, "big") + os.urandom(12)


@pytest.fixture
def joined(nodes: Nodes) -> tuple[Node, Node]:
    """As :meth:`Nodes.pair` makes them."""
    return nodes.pair()


@pytest.fixture
def p(joined: tuple[Node, Node]) -> Node:
    return joined[0]


@pytest.fixture
def d(joined: tuple[Node, Node]) -> Node:
    return joined[1]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """One of the whole run: a process loads one driver, the first that it asks for."""
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    build(path)
    return Driver(path)


@pytest.fixture
def driver(loaded: Driver, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", str(loaded.path))
    loaded.set()
    loaded.capture(False)
    yield loaded
    loaded.set()  # a core that closes waits for its copies
    loaded.capture(False)
    for node in nodes.made:
        node.core.close()
    assert loaded.count("violations") == 0
    assert loaded.count("pinned") == 0
