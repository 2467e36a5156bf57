"""The fleet beside mock engines in processes of their own, as stock vLLM's and SGLang's engines answer."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from kvxfer.openai.transfer_params import Part
from kvxfer.router.fleet.probe import Prober
from kvxfer.router.fleet.sources.flags import workers_from_flags
from kvxfer.router.fleet.worker import WorkerSource
from kvxfer.router.fleet.workers import Workers
from tests.support.mock_engine.mocks import free_ports, mocks
from tests.support.upstream import until


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_fleet_reads_models_limits_and_load_of_an_engine(kind: str) -> None:
    with mocks(
        "--kind", kind, "--model=m", "--model=alias", "--max-model-len=2048", "--blocks=128", "--itl-ms=50"
    ) as mock:
        engine = mock.engines[0]
        workers = Workers()
        workers.replace(WorkerSource.FLAGS, workers_from_flags(decode=[engine.url], dialect=kind))
        async with Prober(workers):
            await until(lambda: workers.candidates() and workers.candidates()[0].member.load.total_blocks == 128)
            [candidate] = workers.candidates()
            assert workers.models() == ("alias", "m")
            assert candidate.capacity.context_tokens == 2048
            assert candidate.capacity.pool_tokens == 128 * 16
            running = asyncio.create_task(asyncio.to_thread(engine.complete, tokens=100))
            await until(lambda: workers.candidates()[0].member.load.running_requests == 1)
            assert (await running).status == 200
            await until(lambda: workers.candidates()[0].member.load.running_requests == 0)
        await workers.close()


async def test_fleet_sees_an_engine_killed_within_a_second_and_its_successor_at_the_same_address() -> None:
    [port] = free_ports(1)
    workers = Workers()
    workers.replace(WorkerSource.FLAGS, workers_from_flags(engine=[f"http://127.0.0.1:{port}?name=e"]))
    async with Prober(workers):
        with mocks(f"--ports={port}", "--model=old") as mock:
            await until(lambda: workers.models() == ("old",))
            mock.process.send_signal(signal.SIGKILL)
            mock.process.wait()
            begun_s = time.monotonic()
            await until(lambda: workers.states()["e"] == "out")
            assert time.monotonic() - begun_s < 1.5
        with mocks(f"--ports={port}", "--model=new"):
            begun_s = time.monotonic()
            await until(lambda: workers.states()["e"] == "half_open")
            assert time.monotonic() - begun_s < 5.5
            assert workers.models() == ("new",)
            [candidate] = workers.candidates()
            with workers.claim(candidate.member.ref, Part.DECODE, "r"):
                workers.succeeded(candidate.member.ref, "r")
            assert workers.states()["e"] == "slow_start"
    await workers.close()
