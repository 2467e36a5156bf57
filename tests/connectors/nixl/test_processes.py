"""Two agents in two processes: the target's Python does nothing while its memory is read and written; and its death."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.nixl import (
    nixl_agent,
    nixl_agent_config,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from tests.support import child
from tests.support.nixl.agents import POISON, finish, memory, register, row

LENGTH, BLOCK = 1 << 20, 4096
COUNT = LENGTH // BLOCK
DEATH_S = 20.0
"""A killed peer must be noticed within this; the configured bound is a few seconds."""


class Target:
    def __init__(self) -> None:
        command = child.command("nixl.target_process", "target", str(LENGTH), "7")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child.environment()
        )
        self.said = self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the target ended"
        return json.loads(line)

    def tell(self, order: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.hear()

    @property
    def metadata(self) -> bytes:
        return base64.b64decode(self.said["metadata"])

    @property
    def rows(self) -> Any:
        table = np.zeros((COUNT, 3), np.uint64)
        table[:, 0] = self.said["address"] + np.arange(COUNT) * BLOCK
        table[:, 1] = BLOCK
        return table

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def target() -> Iterator[Target]:
    running = Target()
    yield running
    running.end()


@pytest.mark.parametrize("lanes", ["", "stream", "unix,stream"])
def test_read_and_write(target: Target, monkeypatch: pytest.MonkeyPatch, lanes: str) -> None:
    monkeypatch.setenv("KVXFER_LANES", lanes)
    agent = nixl_agent("initiator", nixl_agent_config(capture_telemetry=True))
    try:
        mine, theirs = memory(LENGTH), memory(LENGTH, seed=7)
        register(agent, mine)
        agent.add_remote_agent(target.metadata)
        table = target.rows
        local = agent.prep_xfer_dlist("", [row(mine, i * BLOCK, BLOCK) for i in range(COUNT)], "DRAM")
        remote = agent.prep_xfer_dlist("target", table, "DRAM")
        order = np.random.default_rng(1).permutation(COUNT)
        finish(agent, agent.make_prepped_xfer("READ", local, np.arange(COUNT), remote, order, b"read"))
        assert (mine.reshape(COUNT, BLOCK) == theirs.reshape(COUNT, BLOCK)[order]).all()
        mine[:] = 3
        handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [5], b"written")
        finish(agent, handle)
        lane = agent.get_xfer_telemetry(handle).lane
        assert lane is not None
        assert not lanes or lane.value in lanes.split(",")
        told: list[str] = []
        while len(told) < 2:
            told += target.tell("notifications").get("initiator", [])
            target.said = target.hear()
        assert sorted(told) == ["read", "written"]
        expected = int(theirs.sum()) - int(theirs.reshape(COUNT, BLOCK)[5].sum()) + 3 * BLOCK
        assert target.said["sum"] == expected
    finally:
        agent.close()


def test_memory_that_was_registered_again(target: Target, pair: Any) -> None:
    agent, _ = pair
    mine = memory(LENGTH)
    register(agent, mine)
    agent.add_remote_agent(target.metadata)
    local = agent.prep_xfer_dlist("", [row(mine)], "DRAM")
    stale = agent.prep_xfer_dlist("target", [(target.said["address"], LENGTH, 0)], "DRAM")
    target.said = target.tell("register again")
    with pytest.raises(nixlNotAllowedError):
        finish(agent, agent.make_prepped_xfer("READ", local, [0], stale, [0]))
    assert set(np.unique(mine).tolist()) == {POISON}
    agent.add_remote_agent(target.metadata)
    fresh = agent.prep_xfer_dlist("target", [(target.said["address"], LENGTH, 0)], "DRAM")
    finish(agent, agent.make_prepped_xfer("READ", local, [0], fresh, [0]))
    assert (mine == memory(LENGTH, seed=7)).all()


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_remote_that_was_killed(target: Target, pair: Any, operation: str) -> None:
    agent, _ = pair
    mine = memory(LENGTH)
    register(agent, mine)
    agent.add_remote_agent(target.metadata)
    local = agent.prep_xfer_dlist("", [row(mine)], "DRAM")
    remote = agent.prep_xfer_dlist("target", [(target.said["address"], LENGTH, 0)], "DRAM")
    handle = agent.make_prepped_xfer(operation, local, [0], remote, [0], b"late")
    finish(agent, handle)
    target.end()
    begun_s = time.monotonic()
    with pytest.raises(nixlRemoteDisconnectError):
        finish(agent, handle)
    assert time.monotonic() - begun_s < DEATH_S
    with pytest.raises(nixlRemoteDisconnectError):
        agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    agent.remove_remote_agent("target")
    with pytest.raises(nixlNotFoundError):
        agent.make_prepped_xfer(operation, local, [0], remote, [0])
