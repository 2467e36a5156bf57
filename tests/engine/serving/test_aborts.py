"""Requests that are aborted while their blocks move: both workers get every block back."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from kvxfer.engine.request import Request
from kvxfer.errors import GrantReleasedError, TransportError
from kvxfer.types import GrantState
from tests.support.agents import until
from tests.support.engine.engine_harness import answer, greedy, legs, make_prompt, prefill, reference, running


async def end_of(grant):
    ended = asyncio.get_running_loop().create_future()
    grant.on_ended(ended.set_result)
    return await asyncio.wait_for(ended, 30)


async def test_a_decode_leg_that_is_aborted_gives_its_grant_up(world, tiny_model):
    """With all of its blocks, and without any: the first leg holds 13 of the 14 blocks, the second wants three."""
    pairs = [legs(make_prompt(length), greedy(4)) for length in (200, 40)]
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d", blocks=14) as d:
        generations, grants = [], []
        for prefill_leg, decode_leg in pairs:
            transfer_id = decode_leg.remote.transfer_id
            world.hold_back.add(transfer_id)  # nothing is read, so neither pull ends before it is aborted
            generations.append(d.engine.submit(decode_leg))
            await prefill(p.engine, prefill_leg)
            grants.append(world.grants[transfer_id])
            await until(lambda: sum(one.is_told for one in world.agents["d"].transfers) == len(grants))
        assert [len(one.blocks) for one in world.agents["d"].transfers] == [13, 0]
        assert [one.state for one in grants] == [GrantState.ALIVE] * 2
        for generation, grant in reversed(list(zip(generations, grants, strict=True))):
            generation.abort()
            assert await end_of(grant) is GrantState.RELEASED
        assert world.agents["d"].given_up == [], "a pull that began is cancelled"


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_leg_that_is_aborted_before_its_prefill_is_not_granted(world, tiny_model, has_begun):
    prefill_leg, decode_leg = legs(make_prompt(40), greedy(4))
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d") as d:
        generation = d.engine.submit(decode_leg)
        if has_begun:
            await until(lambda: bool(world.agents["d"].transfers))
        generation.abort()
        if not has_begun:  # the engine thread takes both in while the loop stands still, so that no pull begins
            both_taken = threading.Event()
            d.engine.call(both_taken.set)
            assert both_taken.wait(30)
        await until(lambda: decode_leg.remote.transfer_id in world.released)
        assert len(world.agents["d"].given_up) == (0 if has_begun else 1)
        with pytest.raises(GrantReleasedError):
            await prefill(p.engine, prefill_leg)


async def test_aborts_at_any_moment_give_every_block_back(world, tiny_model):
    rng = random.Random(7)
    async with (
        running(tiny_model, world, "p", chunk_tokens=16) as p,
        running(tiny_model, world, "d", chunk_tokens=16) as d,
    ):
        for step in range(40):
            prompt = make_prompt(rng.choice((1, 17, 33, 200)), seed=step)
            prefill_leg, decode_leg = legs(prompt, greedy(40))
            if rng.random() < 0.2:
                world.pull_errors[decode_leg.remote.transfer_id] = TransportError("broken")
            tasks = [
                asyncio.create_task(prefill(p.engine, prefill_leg)),
                asyncio.create_task(answer(d.engine, decode_leg)),
            ]
            await asyncio.sleep(rng.choice((0, 0.001, 0.005, 0.02, 0.05)))
            rng.shuffle(tasks)
            for task in tasks:
                task.cancel()
                if rng.random() < 0.5:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks, return_exceptions=True)
        await d.check_idle()
        for transfer_id in list(world.grants):
            world.expire(transfer_id)
        await p.check_idle()
        prompt = make_prompt(77)
        tokens, _, _ = await answer(d.engine, Request("after", prompt, greedy(8)))
        assert tokens == reference(tiny_model, prompt, 8)
    assert not world.breaches
