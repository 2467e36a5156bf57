"""What ``--workers`` shares beside load and health: limits of API keys, the operators' page. What works in one process
works in several: TLS, CORS, spans. A process that hangs is replaced. With real processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import time
from typing import Any

import httpx
import pytest

from kvxfer.router import run
from kvxfer.router.group import parent
from kvxfer.router.options import RouterOptions
from kvxfer.types import Role
from tests.support.certificates import Authority
from tests.support.collector import collecting
from tests.support.fake_workers import FakeWorker, eventually
from tests.support.response_keepers import Keeper, first_id
from tests.support.routers import MODEL, RouterProcess, check, engines_of, site
from tests.support.several import COUNT, SEVERAL, Caller, callers, children

TWO = ("--workers=2",)
SLOW = ("--ttft-ms=5", "--itl-ms=50")
KEYS = """
keys:
- {name: paced, key: the-key-of-paced, requests_per_minute: 10}
- {name: narrow, key: the-key-of-narrow, max_inflight: 3}
- {name: free, key: the-key-of-free}
"""
PAGE = "https://app.example.com"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer the-key-of-{name}"}


async def complete(caller: Caller, name: str, tokens: int = 1) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Say something long.", "max_tokens": tokens, "stream": True}
    return await caller.client.post("/v1/completions", json=body, headers=bearer(name))


async def test_limits_of_a_key_are_one_for_all_processes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    flags = (*SEVERAL, f"--api-key-file={path}")
    async with site(1, 1, engine_flags=SLOW, router_flags=flags) as there, contextlib.AsyncExitStack() as stack:
        async with callers(there, at_each=5) as some_of_each:
            those = [caller for some in zip(*some_of_each.values(), strict=False) for caller in some]

            # Requests a minute: 30 requests over as many connections as there are.
            begun_s = time.monotonic()
            said = [(await complete(those[number % len(those)], "paced")).status_code for number in range(30)]
            refilled = (time.monotonic() - begun_s) / 6.0
            assert set(said) == {200, 429}
            assert 10 <= said.count(200) <= 10 + refilled, said
            assert said[:10] == [200] * 10

            # Control routes ask for keys, and count: they are answered by the process that leads.
            assert (await those[0].client.get("/v1/models")).status_code == 401
            assert (await those[0].client.get("/v1/models", headers=bearer("paced"))).status_code == 429
            assert (await those[1].client.get("/v1/workers", headers=bearer("free"))).status_code == 200

        # Requests at once, and those of a process that is killed. The connections are new: one closes where a request
        # is refused before its body is there, and the next one of that client may go to another process.
        found = await stack.enter_async_context(callers(there, at_each=2))
        victim = next(iter(found))
        running = [asyncio.create_task(complete(some[0], "narrow", 200)) for some in found.values()]

        async def is_full() -> bool:
            return await there.metric('kvxfer_router_key_inflight{key="narrow"}') == COUNT

        await eventually(is_full, within_s=5.0)
        for some in found.values():
            refused = await complete(some[-1], "narrow")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        os.kill(victim, signal.SIGKILL)
        other = next(some[-1] for pid, some in found.items() if pid != victim)

        async def is_let_in() -> bool:
            try:
                return (await complete(other, "narrow")).status_code == 200
            except httpx.TransportError:  # a connection that the killed process had not yet accepted is lost with it
                return False

        await eventually(is_let_in, within_s=5.0)

        # The process that took its place has the keys, and what was used of them stays used.
        path.write_text("keys: this is no list")

        async def is_replaced() -> bool:
            return len(children(there.router) - {victim}) == COUNT

        await eventually(is_replaced, within_s=10.0)
        async with callers(there) as again:
            [new] = set(again) - set(found)
            assert (await complete(again[new][0], "free")).status_code == 200
            assert (await complete(again[new][0], "wrong")).status_code == 401
            answers = [(await complete(again[new][0], "paced")).status_code for _ in range(10)]
            assert answers.count(200) <= 1 + (time.monotonic() - begun_s) / 6.0 - (said.count(200) - 10)
            assert answers[-1] == 429
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_the_page_shows_what_all_processes_did() -> None:
    async with site(1, 2, router_flags=SEVERAL) as there, callers(there) as found:
        for number, some in enumerate(found.values(), 1):
            for _ in range(number):
                check(await some[0].complete())
        count = sum(range(COUNT + 1))
        state: dict[str, Any] = {}

        async def is_shown() -> bool:
            state.update((await there.client.get("/ui/state")).json())
            return len(state["decisions"]) == count

        await eventually(is_shown, within_s=10.0)
        ended = [decision["ended_unix_s"] for decision in state["decisions"]]
        assert ended == sorted(ended, reverse=True)
        assert sum(step["requests"] for step in state["series"]["steps"]) == count
        assert sum(step["ttft_count"] for step in state["series"]["steps"]) == count
        assert sum(pair["requests"] for pair in state["pairs"]) == count
        assert state["counters"]["requests"] == {"ok": count}
        assert sum(state["counters"]["placements"].values()) == count


async def test_cors_spans_and_the_page_work_in_several_processes(tmp_path: pathlib.Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("the-key-of-admin\n")
    with collecting() as collector:
        flags = (*TWO, f"--cors-origin={PAGE}", f"--otlp-endpoint={collector.url}", f"--admin-key-file={admin}")
        async with site(1, 1, router_flags=flags) as there, callers(there, count=2) as found:
            asks = {"origin": PAGE, "access-control-request-method": "POST"}
            for [caller, *_] in found.values():
                for path in ("/v1/completions", "/v1/models"):
                    preflight = await caller.client.options(path, headers=asks)
                    assert preflight.status_code == 204
                    assert preflight.headers["access-control-allow-origin"] == PAGE
                    assert "content-length" not in preflight.headers
                body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
                answer = await caller.client.post("/v1/completions", json=body, headers={"origin": PAGE})
                check(answer)
                assert answer.headers["access-control-allow-origin"] == PAGE
                listed = await caller.client.get("/v1/models", headers={"origin": PAGE})
                assert listed.headers.get_list("access-control-allow-origin") == [PAGE]

                page = await caller.client.get("/ui")
                assert page.status_code == 200
                assert page.headers["content-type"].startswith("text/html")
                assert "script-src 'self'" in page.headers["content-security-policy"]
                assert (await caller.client.get("/ui/app.js")).status_code == 200
                assert (await caller.client.get("/ui/state")).status_code == 401
                state = await caller.client.get("/ui/state", headers=bearer("admin"))
                assert state.status_code == 200
                more = {**bearer("admin"), "if-none-match": state.headers["etag"]}
                assert (await caller.client.get("/ui/state", headers=more)).status_code in (200, 304)

            def processes() -> set[str]:
                said = [one for body in collector.bodies for one in body["resourceSpans"]]
                attributes = [one for resource in said for one in resource["resource"]["attributes"]]
                return {one["value"]["stringValue"] for one in attributes if one["key"] == "service.instance.id"}

            await eventually(lambda: len(processes()) == 2, within_s=10.0)
            assert {int(one.rpartition(":")[2]) for one in processes()} == set(found)

            async def are_counted() -> bool:
                return await there.metric('kvxfer_router_traces_total{result="exported"}') == 2

            await eventually(are_counted, within_s=5.0)


async def test_several_processes_serve_over_tls(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("router")
    with engines_of("decode", 1, "--kind=vllm", *SLOW) as [mock]:
        flags = [f"--decode={mock.engines[0].url}", *TWO]
        flags += [f"--tls-cert-file={identity.cert}", f"--tls-key-file={identity.key}"]
        router = await asyncio.to_thread(RouterProcess, *flags)
        try:
            assert router.url.startswith("https://")
            async with callers(router.url, count=2, verify=authority.client_context()) as found:
                for [caller, *_] in found.values():
                    answer = await caller.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
                    assert answer.status_code == 200
                    assert (await caller.client.get("/v1/models")).status_code == 200
        finally:
            code, said = await asyncio.to_thread(router.stop)
    assert code == 0, said
    assert "Traceback" not in said


async def test_a_process_that_hangs_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that leads runs here, with a shortened time."""
    monkeypatch.setattr(parent, "MEASURE_S", 0.2)
    monkeypatch.setattr(parent, "HUNG_S", 3.0)
    d = FakeWorker("d0", Role.BOTH, dialect="plain")
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with d.running():
        options = RouterOptions(engine=(d.url,), workers=2)
        serving = asyncio.create_task(run.serve(options, on_ready=ready.set_result, stop=stop))
        try:
            first: set[asyncio.Future[Any]] = {serving, ready}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await serving
            url = (await ready)["http_url"]
            async with callers(url, count=2) as found:
                victim, other = found
                caplog.clear()
                with caplog.at_level(logging.ERROR, logger="kvxfer.router"):
                    os.kill(victim, signal.SIGSTOP)
                    begun_s = time.monotonic()
                    with pytest.raises(httpx.HTTPError):
                        await found[victim][0].client.get("/health")
                assert 1.0 < time.monotonic() - begun_s < 30.0
                [said] = [record for record in caplog.records if "hangs" in record.message]
                assert said.levelno == logging.ERROR
                assert said.pid == victim  # type: ignore[attr-defined]
                assert (await found[other][0].client.get("/v1/models")).status_code == 200
                async with callers(url, count=2) as again:
                    assert victim not in again
                    assert other in again
        finally:
            stop.set()
            await asyncio.wait_for(serving, 30.0)


