"""Engines of both roles whose pools hold two prompts each, and prompts that each computes for another, in opposite
order: what one holds is what the other's requests need room for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import prompt, wait_free, within
from tests.support.vllm.engines import Answer, Cluster, Engine, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCKS = 23
"""That vLLM can give away, of 128 tokens; a prompt takes eight."""
LENGTH, TOKENS, PROMPTS = 1000, 8, 3
"""PROMPTS of each engine for the next one."""
RATIO = 1.5
"""At most so many times as long as one engine alone takes for the same prompts."""
TIMEOUT_S = 60.0
ROOM = {"num_gpu_blocks_override": BLOCKS + 1, "enable_prefix_caching": False}


@pytest_asyncio.fixture(loop_scope="package", scope="module", params=[2, 3])
async def both(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[list[Engine]]:
    names = [f"both-{request.param}-{number}" for number in range(request.param)]
    for name in names:
        await cluster.start(name, "kv_both", **ROOM)
    for name in names:
        await cluster[name].wait_ready()
    yield [cluster[name] for name in names]
    for name in names:
        await cluster.engines.pop(name).stop()


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def alone(cluster: Cluster) -> AsyncIterator[Engine]:
    """An engine with that room that computes everything itself."""
    engine = await cluster.start("alone", None, **ROOM)
    await engine.wait_ready()
    yield engine
    await cluster.engines.pop("alone").stop()


async def of_one(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """How long that engine takes for all of them, and their tokens."""
    begun_s = time.monotonic()
    answers = await asyncio.gather(*(engine.generate(ids, TOKENS) for ids in prompts))
    return time.monotonic() - begun_s, [answer.tokens for answer in answers]


async def in_circles(engines: list[Engine], prompts: list[list[int]], *, first: str) -> tuple[float, list[Answer]]:
    """Each engine computes for the next one. ``first``: which legs come first to all of them; "prefills" have filled
    the pools when the others come."""
    decodes, prefills = [], []
    for number, ids in enumerate(prompts):
        source, reader = engines[number % len(engines)], engines[(number + 1) % len(engines)]
        legs = both_legs(source, reader)
        prefills.append((source, ids, 1, legs[0]))
        decodes.append((reader, ids, TOKENS, {**legs[1], "timeout_s": TIMEOUT_S}))
    begun_s = time.monotonic()
    waiting = {}
    for which in (decodes, prefills) if first == "decodes" else (prefills, decodes):
        waiting[which is decodes] = [(engine, engine.add(*request)) for engine, *request in which]
        if first == "prefills" and which is prefills:
            await asyncio.gather(
                *(engine.wait_first(request_id) for engine, request_id in waiting[False][: 2 * len(engines)])
            )
    answers = await asyncio.gather(*(engine.wait(request_id, 2 * TIMEOUT_S) for engine, request_id in waiting[True]))
    took_s = time.monotonic() - begun_s
    await asyncio.gather(*(engine.wait(request_id) for engine, request_id in waiting[False]))
    return took_s, list(answers)


@pytest.mark.parametrize("first", ["decodes", "prefills"])
async def test_engines_that_wait_for_each_others_blocks_get_on(both: list[Engine], alone: Engine, first: str) -> None:
    warm = [prompt(LENGTH, seed=f"warm {first} {number}") for number in range(len(both))]
    await of_one(alone, warm)
    await in_circles(both, warm, first="decodes")
    prompts = [prompt(LENGTH, seed=f"circle {len(both)} {first} {number}") for number in range(len(both) * PROMPTS)]
    alone_s, wanted = await of_one(alone, prompts)
    took_s, answers = await in_circles(both, prompts, first=first)
    codes = [answer.report["code"] for answer in answers]
    print(f"{len(both)} engines, {first} first: {took_s:.2f} s, one alone: {alone_s:.2f} s, codes {codes}")
    assert [answer.tokens for answer in answers] == wanted
    assert set(codes) <= {"", "grant_revoked"}
    assert all("no_room" in answer.report["text"] for answer in answers if answer.report["code"])
    assert max(answer["ms"] for answer in answers) < TIMEOUT_S * 1e3
    assert took_s < within(RATIO * alone_s)
    for engine in both:
        await wait_free(engine, BLOCKS)
