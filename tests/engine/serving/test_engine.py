"""The engine over the tiny model: alone against transformers, and P with D joined by a fake agent that copies bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading

import pytest

from kvxfer.engine.request import FailurePolicy, Leg, OtherLeg, PrefillOutcome, Request
from kvxfer.engine.runner import Runner
from kvxfer.engine.sampling import SamplingParams
from kvxfer.errors import ClosedError, GrantReleasedError, KvxferError, OverloadedError, PeerGoneError
from kvxfer.types import GrantState
from tests.support.engine.engine_harness import answer, greedy, legs, make_prompt, new_id, prefill, reference, running
from tests.support.engine.fake_agent import World

LENGTHS = (1, 15, 16, 17, 33, 200)
COUNT = 24


@pytest.mark.parametrize("chunk_tokens", [16, 37, 4096])
async def test_local_answers_equal_transformers(tiny_model, chunk_tokens):
    async with running(tiny_model, None, "both", chunk_tokens=chunk_tokens, max_batch_tokens=4096) as worker:
        for length in LENGTHS:
            prompt = make_prompt(length)
            tokens, _, outcome = await answer(worker.engine, Request("r", prompt, greedy(COUNT)))
            assert tokens == reference(tiny_model, prompt, COUNT)
            assert (outcome.prompt_tokens, outcome.completion_tokens) == (length, COUNT)


async def test_a_repeated_prompt_comes_from_the_prefix_cache(tiny_model):
    async with running(tiny_model, None, "both") as worker:
        prompt = make_prompt(65)
        first, _, cold = await answer(worker.engine, Request("r", prompt, greedy(COUNT)))
        second, _, warm = await answer(worker.engine, Request("r", prompt, greedy(COUNT)))
        assert first == second
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 64)
        longer = prompt + tuple(first) + make_prompt(9)
        third, _, grown = await answer(worker.engine, Request("r", longer, greedy(COUNT)))
        assert grown.cached_tokens == 80, "generated blocks are cached too"
        assert third == reference(tiny_model, longer, COUNT)


@pytest.mark.parametrize("chunk_tokens", [32, 4096])
async def test_prefill_and_decode_equal_local(world, tiny_model, chunk_tokens):
    limits = {"chunk_tokens": chunk_tokens, "max_batch_tokens": 4096}
    async with (
        running(tiny_model, world, "p", digests=True, **limits) as p,
        running(tiny_model, world, "d", digests=True) as d,
    ):
        for length in LENGTHS:
            prompt = make_prompt(length)
            prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
            done, (tokens, _, outcome) = await asyncio.gather(
                prefill(p.engine, prefill_leg), answer(d.engine, decode_leg)
            )
            assert tokens == reference(tiny_model, prompt, COUNT)
            assert done.prompt_tokens == length
            report = outcome.report
            assert report.failure is None
            assert report.prefill == ("local" if length == 1 else "remote")
            assert report.blocks_moved == -(-(length - 1) // 16)
            assert report.bytes_moved == report.blocks_moved * p.pool.block_bytes
            if length > 1:
                moved = await world.agents["d"].transfers[-1]
                assert report.bytes_before_prefill_end == moved.bytes_before_complete
            if length == 200:  # how much of it was copied as early is the race of two threads
                early = world.grants[prefill_leg.remote.transfer_id].ready_early
                assert early == (0 if chunk_tokens == 4096 else 12)
                assert report.bytes_before_prefill_end <= early * p.pool.block_bytes
            if length > 1:
                name = str(prefill_leg.remote.transfer_id)
                source = p.digests.as_dict()[f"{name}/source"]
                destination = d.digests.as_dict()[f"{name}/destination"]
                assert source["blocks"] == destination["blocks"]
                assert len(source["blocks"]) == report.blocks_moved
                assert len(source["blocks"][0]) == tiny_model.layers
    assert not world.breaches
    assert world.granted == 0


async def test_nothing_is_announced_before_a_late_device_has_written_it(tiny_model, monkeypatch):
    """What a forward writes is in the source's pool only once ``wait_written`` returns, as on a GPU."""
    world, forward, late = World(), Runner.forward, []

    def forward_late(runner, chunks):
        before = runner.storage.clone()
        logits = forward(runner, chunks)
        if runner is p.executor.runner:
            changed = runner.storage != before
            late.append((runner.storage[changed], changed))
            runner.storage[changed] = before[changed]
        return logits

    def write(runner):
        while runner is p.executor.runner and late:
            values, changed = late.pop()
            runner.storage[changed] = values

    monkeypatch.setattr(Runner, "forward", forward_late)
    monkeypatch.setattr(Runner, "wait_written", write)
    async with running(tiny_model, world, "p", chunk_tokens=32) as p, running(tiny_model, world, "d") as d:
        prompt = make_prompt(200)
        prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
        _, (tokens, _, outcome) = await asyncio.gather(prefill(p.engine, prefill_leg), answer(d.engine, decode_leg))
        assert outcome.report.prefill == "remote"
        assert tokens == reference(tiny_model, prompt, COUNT)
    assert not world.breaches


