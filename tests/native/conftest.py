"""Cores in this process, closed when a test is over."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

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
