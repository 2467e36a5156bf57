"""A router of several processes (``--workers``) is one router: one view of the load, of health and of drains, one
``/metrics``, one way to stop. With real processes, and mock engines behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from tests.support.child import environment
from tests.support.fake_workers import eventually
from tests.support.routers import MODEL, RouterProcess, check, site
from tests.support.several import COUNT, SEVERAL, Caller, callers, children, is_gone

SLOW = ("--ttft-ms=5", "--itl-ms=50")
SEEN_S = 1.0
"""Within so long all processes must see what one did; a shared machine gets more than the 100 ms of the benchmark."""


async def views(found: dict[int, list[Caller]]) -> set[int]:
    """What each process takes to be in flight."""
    said = await asyncio.gather(*(those[-1].health() for those in found.values()))
    return {body["workers_inflight"] for body in said}


async def test_one_ready_line_and_every_process_serves() -> None:
    async with site(1, 2, router_flags=SEVERAL) as there:
        assert there.router.ready["processes"] == COUNT
        assert there.router.ready["pid"] == there.router.process.pid
        async with callers(there) as found:
            assert set(found) == children(there.router)
            for [caller, *_] in found.values():
                check(await caller.complete())
        listed = (await there.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == [MODEL]
        assert (await there.client.get("/docs")).status_code == 200
        assert (await there.client.get("/nothing")).status_code == 404
        assert (await there.client.get("/v1/completions")).status_code == 405


@pytest.mark.deep
async def test_new_connections_are_shared_out() -> None:
    async with site(1, 1, router_flags=SEVERAL) as there, contextlib.AsyncExitStack() as stack:
        those = [Caller(there.router.url) for _ in range(30)]
        for caller in those:
            await stack.enter_async_context(caller.client)
        await asyncio.gather(*(caller.health() for caller in those))
        pids = [caller.pid for caller in those]
        assert len(set(pids)) == COUNT
        assert min(pids.count(pid) for pid in set(pids)) >= 3, [pids.count(pid) for pid in set(pids)]


async def test_all_processes_see_one_load() -> None:
    async with site(1, 2, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there, at_each=3) as found:
        running: list[asyncio.Task[Any]] = []

        async def agree_on(count: int) -> bool:
            return await views(found) == {count}

        # One after the other: processes that place at the same moment do not see each other's choice.
        for caller in (caller for those in found.values() for caller in those[:2]):
            running.append(asyncio.create_task(caller.complete(120)))
            await eventually(functools.partial(agree_on, len(running)), within_s=5.0)
        assert await there.metric("kvxfer_router_inflight") == len(running)
        workers = await there.workers()
        loads = [workers[mock.engines[0].url]["inflight"]["decode"] for mock in there.decoders]
        assert sum(loads) == len(running)
        assert max(loads) - min(loads) <= 1, loads  # placement balanced them as one
        for answer in await asyncio.gather(*running):
            check(answer, 120)
        await eventually(lambda: agree_on(0), within_s=SEEN_S)


async def test_killed_process_gives_its_claims_back_and_is_replaced() -> None:
    async with site(1, 2, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there, at_each=3) as found:
        running = {caller: asyncio.create_task(caller.complete(60)) for those in found.values() for caller in those[:2]}
        await asyncio.sleep(0.5)
        before = await there.metric("kvxfer_router_requests_total")
        victim = next(iter(found))
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        others = {pid: those for pid, those in found.items() if pid != victim}
        expected = 2 * (COUNT - 1)

        async def claims_are_back() -> bool:
            return await views(others) == {expected}

        await eventually(claims_are_back, within_s=SEEN_S)
        assert time.monotonic() - killed_s < SEEN_S + 0.5
        ended = dict(zip(running, await asyncio.gather(*running.values(), return_exceptions=True), strict=True))
        for caller, answer in ended.items():
            if caller.pid == victim:
                assert isinstance(answer, httpx.HTTPError)
            else:
                assert isinstance(answer, httpx.Response), answer
                check(answer, 60)

        async def is_replaced() -> bool:
            return len(children(there.router) - {victim}) == COUNT

        await eventually(is_replaced, within_s=10.0)
        async with callers(there) as again:
            assert victim not in again
            for [caller, *_] in again.values():
                check(await caller.complete())
        assert await there.metric("kvxfer_router_requests_total") >= before + expected
        await there.wait_free()


async def test_ejection_met_by_one_process_holds_for_all() -> None:
    async with (
        site(1, 2, router_flags=(*SEVERAL, "--eject-base-s=5", "--probe-s=60")) as there,
        callers(there) as found,
    ):
        dead = there.decoders[0]
        dead.stop()
        first, *rest = [those[0] for those in found.values()]
        for _ in range(8):
            check(await first.complete())
        begun = await there.metric("kvxfer_router_leg_failures_total")
        assert begun >= 1
        assert await there.metric("kvxfer_router_ejections_total") == 1
        for caller in rest:
            for _ in range(8):
                check(await caller.complete())
        assert await there.metric("kvxfer_router_leg_failures_total") == begun  # none of them tried it
        there.decoders.remove(dead)


@pytest.mark.deep
async def test_drain_by_any_process_holds_for_all() -> None:
    async with site(1, 2, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there) as found:
        url = there.decoders[0].engines[0].url
        name = (await there.workers())[url]["agent_id"]
        for number, [caller, *_] in enumerate(found.values()):
            answer = await caller.client.post(f"/workers/{name}/drain")
            assert answer.json() == {"agent_id": name, "is_draining": True}
            before = there.decoders[0].engines[0].statistics()["requests"]
            for one in await asyncio.gather(*(those[0].complete() for those in found.values() for _ in range(2))):
                check(one)
            assert there.decoders[0].engines[0].statistics()["requests"] == before, number
            await caller.client.post(f"/workers/{name}/drain?on=false")


@pytest.mark.deep
async def test_worker_added_by_one_process_serves_in_all() -> None:
    async with site(1, 2, router_flags=SEVERAL) as there, callers(there) as found:
        urls = list(await there.workers())
        [caller, *_] = next(iter(found.values()))
        assert (await caller.client.delete("/workers/not-there")).status_code == 404
        refused = await caller.client.post("/workers", json={"url": urls[0], "role": "decode"})
        assert refused.status_code == 400
        added = await caller.client.post("/workers", json={"url": "http://127.0.0.1:1", "role": "decode", "model": "x"})
        assert added.status_code == 201
        for those in found.values():
            listed = (await those[0].client.get("/v1/models")).json()["data"]
            assert {one["id"] for one in listed} == {MODEL, "x"}


@pytest.mark.deep
async def test_one_metrics_counts_what_all_served_and_never_less() -> None:
    async with site(1, 2, router_flags=SEVERAL) as there, callers(there) as found:
        for number, [caller, *_] in enumerate(found.values(), 1):
            check(await caller.complete())
            assert await there.metric("kvxfer_router_requests_total") == number
            assert await there.metric("kvxfer_router_ttft_seconds_count") == number
        for victim in found:
            os.kill(victim, signal.SIGKILL)
        for _ in range(20):
            with contextlib.suppress(httpx.HTTPError):
                assert await there.metric("kvxfer_router_requests_total") == COUNT
            await asyncio.sleep(0.1)


@pytest.mark.deep
async def test_max_inflight_is_one_bound_for_all() -> None:
    flags = (*SEVERAL, f"--max-inflight={COUNT}")
    async with site(1, 1, engine_flags=SLOW, router_flags=flags) as there, callers(there, at_each=4) as found:
        [first, *_] = found.values()
        running = [asyncio.create_task(caller.complete(30)) for caller in first[:COUNT]]  # all in one process
        await asyncio.sleep(0.5)
        for those in found.values():
            assert (await those[-1].complete()).status_code == 503
        for answer in await asyncio.gather(*running):
            check(answer, 30)
        check(await first[0].complete())


async def test_sigterm_drains_all_processes() -> None:
    async with site(1, 1, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there, at_each=2) as found:
        running = [asyncio.create_task(those[0].complete(30)) for those in found.values()]
        await asyncio.sleep(0.4)
        there.router.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        for those in found.values():
            refused = await those[-1].complete()
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert (await those[-1].client.get("/ready")).status_code == 503
        for answer in await asyncio.gather(*running):
            check(answer, 30)
        assert await asyncio.to_thread(there.router.process.wait, 20) == 0
        assert all(map(is_gone, found))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_second_signal_ends_all_processes_at_once(number: signal.Signals) -> None:
    async with site(1, 1, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there) as found:
        running = [asyncio.create_task(those[0].complete(1000)) for those in found.values()]
        await asyncio.sleep(0.4)
        there.router.process.send_signal(number)
        await asyncio.sleep(0.3)
        there.router.process.send_signal(number)
        assert await asyncio.to_thread(there.router.process.wait, 10) == 128 + number
        await asyncio.wait(running)
        await eventually(lambda: all(map(is_gone, found)), within_s=5.0)
        there.router.process.returncode = 0  # forced, and asked for


@pytest.mark.deep
async def test_processes_whose_parent_was_killed_finish_and_leave_the_port() -> None:
    async with site(1, 1, engine_flags=SLOW, router_flags=SEVERAL) as there, callers(there) as found:
        running = [asyncio.create_task(those[0].complete(20)) for those in found.values()]
        await asyncio.sleep(0.4)
        there.router.process.kill()
        await asyncio.to_thread(there.router.process.wait, 10)
        await asyncio.sleep(0.3)
        port = there.router.url.rpartition(":")[2]
        where = [f"--decode={there.decoders[0].engines[0].url}", f"--port={port}"]
        again = await asyncio.to_thread(RouterProcess, *where, *SEVERAL)
        assert (await asyncio.to_thread(again.stop))[0] == 0
        for answer in await asyncio.gather(*running):
            check(answer, 20)
        await eventually(lambda: all(map(is_gone, found)), within_s=20.0)
        there.router.process.returncode = 0  # killed here


async def test_process_that_cannot_serve_ends_the_start_with_a_sentence() -> None:
    router = ("router", "--decode=http://127.0.0.1:1", "--workers=2", "--max-connections=400")
    command = ["sh", "-c", 'ulimit -n 120; exec "$@"', "sh", sys.executable, "-m", "kvxfer.cli", *router]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False, env=environment()
    )
    assert done.returncode == 1
    assert not done.stdout
    assert "ulimit -n" in done.stderr
    assert "before it served" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_has_nothing_of_this() -> None:
    source = """
import asyncio, sys
from kvxfer.router.options import RouterOptions
from kvxfer.router.run import serve
async def run():
    stop = asyncio.Event()
    await serve(RouterOptions(engine=("http://127.0.0.1:1",)), on_ready=lambda line: stop.set(), stop=stop)
asyncio.run(run())
assert not [name for name in sys.modules if name.startswith("kvxfer.router.group")]
"""
    done = subprocess.run([sys.executable, "-c", source], env=environment(), timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