async def test_one_corrupted_block_shows_in_the_digests_and_in_the_answer(world, tiny_model):
    async with running(tiny_model, world, "p", digests=True) as p, running(tiny_model, world, "d", digests=True) as d:
        prompt = make_prompt(100)
        prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
        transfer_id = prefill_leg.remote.transfer_id
        await prefill(p.engine, prefill_leg)
        grant = world.grants[transfer_id]
        p.pool.array[grant.blocks[2]].view("float32")[:] *= -1
        tokens, _, _ = await answer(d.engine, decode_leg)
        source = p.digests.as_dict()[f"{transfer_id}/source"]["blocks"]
        destination = d.digests.as_dict()[f"{transfer_id}/destination"]["blocks"]
        assert [at for at in range(7) if source[at] != destination[at]] == [2]
        assert tokens != reference(tiny_model, prompt, COUNT)
    assert world.breaches, "the fake notices the change of a granted block"


async def test_the_second_turn_pulls_only_the_tail(world, tiny_model):
    async with running(tiny_model, world, "p", digests=True) as p, running(tiny_model, world, "d", digests=True) as d:
        prompt = make_prompt(70)
        prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
        _, (tokens, _, _) = await asyncio.gather(prefill(p.engine, prefill_leg), answer(d.engine, decode_leg))
        longer = prompt + tuple(tokens) + make_prompt(40, seed=1)
        prefill_leg, decode_leg = legs(longer, greedy(COUNT))
        done, (tokens, _, outcome) = await asyncio.gather(prefill(p.engine, prefill_leg), answer(d.engine, decode_leg))
        assert tokens == reference(tiny_model, longer, COUNT)
        assert done.cached_tokens == 64
        assert outcome.cached_tokens == 80
        assert outcome.report.blocks_moved == 9 - 5
        name = str(prefill_leg.remote.transfer_id)
        destination = d.digests.as_dict()[f"{name}/destination"]
        assert destination["first"] == 5
        assert p.digests.as_dict()[f"{name}/source"]["blocks"][5:] == destination["blocks"]
    assert not world.breaches


async def test_a_wholly_cached_prompt_still_pulls_a_block_and_releases_the_grant(world, tiny_model):
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d") as d:
        prompt = make_prompt(65)
        for _ in range(2):
            prefill_leg, decode_leg = legs(prompt, greedy(4))
            done, (tokens, _, outcome) = await asyncio.gather(
                prefill(p.engine, prefill_leg), answer(d.engine, decode_leg)
            )
            assert tokens == reference(tiny_model, prompt, 4)
        assert done.cached_tokens == 64
        assert outcome.report.blocks_moved == 1
        await p.check_idle()
    assert world.granted == 0


async def test_eight_at_once(world, tiny_model):
    async with running(tiny_model, world, "p", chunk_tokens=32) as p, running(tiny_model, world, "d") as d:
        prompts = [make_prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 33, 90, 120, 200))]
        pairs = [legs(prompt, greedy(COUNT)) for prompt in prompts]
        answers = await asyncio.gather(
            *(answer(d.engine, decode_leg) for _, decode_leg in pairs),
            *(prefill(p.engine, prefill_leg) for prefill_leg, _ in pairs),
        )
        for prompt, (tokens, _, _) in zip(prompts, answers, strict=False):
            assert tokens == reference(tiny_model, prompt, COUNT)
    assert not world.breaches


