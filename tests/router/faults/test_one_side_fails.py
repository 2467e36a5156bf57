"""SGLang's two legs, of which one fails: which worker is blamed, and what the client sees."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from kvxfer.types import Role
from tests.support.fake_workers import FakeWorker, failing, router_over
from tests.support.mock_engine.mocks import Mocks
from tests.support.routers import RouterProcess, Site, check, engines_of

PATH = "/v1/completions"
REQUESTS_MAX = 100
"""A fault that is blamed after a few draws of the worker is seen by then, but for one run in a million."""


@contextlib.asynccontextmanager
async def sglang(
    prefill: int, decode: int, *, unmet: Sequence[int] = (), flags: Sequence[str] = ()
) -> AsyncIterator[Site]:
    """SGLang engines behind a router. The prefill workers numbered ``unmet`` serve HTTP, and nothing listens where the
    router tells decode workers to find their bootstrap servers."""
    quick = ("--kind=sglang", "--ttft-ms=1", "--itl-ms=1")
    with engines_of("prefill", prefill, *quick) as prefillers, engines_of("decode", decode, *quick) as decoders:
        ports = [1 if number in unmet else mock.engines[0].port for number, mock in enumerate(prefillers)]
        where = [
            f"--prefill={m.engines[0].url}?bootstrap_port={port}" for m, port in zip(prefillers, ports, strict=True)
        ]
        where += [f"--decode={mock.engines[0].url}" for mock in decoders]
        router = await asyncio.to_thread(RouterProcess, *where, "--dialect=sglang", *flags)
        try:
            there = Site(router, prefillers, decoders)
            async with there.client:
                await there.wait_ready()
                yield there
        finally:
            code, said = await asyncio.to_thread(router.stop)
        assert (code, "Traceback" in said) == (0, False), said


async def ejections(there: Site, mocks: Sequence[Mocks]) -> list[int]:
    known = await there.workers()
    return [known[mock.engines[0].url]["health"]["ejections"] for mock in mocks]


async def failures(there: Site, mocks: Sequence[Mocks]) -> list[int]:
    known = await there.workers()
    return [known[mock.engines[0].url]["health"]["failures_in_a_row"] for mock in mocks]


async def ask_until_ejected(there: Site, mocks: Sequence[Mocks]) -> None:
    """Every request is served, whichever workers are drawn for it, until the first of ``mocks`` has been ejected."""
    for number in range(REQUESTS_MAX):
        check(await there.complete(stream=number % 2 == 0, prompt=f"number {number}"))
        if (await ejections(there, mocks))[0]:
            return
    raise AssertionError(f"{REQUESTS_MAX} requests, and the worker that fails was not ejected")


async def test_a_prefill_worker_that_no_decode_worker_reaches_is_blamed_for_it() -> None:
    async with sglang(2, 2, unmet=[0]) as there:
        await ask_until_ejected(there, there.prefillers)
        assert await ejections(there, there.decoders) == [0, 0]
        assert await failures(there, there.decoders) == [0, 0]
        assert (await ejections(there, there.prefillers))[1] == 0
        await there.wait_free()


async def test_with_one_decode_worker_it_is_kept_and_every_request_is_served() -> None:
    async with sglang(2, 1, unmet=[0]) as there:
        for number in range(8):
            check(await there.complete(stream=number % 2 == 0))
        assert await ejections(there, there.decoders) == [0]


async def test_a_decode_worker_that_alone_fails_is_blamed_alone() -> None:
    for status in (500, 501):
        async with sglang(2, 2) as there:
            for number in range(4):  # so that both prefill workers have worked
                check(await there.complete(prompt=f"warm {number}"))
            there.decoders[0].engines[0].fault("status", status=status, path=PATH)
            await ask_until_ejected(there, there.decoders)
            assert await ejections(there, there.prefillers) == [0, 0], status
            assert (await ejections(there, there.decoders))[1] == 0, status
            await there.wait_free()


async def test_a_single_decode_worker_that_fails_gives_its_own_error_and_the_prefill_worker_stays() -> None:
    async with sglang(1, 1, flags=("--attempts-max=2",)) as there:
        there.decoders[0].engines[0].fault("status", status=500, message="out of luck", path=PATH)
        begun_s = time.monotonic()
        answer = await there.complete()
        assert (answer.status_code, "out of luck" in answer.text) == (500, True)
        assert time.monotonic() - begun_s < 5.0
        assert await ejections(there, there.prefillers) == [0]
        there.decoders[0].engines[0].request("DELETE", "/mock/faults")
        check(await there.complete())
        await there.wait_free()


async def test_a_prefill_worker_that_dies_a_moment_after_decode_says_so_is_the_one_that_failed() -> None:
    """D noticed first that P's connection broke: the router's own leg breaks a moment later."""

    async def take_and_break(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.03)
        writer.transport.abort()

    server = await asyncio.start_server(take_and_break, "127.0.0.1", 0)
    p, d = FakeWorker("p0", Role.PREFILL, dialect="sglang"), FakeWorker("d0", dialect="sglang")
    d.always_fails = failing(502, "502", retryable=False)
    async with server, router_over(d, attempts_max=1) as router:
        p.port = server.sockets[0].getsockname()[1]
        router.publish(p, d)
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "peer_gone")
        assert "prefill" in answer.json()["error"]["message"]
        assert await router.metric('kvxfer_router_leg_failures_total{kind="unread",part="prefill"}') == 1
        assert router.workers.describe()[0]["health"]["failures_in_a_row"] == 0


async def test_no_decode_worker_of_sglang_is_asked_to_compute_a_prompt_because_no_prefill_worker_is_left() -> None:
    """It cannot, and would refuse the request as if the client were at fault."""
    async with sglang(1, 2, flags=("--min-remote-prefill-tokens=1000",)) as there:
        check(await there.complete())  # short, and split all the same
        there.prefillers[0].process.kill()
        there.prefillers[0].process.wait()
        begun_s = time.monotonic()
        answers = [await there.complete(stream=number % 2 == 0) for number in range(8)]
        assert time.monotonic() - begun_s < 20.0
        assert {answer.status_code for answer in answers} <= {502, 503}, [answer.text for answer in answers]
        assert await ejections(there, there.decoders) == [0, 0]


async def test_sglang_without_any_prefill_worker_is_503_and_not_ready() -> None:
    d = FakeWorker("d0", dialect="sglang")
    async with router_over(d) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.complete(n=2)).status_code == 503
        assert not d.received
        tokens = await router.client.post("/tokenize", json={"model": "tiny", "prompt": "x"})
        assert tokens.status_code == 200


async def test_what_sglang_cannot_split_goes_to_an_engine_that_does_it_alone_and_not_to_an_idler_decode_worker() -> (
    None
):
    p, d = FakeWorker("p0", Role.PREFILL, dialect="sglang"), FakeWorker("d0", dialect="sglang")
    engine = FakeWorker("e0", Role.BOTH, dialect="plain")
    async with router_over(p, d, engine) as router:
        for _ in range(8):
            answer = await router.complete(n=2)
            assert answer.status_code == 200
            assert answer.headers["x-kvxfer-prefill-reason"] in ("field:n", "engine_alone")
        assert (len(engine.received), len(d.received)) == (8, 0)


async def test_without_a_prefill_worker_a_decode_worker_that_computes_prompts_gets_them_all() -> None:
    sglang_d, other = FakeWorker("d0", dialect="sglang"), FakeWorker("d1")
    async with router_over(sglang_d, other) as router:
        for number in range(8):
            answer = await router.complete(stream=number % 2 == 0)
            assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
        assert (len(sglang_d.received), len(other.received)) == (0, 8)
