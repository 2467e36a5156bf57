"""Agents for the tests of the NIXL connector, closed when a test is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config, settings
from tests.support.nixl.agents import MakeAgent


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing of NIXL's that the host of the tests has set, in the environment or in a file."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(settings, "FILE", str(home / "nixl.cfg"))
    for name in [name for name in os.environ if name.startswith("NIXL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    """``make_agent(name, **config)``."""
    agents: list[nixl_agent] = []

    def make(name: str, **config: Any) -> nixl_agent:
        agents.append(nixl_agent(name, nixl_agent_config(**config)))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def pair(make_agent: MakeAgent) -> tuple[nixl_agent, nixl_agent]:
    """An initiator that may ask for telemetry, and a target."""
    return make_agent("initiator", capture_telemetry=True), make_agent("target")