async def test_a_failed_pull_is_recomputed_in_other_blocks_until_drained(world, tiny_model):
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d") as d:
        prompt = make_prompt(100)
        prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
        world.pull_errors[decode_leg.remote.transfer_id] = PeerGoneError("killed")
        world.drains.clear()
        _, (tokens, _, outcome) = await asyncio.gather(prefill(p.engine, prefill_leg), answer(d.engine, decode_leg))
        assert tokens == reference(tiny_model, prompt, COUNT)
        assert outcome.report.prefill == "local"
        assert outcome.report.failure == "peer_gone"
        assert d.executor.pool.statistics().used == 7, "quarantined until drained"
        world.drains.set()
        await d.check_idle()
        world.expire(decode_leg.remote.transfer_id)
        await p.check_idle()
    assert not world.breaches


async def test_a_failed_pull_fails_the_request_where_the_policy_says_so(world, tiny_model):
    async with running(tiny_model, world, "d", on_transfer_failure=FailurePolicy.FAIL) as d:
        request = Request("r", make_prompt(50), greedy(4), Leg.DECODE, OtherLeg(new_id(), "absent"))
        with pytest.raises(PeerGoneError):
            await answer(d.engine, request)


async def test_a_grant_that_expired_before_the_pull_is_recomputed(world, tiny_model):
    async with running(tiny_model, world, "p", chunk_tokens=16) as p, running(tiny_model, world, "d") as d:
        prompt = make_prompt(150)
        prefill_leg, decode_leg = legs(prompt, greedy(COUNT))
        await prefill(p.engine, prefill_leg)
        world.expire(prefill_leg.remote.transfer_id)
        await p.check_idle()
        reuse, _, _ = await answer(p.engine, Request("other", make_prompt(500), greedy(4)))
        assert reuse
        tokens, _, outcome = await answer(d.engine, decode_leg)
        assert tokens == reference(tiny_model, prompt, COUNT)
        assert outcome.report.failure == "grant_expired"


async def test_a_grant_that_expires_while_its_prompt_is_computed_ends_the_leg(world, tiny_model):
    async with running(tiny_model, world, "p", chunk_tokens=16) as p:
        prefill_leg, _ = legs(make_prompt(300), greedy(4))
        world.expire_at_grant.add(prefill_leg.remote.transfer_id)
        with pytest.raises(KvxferError) as caught:
            await prefill(p.engine, prefill_leg)
        assert caught.value.code in ("grant_expired", "grant_revoked")


async def test_blocks_stay_until_the_grant_ends(world, tiny_model):
    async with running(tiny_model, world, "p") as p:
        prefill_leg, _ = legs(make_prompt(100), greedy(4))
        await prefill(p.engine, prefill_leg)
        await asyncio.sleep(0.1)
        assert p.executor.pool.statistics().used == 7
        world.expire(prefill_leg.remote.transfer_id)


async def test_the_pool_grows_over_and_the_youngest_recomputes(tiny_model):
    async with running(tiny_model, None, "both", blocks=12) as worker:
        prompts = [make_prompt(30, seed) for seed in range(4)]
        answers = await asyncio.gather(
            *(answer(worker.engine, Request(f"r{at}", prompt, greedy(60))) for at, prompt in enumerate(prompts))
        )
        for prompt, (tokens, _, _) in zip(prompts, answers, strict=True):
            assert tokens == reference(tiny_model, prompt, 60)
        assert worker.executor.scheduler.statistics().preemptions > 0


async def test_preempting_a_prefill_leg_revokes_its_grant_first(world, tiny_model):
    async with running(tiny_model, world, "p", blocks=16, chunk_tokens=16, max_batch_tokens=17, max_running=8) as p:
        is_ahead = asyncio.Event()

        async def run_local() -> list[int]:
            tokens: list[int] = []
            async with p.engine.submit(Request("local", make_prompt(30), greedy(100))) as generation:
                async for delta in generation:
                    tokens += delta.token_ids
                    if len(tokens) >= 10:  # it wants its next block before the leg, which takes 13 steps, is done
                        is_ahead.set()
            return tokens

        local = asyncio.create_task(run_local())
        await is_ahead.wait()
        prefill_leg, _ = legs(make_prompt(200), greedy(4))
        outcome = await asyncio.gather(prefill(p.engine, prefill_leg), return_exceptions=True)
        tokens = await local
        assert tokens == reference(tiny_model, make_prompt(30), 100)
        grant = world.grants[prefill_leg.remote.transfer_id]
        if isinstance(outcome[0], OverloadedError):
            assert grant.state is GrantState.REVOKED
        grant.end(GrantState.EXPIRED)
    assert not world.breaches


