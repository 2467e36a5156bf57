"""A coordinator for each test."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator

import pytest

from tests.support.coordinator import Cluster, running


@pytest.fixture
async def cluster(tmp_path: pathlib.Path) -> AsyncIterator[Cluster]:
    async with running(tmp_path) as started:
        yield started
