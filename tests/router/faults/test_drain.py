"""Stopping and draining, of the router and of workers, under load."""

from __future__ import annotations

import asyncio
import signal
import sys

import httpx
import pytest

from tests.support.child import environment
from tests.support.fake_workers import eventually
from tests.support.routers import check, site

SLOW = ("--ttft-ms=5", "--itl-ms=50")


async def test_sigterm_finishes_what_runs_and_refuses_what_is_new() -> None:
    async with site(1, 1, engine_flags=SLOW) as there:
        running = asyncio.create_task(there.complete(tokens=30))
        await asyncio.sleep(0.4)
        idle = httpx.AsyncClient(base_url=there.router.url, trust_env=False, timeout=30.0)
        async with idle:
            assert (await idle.get("/health")).json()["status"] == "ok"
            there.router.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            refused = await idle.post("/v1/completions", json={"model": "mock", "prompt": "x"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert (await idle.get("/ready")).status_code == 503
        check(await running, 30)
        code = await asyncio.to_thread(there.router.process.wait, 20)
        assert code == 0


async def test_a_second_signal_ends_the_router_at_once() -> None:
    async with site(1, 1, engine_flags=SLOW) as there:
        running = asyncio.create_task(there.complete(tokens=1000))
        await asyncio.sleep(0.4)
        there.router.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        there.router.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.to_thread(there.router.process.wait), 10)
        await asyncio.wait({running})
        there.router.process.returncode = 0  # forced, and asked for


async def test_a_drained_worker_gets_no_new_requests_and_finishes_its_own() -> None:
    async with site(1, 2, engine_flags=SLOW) as there:
        running = [asyncio.create_task(there.complete(tokens=20)) for _ in range(6)]
        await asyncio.sleep(0.3)
        workers = await there.workers()
        url = there.decoders[0].engines[0].url
        command = [
            sys.executable,
            "-m",
            "kvxfer.cli",
            "drain",
            workers[url]["agent_id"],
            f"--router={there.router.url}",
        ]
        drain = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment()
        )
        out, error = await asyncio.wait_for(drain.communicate(), 30)
        assert drain.returncode == 0, error
        assert b"is drained" in out
        before = there.decoders[0].engines[0].statistics()["requests"]
        for answer in await asyncio.gather(*running):
            check(answer, 20)
        for _ in range(6):
            check(await there.complete())
        assert there.decoders[0].engines[0].statistics()["requests"] == before
        undo = await asyncio.create_subprocess_exec(
            *command, "--undo", stdout=asyncio.subprocess.PIPE, env=environment()
        )
        await undo.communicate()
        assert undo.returncode == 0
        await asyncio.gather(*(there.complete() for _ in range(6)))
        assert there.decoders[0].engines[0].statistics()["requests"] > before


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_drained_prefill_worker_is_waited_for_until_its_blocks_were_read(processes: int) -> None:
    async with site(1, 1, router_flags=(f"--workers={processes}",)) as there:
        prefill, decode = there.prefillers[0].engines[0], there.decoders[0].engines[0]
        decode.fault("late", delay_s=2.0, leg="decode")
        running = asyncio.create_task(there.complete(tokens=40))
        await asyncio.to_thread(prefill.wait, lambda now: now["holds"] == 1 and now["open_requests"] == 0)

        async def is_held() -> bool:
            return (await there.workers())[prefill.url]["inflight"]["held"] == 1

        await eventually(is_held)  # the router hears the answer a moment after the engine has given it
        worker = (await there.workers())[prefill.url]
        command = [sys.executable, "-m", "kvxfer.cli", "drain", worker["agent_id"], f"--router={there.router.url}"]
        drain = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment())
        out, _ = await asyncio.wait_for(drain.communicate(), 30)
        assert (drain.returncode, b"is drained" in out) == (0, True)
        assert prefill.statistics()["holds"] == 0
        check(await running, 40)
        assert sum((await there.workers())[prefill.url]["inflight"].values()) == 0


@pytest.mark.parametrize("words", [("no-such-worker",), ("x", "--wait=-1")])
async def test_a_drain_that_makes_no_sense_is_refused_in_a_sentence(words: tuple[str, ...]) -> None:
    async with site(1, 1) as there:
        command = [sys.executable, "-m", "kvxfer.cli", "drain", *words, f"--router={there.router.url}"]
        drain = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment())
        _, error = await drain.communicate()
        assert drain.returncode == 2
        assert error.startswith(b"kvxfer: ")
        assert b"Traceback" not in error