async def test_a_full_queue_is_overloaded(tiny_model):
    async with running(tiny_model, None, "both", blocks=8, max_waiting=2, max_running=1) as worker:
        runs = [answer(worker.engine, Request(f"r{at}", make_prompt(20), greedy(60))) for at in range(6)]
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        assert sum(isinstance(outcome, OverloadedError) for outcome in outcomes) >= 2
        assert any(isinstance(outcome, tuple) for outcome in outcomes)


async def test_the_reader_of_a_leg_that_never_began_does_not_wait(world, tiny_model):
    async with running(tiny_model, world, "p", blocks=16, max_waiting=1) as p, running(tiny_model, world, "d") as d:
        prompts = [make_prompt(200, seed) for seed in range(6)]
        pairs = [legs(prompt, greedy(4)) for prompt in prompts]
        async with asyncio.timeout(world.pull_wait_s / 2):
            done = await asyncio.gather(
                *(prefill(p.engine, prefill_leg) for prefill_leg, _ in pairs),
                *(answer(d.engine, decode_leg) for _, decode_leg in pairs),
                return_exceptions=True,
            )
        assert sum(isinstance(outcome, OverloadedError) for outcome in done[:6]) >= 3
        for prompt, (tokens, _, outcome) in zip(prompts, done[6:], strict=True):
            assert tokens == reference(tiny_model, prompt, 4)
            assert outcome.report.failure in (None, "grant_revoked")
    assert not world.breaches


async def test_stop_lets_the_running_finish_and_refuses_the_new(tiny_model):
    async with running(tiny_model, None, "both") as worker:
        run = asyncio.create_task(answer(worker.engine, Request("r", make_prompt(20), greedy(COUNT))))
        await asyncio.sleep(0)
        stop = asyncio.create_task(worker.engine.stop(20.0))
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            worker.engine.submit(Request("late", make_prompt(20), greedy(4)))
        tokens, _, _ = await run
        assert tokens == reference(tiny_model, make_prompt(20), COUNT)
        await stop


async def test_stop_aborts_what_outlives_the_grace(world, tiny_model):
    async with running(tiny_model, world, "d") as d:
        _, decode_leg = legs(make_prompt(50), greedy(4))
        world.agents["p"] = world.agents["d"]
        run = asyncio.create_task(answer(d.engine, decode_leg))
        long = asyncio.create_task(answer(d.engine, Request("r", make_prompt(20), greedy(900))))
        await asyncio.sleep(0.05)
        await d.engine.stop(0.0)
        for task in (run, long):
            with pytest.raises(ClosedError):
                await task


async def test_stop_strings_seeds_and_lengths(tiny_model):
    async with running(tiny_model, None, "both") as worker:
        prompt = make_prompt(20)
        _, text, _ = await answer(worker.engine, Request("r", prompt, greedy(40)))
        stop = text[10:13]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,))
        tokens, cut, outcome = await answer(worker.engine, Request("r", prompt, params))
        assert cut == text[: text.index(stop)]
        assert len(tokens) < 40
        assert outcome.completion_tokens == len(tokens)
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
        runs = await asyncio.gather(*(answer(worker.engine, Request("r", prompt, params)) for _ in range(3)))
        assert runs[0][0] == runs[1][0] == runs[2][0]


async def test_without_an_agent_remote_legs_are_refused(tiny_model):
    async with running(tiny_model, None, "both") as worker:
        with pytest.raises(KvxferError, match="no agent"):
            await prefill(worker.engine, legs(make_prompt(20), greedy(4))[0])