async def test_responses_are_found_by_every_process_and_after_the_end_of_the_one_that_served_them() -> None:
    engines = [Keeper(f"e{number}") for number in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        flags = [f"--engine={engine.url}?name={engine.name}" for engine in engines]
        router = await asyncio.to_thread(RouterProcess, *SEVERAL, *flags)
        stack.push_async_callback(asyncio.to_thread, router.stop)
        found = await stack.enter_async_context(callers(router.url))
        those = {pid: some[0].client for pid, some in found.items()}
        client = next(iter(those.values()))

        async def is_ready() -> bool:
            return [one["state"] for one in (await client.get("/v1/workers")).json()["data"]] == ["in"] * 3 and (
                await client.get("/ready")
            ).status_code == 200

        await eventually(is_ready)
        body = {"model": engines[0].model, "input": "hi"}
        made = {pid: first_id(await one.post("/v1/responses", json=body)) for pid, one in those.items()}
        for one in those.values():
            for name in made.values():
                assert (await one.get(f"/v1/responses/{name}")).json()["id"] == name
                again = await one.post("/v1/responses", json={**body, "previous_response_id": name})
                assert again.status_code == 200, again.text
        victim, *others = those
        os.kill(victim, signal.SIGKILL)

        async def is_replaced() -> bool:
            return len(children(router) - {victim}) == COUNT

        await eventually(is_replaced)
        for name in made.values():
            assert (await those[others[0]].get(f"/v1/responses/{name}")).json()["id"] == name
