"""When a worker says that it is live, and when that it is ready."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from kvxfer.engine import worker as worker_module
from kvxfer.engine.readiness import Readiness
from kvxfer.errors import KvxferError
from kvxfer.types import Role
from tests.support.engine.engine_harness import make_prompt
from tests.support.engine.fake_agent import FakeAgent, World
from tests.support.engine.worker_harness import body, serving


async def probe(client):
    """(live, health, ready) as statuses, and why it is not ready."""
    answers = [await client.get(path) for path in ("/live", "/health", "/ready")]
    assert answers[0].json() == answers[1].json()
    return (*(answer.status_code for answer in answers), answers[2].json().get("reason"))


@pytest.fixture
def agents(monkeypatch):
    """The agents of workers that are started, by name, which find their worker's HTTP address in ``url``."""
    made = {}

    class Agent(FakeAgent):
        seen = None

        async def __aenter__(self):
            async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30) as client:
                self.seen = await probe(client)
            return await super().__aenter__()

    def make(options, info, registry):
        made[info.agent_id] = agent = Agent(made.setdefault("", World()), info.agent_id)
        agent.url = info.http_url
        return agent

    monkeypatch.setattr(worker_module, "_make_agent", make)
    return made


async def test_a_worker_is_not_ready_before_it_is_registered_nor_once_it_is_told_to_drain(tiny_path, agents):
    async with serving(tiny_path, role=Role.DECODE, agent_id="d", coordinator="fake:1") as running:
        assert agents["d"].seen == (200, 200, 503, "starting")
        assert await probe(running.client) == (200, 200, 200, None)
        agents["d"].is_draining = True  # the coordinator's order
        assert await probe(running.client) == (200, 200, 503, "draining")
        assert (await running.client.get("/ready")).headers["retry-after"] == "1"


async def test_a_stopping_worker_is_live_and_not_ready(tiny_path):
    async with serving(tiny_path, shutdown_grace_s=30.0) as running:
        content = body(make_prompt(50), max_tokens=1400, stream=True)
        async with running.client.stream("POST", "/v1/completions", json=content) as stream:
            await anext(stream.aiter_bytes())
            running.stop.set()
            async with asyncio.timeout(20.0):
                while (found := await probe(running.client))[2] == 200:
                    pass
            assert found == (200, 200, 503, "draining")


def test_a_worker_whose_engine_failed_is_neither_live_nor_ready():
    engine = SimpleNamespace(failure=None, is_accepting=True)
    readiness = Readiness(engine, None)
    assert (readiness.is_live, readiness.reason) == (True, "starting")
    readiness.registered()
    assert (readiness.is_live, readiness.reason) == (True, None)
    engine.failure = KvxferError("the step broke")
    assert (readiness.is_live, readiness.reason) == (False, "failed")
