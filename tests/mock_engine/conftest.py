"""Processes of mock engines that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mock_engine.mocks import Engine, Mocks, mocks


@pytest.fixture(scope="module")
def fast() -> Iterator[Engine]:
    """One engine whose tokens come all at once."""
    with mocks("--itl-ms", "0") as started:
        yield started.engines[0]


@pytest.fixture(scope="module")
def pair_process() -> Iterator[Mocks]:
    flags = ("--count", "2", "--roles", "prefill,decode", "--itl-ms", "0", "--kv-lease-s", "0.3", "--kv-wait-s", "2")
    with mocks(*flags) as started:
        yield started
