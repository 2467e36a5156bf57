"""Ten thousand pieces of registered memory and as many pools at one agent: each costs a little memory, and all of it is
back when they are deregistered."""

from __future__ import annotations

import os
import pathlib
import time

import numpy as np
import pytest

from kvxfer import Agent
from tests.support.agents import RECORD, info

PIECE = 4096
KIB_EACH_MAX = 8
SECONDS_EACH_MAX = 0.01
"""A bound for a busy machine: what grows with the square of the count passes it far."""
COUNTS = [pytest.param(1_000, id="1000"), pytest.param(10_000, id="10000", marks=pytest.mark.nightly)]


def resident_kib() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.parametrize("count", COUNTS)
async def test_memory_and_pools(count: int) -> None:
    memory = np.zeros((count, PIECE), np.uint8)
    memory[:] = 7
    async with Agent(info("a")) as agent:
        before_kib, begun_s = resident_kib(), time.monotonic()
        registrations = [agent.register(piece) for piece in memory]
        assert len(agent.memory()) == count
        rows = np.array([[int(piece.ctypes.data), PIECE, 0] for piece in memory], dtype=np.uint64)
        assert agent.prepare(rows) is not None
        for registration in registrations:
            agent.deregister(registration)
        assert agent.memory() == ()
        pools = [agent.register_pool(RECORD, piece, block_count=1, is_published=False) for piece in memory]
        assert len(agent.pools) == count
        for pool in pools:
            agent.remove_pool(pool)
        assert agent.pools == ()
        assert time.monotonic() - begun_s < 4 * count * SECONDS_EACH_MAX
        assert resident_kib() - before_kib < count * KIB_EACH_MAX
        again = agent.register(memory)
        agent.deregister(again)
