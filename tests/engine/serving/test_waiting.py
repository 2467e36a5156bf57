"""Requests that wait for other engines: what they hold, what the other side is told, and which request gives way."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvxfer.engine.request import Leg, OtherLeg, Request
from kvxfer.errors import DeadlineExceededError, KvxferError, OverloadedError
from tests.support.engine.engine_harness import (
    BLOCK_TOKENS,
    answer,
    greedy,
    legs,
    make_prompt,
    new_id,
    prefill,
    reference,
    running,
)

pytestmark = pytest.mark.asyncio


def between(source: str, reader: str, length: int, seed: int, tokens: int = 4) -> tuple[Request, Request]:
    """Both legs of a request whose prompt ``source`` computes and ``reader`` answers."""
    prompt, transfer_id = make_prompt(length, seed), new_id()
    return (
        Request(f"p{seed}", prompt, greedy(tokens), Leg.PREFILL, OtherLeg(transfer_id, reader)),
        Request(f"d{seed}", prompt, greedy(tokens), Leg.DECODE, OtherLeg(transfer_id, source)),
    )


async def test_waiting_holds_no_slot_and_no_block_that_another_needs(world, tiny_model) -> None:
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d", blocks=16, max_running=2) as d:
        slow = [asyncio.create_task(answer(d.engine, legs(make_prompt(80, n), greedy(3))[1])) for n in range(8)]
        await asyncio.sleep(0.1)
        statistics = d.executor.scheduler.statistics()
        assert (statistics.asking, statistics.pulling) == (8, 0)
        assert 0 < d.executor.pool.statistics().used <= 12, "two have their blocks early"
        for n in range(3):
            first, second = legs(make_prompt(200, 50 + n), greedy(3))  # 13 of the 16 blocks
            began_s = time.monotonic()
            (tokens, _, outcome), _ = await asyncio.gather(answer(d.engine, second), prefill(p.engine, first))
            assert outcome.report.prefill == "remote"
            assert time.monotonic() - began_s < 5.0
            assert tokens == reference(tiny_model, first.token_ids, 3)
        assert d.executor.scheduler.statistics().taken_back >= 1
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    assert world.breaches == []


async def test_early_blocks_go_back_before_the_pull_has_begun(world, tiny_model) -> None:
    """Both come in one turn of the loop: the pull of the first has not begun when the second needs its blocks."""
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d", blocks=8) as d:
        first, second = legs(make_prompt(80), greedy(3))
        here = Request("here", make_prompt(100, 1), greedy(3))
        waiting = asyncio.create_task(answer(d.engine, second))
        tokens, _, _ = await asyncio.wait_for(answer(d.engine, here), 10.0)
        assert tokens == reference(tiny_model, here.token_ids, 3)
        await prefill(p.engine, first)
        tokens, _, outcome = await waiting
        assert outcome.report.prefill == "remote"
        assert tokens == reference(tiny_model, first.token_ids, 3)
    assert world.breaches == []


async def test_one_whose_early_blocks_were_taken_is_granted_and_answered(world, tiny_model) -> None:
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d", blocks=8) as d:
        first, second = legs(make_prompt(80), greedy(3))
        waiting = asyncio.create_task(answer(d.engine, second))
        await asyncio.sleep(0.1)
        assert d.executor.pool.statistics().used == 5
        await answer(d.engine, Request("here", make_prompt(100, 1), greedy(3)))
        assert d.executor.scheduler.statistics().taken_back == 1
        await prefill(p.engine, first)
        tokens, _, outcome = await waiting
        assert outcome.report.prefill == "remote"
        assert tokens == reference(tiny_model, first.token_ids, 3)
    assert world.breaches == []


async def test_two_engines_that_are_both_do_not_wait_for_each_other(world, tiny_model) -> None:
    """Six prompts of eight blocks in opposite order, 23 blocks each: what each keeps is in the way of what it needs."""
    async with running(tiny_model, world, "a", blocks=23) as a, running(tiny_model, world, "b", blocks=23) as b:
        engines = {"a": a.engine, "b": b.engine}
        work, began_s = [], time.monotonic()
        for n in range(6):
            source, reader = ("a", "b") if n % 2 else ("b", "a")
            first, second = between(source, reader, 8 * BLOCK_TOKENS, n, tokens=8)
            work.append((second, asyncio.create_task(answer(engines[reader], second))))
            work.append((None, asyncio.create_task(prefill(engines[source], first))))
        failures = []
        for request, task in work:
            result = await task
            if request is None:
                continue
            tokens, _, outcome = result
            assert tokens == reference(tiny_model, request.token_ids, 8)
            failures.append(outcome.report.failure)
        assert time.monotonic() - began_s < 10.0
        revoked = a.executor.counters.revoked_prompts + b.executor.counters.revoked_prompts
        assert set(failures) <= {None, "grant_revoked"}
        assert revoked == failures.count("grant_revoked")
    assert world.breaches == []


async def test_under_plain_pressure_of_running_requests_nothing_is_revoked(world, tiny_model) -> None:
    """One engine keeps two prompts for a reader that is late, and answers ten requests in what is left of its pool."""
    async with running(tiny_model, world, "p", blocks=24, max_running=8) as p:
        kept = [legs(make_prompt(100, n), greedy(4))[0] for n in range(2)]
        for request in kept:
            await prefill(p.engine, request)
        requests = [Request(f"r{n}", make_prompt(60, 10 + n), greedy(30)) for n in range(10)]
        answers = await asyncio.gather(*(answer(p.engine, request) for request in requests))
        assert [len(tokens) for tokens, _, _ in answers] == [30] * 10
        assert p.executor.counters.revoked_prompts == 0
        assert p.executor.scheduler.statistics().holding == 2
        for request in kept:
            world.expire(request.remote.transfer_id)


async def test_a_prompt_for_others_gives_way_where_nothing_else_will(world, tiny_model) -> None:
    async with running(tiny_model, world, "p", blocks=12, room_wait_s=0.2) as p:
        old, young = (legs(make_prompt(80, n), greedy(4))[0] for n in range(2))
        for request in (old, young):
            await prefill(p.engine, request)
        tokens, _, _ = await answer(p.engine, Request("here", make_prompt(60, 5), greedy(4)))
        assert tokens == reference(tiny_model, make_prompt(60, 5), 4)
        assert p.executor.counters.revoked_prompts == 1
        assert world.grants[young.remote.transfer_id].reason.startswith("no_room")
        assert world.grants[old.remote.transfer_id].state.name == "ALIVE", "the youngest goes first, and one at a time"
        world.expire(old.remote.transfer_id)


async def test_a_source_is_told_of_a_prompt_when_it_is_accepted_and_when_it_will_not_come(world, tiny_model) -> None:
    async with running(tiny_model, world, "p", blocks=8, max_waiting=1, max_running=1) as p:
        agent = world.agents["p"]
        requests = [legs(make_prompt(100, n), greedy(4))[0] for n in range(4)]
        results = await asyncio.gather(*(prefill(p.engine, one) for one in requests), return_exceptions=True)
        assert agent.expected == [one.remote.transfer_id for one in requests]
        refused = [one for one, result in zip(requests, results, strict=True) if isinstance(result, OverloadedError)]
        assert refused, "there is room for one in the queue"
        assert all(world.grants[one.remote.transfer_id].state.name == "REVOKED" for one in refused)
        for one in requests:
            world.expire(one.remote.transfer_id)


async def test_heartbeats_report_whether_the_queue_was_taken_in(world, tiny_model) -> None:
    async with running(tiny_model, world, "p") as p:
        agent = world.agents["p"]
        await asyncio.sleep(0.05)
        assert agent.pulses[-1] == (False, True)
        with p.engine.arriving():
            await answer(p.engine, Request("one", make_prompt(20), greedy(2)))
            await answer(p.engine, Request("two", make_prompt(20), greedy(2)))
            count = len(agent.pulses)
            await answer(p.engine, Request("three", make_prompt(20), greedy(2)))
            later = list(agent.pulses)[count:]
            assert later
            assert not any(took_in for _, took_in in later), "a body that came before them is not read yet"
            assert all(has_work for has_work, _ in later)
        await answer(p.engine, Request("four", make_prompt(20), greedy(2)))
        assert any(took_in for _, took_in in list(agent.pulses)[-4:])


async def test_body_being_read_is_a_heartbeat_of_an_idle_engine(world, tiny_model) -> None:
    async with running(tiny_model, world, "p") as p:
        await asyncio.sleep(0.05)
        assert world.agents["p"].pulses[-1] == (False, True)
        with p.engine.arriving():
            await asyncio.sleep(0.05)
            assert world.agents["p"].pulses[-1][0], "it may be the prompt that a reader waits for"
        await p.engine.ask(lambda: None)


async def test_an_engine_that_can_do_nothing_for_want_of_blocks_does_not_spin(world, tiny_model) -> None:
    async with running(tiny_model, world, "d", blocks=8, room_wait_s=0.1) as d, running(tiny_model, world, "p") as p:
        slow = legs(make_prompt(100), greedy(3))
        world.hold_back.add(slow[0].remote.transfer_id)
        reading = asyncio.create_task(answer(d.engine, slow[1]))
        await prefill(p.engine, slow[0])
        first, second = legs(make_prompt(100, 1), greedy(3))
        waiting = asyncio.create_task(answer(d.engine, second))
        await prefill(p.engine, first)
        await asyncio.sleep(0.5)
        assert d.executor.scheduler.statistics().granted == 1
        before = world.agents["d"].pulse_count
        await asyncio.sleep(1.0)
        assert world.agents["d"].pulse_count - before < 50
        world.hold_back.clear()
        await asyncio.gather(reading, waiting)
    assert world.breaches == []


async def test_a_question_that_raises_ends_nothing(tiny_model) -> None:
    async with running(tiny_model, None, "p") as p:
        with pytest.raises(ZeroDivisionError):
            await p.engine.ask(lambda: 1 // 0)
        assert await p.engine.ask(lambda: 7) == 7


async def test_a_leg_names_how_long_it_may_wait(world, tiny_model) -> None:
    async with running(tiny_model, world, "p"), running(tiny_model, world, "d") as d:
        request = legs(make_prompt(40), greedy(3))[1]
        remote = OtherLeg(request.remote.transfer_id, "p", timeout_s=0.2)
        world.pull_errors[remote.transfer_id] = DeadlineExceededError("late")
        tokens, _, _ = await answer(d.engine, Request("r", request.token_ids, greedy(3), Leg.DECODE, remote))
        assert tokens == reference(tiny_model, request.token_ids, 3)
        assert world.agents["d"].transfers[0].timeout_s == 0.2


async def test_an_operator_may_release_what_is_held(world, tiny_model) -> None:
    async with running(tiny_model, world, "p") as p:
        request = legs(make_prompt(40), greedy(3))[0]
        await prefill(p.engine, request)
        [held] = await p.engine.ask(p.executor.held)
        transfer_id = request.remote.transfer_id
        assert (held["transfer_id"], held["reader"], held["blocks"]) == (str(transfer_id), "d", 3)
        assert not held["is_read"]
        assert await p.engine.ask(lambda: p.executor.release(transfer_id))
        assert not await p.engine.ask(lambda: p.executor.release(transfer_id))
        assert world.grants[transfer_id].state.name == "REVOKED"
        assert p.executor.scheduler.statistics().holding == 0


async def test_a_question_to_an_engine_that_has_ended_is_answered(tiny_model) -> None:
    async with running(tiny_model, None, "p") as p:
        await p.engine.stop(0.0)
        with pytest.raises(KvxferError, match="has ended"):
            await p.engine.ask(p.executor.held)


async def test_engine_whose_prompts_wait_for_blocks_keeps_its_heartbeat(world, tiny_model):
    """Else it could not be told from one that hangs."""
    async with running(tiny_model, world, "p", blocks=4) as p:
        params = greedy(1)
        first, second = (legs(make_prompt(60, seed), params)[0] for seed in range(2))
        async with p.engine.submit(first) as held, p.engine.submit(second):
            await held.wait_prefilled()
            await asyncio.sleep(0.2)
            before = len(world.agents["p"].pulses)
            await asyncio.sleep(2.5)
            pulses = list(world.agents["p"].pulses)[before:]
            assert 2 <= len([pulse for pulse in pulses if pulse[0]]) == len(pulses) <= 12
        p.engine.call(lambda: p.executor.abort_all(KvxferError("the test is over")))
