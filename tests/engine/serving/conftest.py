"""The fake agents of a test, on its loop."""

from __future__ import annotations

import pytest

from tests.support.engine.fake_agent import World


@pytest.fixture
async def world() -> World:
    return World()
