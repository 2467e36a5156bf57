"""The pure half of the engine, without a model: what it plans, and that no plan writes where somebody else reads."""

from __future__ import annotations

import random

import pytest
from engine_harness import greedy, legs, make_prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.engine.pool import BlockPool
from kvxfer.engine.request import Leg, Phase, Request, Sequence, blocks_for
from kvxfer.engine.scheduler import Scheduler, SchedulerLimits
from kvxfer.errors import ConfigError, Overloaded

TOKENS = 4


def local(length, count=8, seed=0):
    return Sequence(Request("r", make_prompt(length, seed), greedy(count)))


def make(blocks=32, **limits):
    values = {"max_batch_tokens": 16, "chunk_tokens": 8, "max_running": 4, "max_waiting": 8, **limits}
    return Scheduler(BlockPool(blocks, TOKENS), SchedulerLimits(**values))


def run(scheduler, plan):
    """What the engine does with a plan, with a made-up next token."""
    for item in plan.work:
        scheduler.advance(item.sequence, item.count)
        if item.need_logits:
            item.sequence.tokens.append(7)


def test_prompts_are_cut_into_chunks_and_share_the_budget():
    scheduler = make()
    first, second = local(20), local(20, seed=1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan()
    assert [(item.sequence, item.start, item.count) for item in plan.work] == [(first, 0, 8), (second, 0, 8)]
    assert plan.admitted == (first, second)
    assert not any(item.need_logits for item in plan.work)
    run(scheduler, plan)
    run(scheduler, scheduler.plan())
    plan = scheduler.plan()
    assert [(item.start, item.count, item.need_logits) for item in plan.work] == [(16, 4, True), (16, 4, True)]


def test_decoding_goes_first_and_leaves_the_rest_to_prompts():
    scheduler = make(max_batch_tokens=8)
    old, new = local(3), local(30, seed=1)
    scheduler.add(old)
    run(scheduler, scheduler.plan())
    scheduler.add(new)
    plan = scheduler.plan()
    assert [(item.sequence, item.count) for item in plan.work] == [(old, 1), (new, 7)]


def test_the_queue_is_bounded_and_admission_keeps_its_order():
    scheduler = make(blocks=10, max_waiting=3)
    big, small = local(36), local(4, seed=1)
    scheduler.add(local(20, seed=2))
    scheduler.plan()
    scheduler.add(big)
    scheduler.add(small)
    assert scheduler.plan().admitted == ()
    scheduler.add(local(4))
    with pytest.raises(Overloaded, match="max_waiting is 3"):
        scheduler.add(local(4))


def test_a_prefill_leg_takes_no_block_for_the_last_token():
    for length in range(2, 14):
        scheduler = make()
        sequence = Sequence(legs(make_prompt(length), greedy(4))[0])
        scheduler.add(sequence)
        scheduler.plan()
        assert len(sequence.blocks) == blocks_for(length - 1, TOKENS)


def test_a_decode_leg_computes_only_its_last_token():
    for length in range(2, 14):
        scheduler = make()
        sequence = Sequence(legs(make_prompt(length), greedy(4))[1])
        scheduler.add(sequence)
        assert scheduler.plan().work == ()
        assert sequence.phase is Phase.PULLING
        scheduler.pulled(sequence)
        (item,) = scheduler.plan().work
        assert (item.start, item.count, item.need_logits) == (length - 1, 1, True)
        assert len(sequence.blocks) == blocks_for(length, TOKENS)


def test_blocks_of_a_failed_pull_stay_used_until_drained():
    scheduler = make()
    sequence = Sequence(legs(make_prompt(13), greedy(4))[1])
    scheduler.add(sequence)
    scheduler.plan()
    key = scheduler.detach(sequence)
    assert scheduler.pool.statistics().used == 3
    assert not scheduler.is_empty
    scheduler.plan()
    assert sequence.phase is Phase.COMPUTING
    assert scheduler.pool.statistics().used == 3 + 4
    scheduler.end(sequence)
    scheduler.drained(key)
    assert scheduler.is_empty
    assert scheduler.pool.statistics().used == 0


def test_the_youngest_is_preempted_before_the_old_one_starves():
    order = []
    scheduler = make(blocks=6)
    scheduler._before_preemption = order.append
    old, young = local(8, 40), local(8, 40, seed=1)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(30):
        plan = scheduler.plan()
        run(scheduler, plan)
        if plan.preempted:
            break
    assert plan.preempted == (young,)
    assert order == [young]
    assert young.phase is Phase.WAITING
    assert old.phase is Phase.COMPUTING
    scheduler.end(old)
    plan = scheduler.plan()
    assert plan.admitted == (young,)
    assert young.computed > 0, "what it had computed was still cached"


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        SchedulerLimits(max_batch_tokens=2, max_running=4)
    with pytest.raises(ConfigError, match="chunk_tokens"):
        SchedulerLimits(chunk_tokens=0)


@settings(max_examples=60, deadline=None)
@example(seed=466, blocks=12)  # one that was preempted waits beside as many as may
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(12, 40))
def test_no_plan_writes_where_somebody_else_reads(seed, blocks):
    rng = random.Random(seed)
    revoked = set()
    scheduler = make(blocks=blocks, max_batch_tokens=rng.randint(4, 20), chunk_tokens=rng.randint(1, 12))
    scheduler._before_preemption = revoked.add
    pool, keys = scheduler.pool, []
    for step in range(120):
        if rng.random() < 0.3:
            prompt = make_prompt(rng.randint(2, 24), rng.randint(0, 2))[: rng.randint(2, 24)]
            params = greedy(rng.randint(1, 12))
            sequence = Sequence(
                rng.choice((Request("r", prompt, params), *legs(prompt, params))), submitted_s=float(step)
            )
            try:
                scheduler.add(sequence)
            except Overloaded:
                now = scheduler.statistics()
                assert 8 <= now.waiting <= 8 + now.preemptions
        plan = scheduler.plan()
        assert sum(item.count for item in plan.work) <= scheduler.limits.max_batch_tokens
        assert len({item.sequence for item in plan.work}) == len(plan.work) <= 4
        written = set()
        for item in plan.work:
            sequence = item.sequence
            assert sequence.phase is Phase.COMPUTING
            assert item.start == sequence.computed
            assert 0 < item.count <= scheduler.limits.chunk_tokens
            assert item.start + item.count <= len(sequence.blocks) * TOKENS
            for position in range(item.start, item.start + item.count):
                block = sequence.blocks[position // TOKENS]
                assert pool.references(block) == 1, "a shared block is written"
                assert pool._digests[block] is None, "a published block is written"
                written.add((block, position % TOKENS))
        assert len(written) == sum(item.count for item in plan.work), "two sequences write one place"
        run(scheduler, plan)
        for sequence in scheduler.sequences():
            if sequence.phase is Phase.PULLING and rng.random() < 0.4:
                if rng.random() < 0.3:
                    keys.append(scheduler.detach(sequence))
                else:
                    scheduler.pulled(sequence)
            elif sequence.phase is Phase.COMPUTING and sequence.leg is Leg.PREFILL and sequence.remaining == 0:
                scheduler.hold(sequence)
            elif (
                len(sequence.generated) >= sequence.request.params.max_tokens
                or (sequence.phase is not Phase.PULLING and rng.random() < 0.02)
                or (sequence.phase is Phase.HOLDING and rng.random() < 0.3)
            ):
                scheduler.end(sequence)
        if keys and rng.random() < 0.5:
            scheduler.drained(keys.pop(rng.randrange(len(keys))))
        pool.check_integrity()
    for sequence in scheduler.sequences():
        if sequence.phase is Phase.PULLING:
            keys.append(scheduler.detach(sequence))
        scheduler.end(sequence)
    for key in keys:
        scheduler.drained(key)
    assert scheduler.is_empty
    assert pool.statistics().used == 0
    pool.check_integrity()