async def test_a_pulled_sequence_waits_its_turn_with_its_blocks(world, tiny_model):
    limits = {"max_running": 2, "max_batch_tokens": 64, "chunk_tokens": 64}
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d", **limits) as d:
        prompts = [make_prompt(40, seed) for seed in range(6)]
        pairs = [legs(prompt, greedy(COUNT)) for prompt in prompts]
        answers = await asyncio.gather(
            *(answer(d.engine, decode_leg) for _, decode_leg in pairs),
            *(prefill(p.engine, prefill_leg) for prefill_leg, _ in pairs),
        )
        for prompt, (tokens, _, outcome) in zip(prompts, answers, strict=False):
            assert tokens == reference(tiny_model, prompt, COUNT)
            assert outcome.report.prefill == "remote"
    assert not world.breaches


async def test_failed_forward_pass_ends_only_its_own_requests(world, tiny_model, monkeypatch):
    async with running(tiny_model, world, "p") as p:
        forward = p.executor.runner.forward
        threads = set()

        def broken(chunks):
            threads.add(threading.current_thread().name)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(p.executor.runner, "forward", broken)
        prefill_leg, _ = legs(make_prompt(40), greedy(4))
        with pytest.raises(KvxferError, match="out of memory"):
            await prefill(p.engine, prefill_leg)
        assert world.grants[prefill_leg.remote.transfer_id].state is GrantState.REVOKED
        with pytest.raises(KvxferError, match="out of memory"):
            await answer(p.engine, Request("r", make_prompt(20), greedy(4)))
        monkeypatch.setattr(p.executor.runner, "forward", forward)
        tokens, _, _ = await answer(p.engine, Request("r", make_prompt(40), greedy(4)))
        assert tokens == reference(tiny_model, make_prompt(40), 4)
        assert threads == {"kvxfer-engine"}, "never on the event loop"


async def test_a_dead_engine_thread_answers_everyone_and_refuses_the_next(tiny_model, monkeypatch):
    with contextlib.suppress(AssertionError):
        async with running(tiny_model, None, "both") as worker:
            run = asyncio.create_task(answer(worker.engine, Request("r", make_prompt(20), greedy(900))))
            await asyncio.sleep(0.05)
            monkeypatch.setattr(worker.executor.scheduler, "plan", lambda: 1 / 0)
            with pytest.raises(KvxferError, match="the engine failed"):
                await run
            await asyncio.wait_for(worker.engine.failed.wait(), 5)
            with pytest.raises(ClosedError):
                worker.engine.submit(Request("late", make_prompt(20), greedy(4)))
            await worker.engine.stop(0.1)
            failure = worker.engine.failure
            raise AssertionError("the harness would complain about blocks that the dead engine keeps")
    assert isinstance(failure, ZeroDivisionError)


async def test_prompts_that_are_all_cached_make_room_for_the_next_at_once(world, tiny_model):
    """A step without a token to compute is a step too: a request that waits behind it must not wait for a grant to
    end."""
    async with running(tiny_model, world, "p", max_running=1) as p:
        prompt = make_prompt(33)
        await answer(p.engine, Request("warm", prompt, greedy(1)))
        begun = threading.Event()
        p.engine.call(lambda: begun.wait(10.0) and None)
        asked = [legs(prompt, greedy(1))[0] for _ in range(4)]
        waiting = [asyncio.create_task(prefill(p.engine, leg)) for leg in asked]
        await asyncio.sleep(0.05)
        begun.set()
        done = await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
        assert [outcome.cached_tokens for outcome in done] == [32] * 4
        for leg in asked:
            world.grants[leg.remote.transfer_id].release()


async def test_two_sides_that_tokenised_differently_do_not_meet(world, tiny_model):
    """A chat template that asks the clock, say: P's blocks are not those of D's prompt, however many there are."""
    async with running(tiny_model, world, "p") as p, running(tiny_model, world, "d") as d:
        ours, theirs = make_prompt(100), make_prompt(100, seed=1)
        _, decode_leg = legs(ours, greedy(COUNT))
        prefill_leg, _ = legs(theirs, greedy(COUNT))
        prefill_leg = dataclasses.replace(
            prefill_leg, remote=dataclasses.replace(prefill_leg.remote, transfer_id=decode_leg.remote.transfer_id)
        )
        done, (tokens, _, outcome) = await asyncio.gather(
            prefill(p.engine, prefill_leg), answer(d.engine, decode_leg), return_exceptions=True
        )
        assert tokens == reference(tiny_model, ours, COUNT)
        assert outcome.report.failure == "incompatible"
        assert isinstance(done, PrefillOutcome | GrantReleasedError), "released when all is computed, or before"
