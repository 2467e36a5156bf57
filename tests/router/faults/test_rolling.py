"""Every worker restarted, one after the other, under load."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.fake_workers import eventually
from tests.support.mock_engine.mocks import Mocks
from tests.support.routers import Site, check, site

CLIENTS = 16
ENGINE = ("--ttft-ms=2", "--itl-ms=1")


async def drain(there: Site, agent_id: str, on: bool) -> None:
    answer = await there.client.post(f"/workers/{agent_id}/drain", params={"on": str(on).lower()})
    assert answer.status_code == 200, answer.text


async def restart(there: Site, mocks: list[Mocks], index: int, role: str, dialect: str) -> None:
    """Drain, stop, start on the same port, undo."""
    old = mocks[index]
    url = old.engines[0].url
    agent_id = (await there.workers())[url]["agent_id"]
    await drain(there, agent_id, True)

    async def is_idle() -> bool:
        return set((await there.workers())[url]["inflight"].values()) == {0}

    await eventually(is_idle, within_s=20.0)
    await asyncio.to_thread(old.stop)
    kind = {"vllm": "vllm", "vllm-mooncake": "vllm", "sglang": "sglang"}[dialect]
    flags = (f"--ports={old.engines[0].port}", f"--roles={role}", f"--kind={kind}", *ENGINE)
    mocks[index] = await asyncio.to_thread(Mocks, *flags)
    await drain(there, agent_id, False)

    async def is_in() -> bool:
        worker = (await there.workers())[url]
        return worker["state"] != "out" and bool(worker["is_ready"])

    await eventually(is_in, within_s=20.0)


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dialect", ["vllm", "vllm-mooncake", "sglang"])
async def test_a_rolling_restart_of_every_worker_under_load_costs_no_client_an_error(dialect: str, count: int) -> None:
    async with site(2, 2, dialect=dialect, engine_flags=ENGINE) as there:
        done = 0
        failures: list[str] = []
        is_over = asyncio.Event()

        async def load(number: int) -> None:
            nonlocal done
            limits = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(
                base_url=there.router.url, trust_env=False, timeout=60.0, limits=limits
            ) as client:
                while done < count or not is_over.is_set():
                    done += 1
                    body = {"model": "mock", "prompt": f"Say {number}.", "max_tokens": 8, "stream": done % 2 == 0}
                    try:
                        check(await client.post("/v1/completions", json=body))
                    except (AssertionError, httpx.HTTPError) as error:
                        failures.append(repr(error)[:500])

        loads = [asyncio.create_task(load(number)) for number in range(CLIENTS)]
        replaced = [(there.prefillers, "prefill"), (there.decoders, "decode")]
        try:
            for mocks, role in replaced:
                for index in range(len(mocks)):
                    await restart(there, mocks, index, role, dialect)
        finally:
            is_over.set()
            await asyncio.gather(*loads)
            for mocks, _ in replaced:
                for mock in mocks:
                    await asyncio.to_thread(mock.stop)
        assert failures == []
        assert done >= count
