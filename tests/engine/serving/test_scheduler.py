"""The pure half of the engine, without a model: what it plans, and that no plan writes where another request reads."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.engine.pool import BlockPool
from kvxfer.engine.request import Leg, Phase, Request, Sequence, blocks_for
from kvxfer.engine.scheduler import Plan, Scheduler, SchedulerLimits
from kvxfer.errors import ConfigError, OverloadedError
from tests.support.engine.engine_harness import greedy, legs, make_prompt

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
    with pytest.raises(OverloadedError, match="max_waiting is 3"):
        scheduler.add(local(4))
    for _ in range(3):
        scheduler.add(decode(4))  # those that ask do not count
    with pytest.raises(OverloadedError, match="max_waiting is 3"):
        scheduler.add(decode(4))


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
        assert sequence.phase is Phase.ASKING
        scheduler.granted(sequence)
        assert scheduler.plan() == Plan((), (sequence,), ())
        assert sequence.phase is Phase.PULLING
        scheduler.pulled(sequence)
        (item,) = scheduler.plan().work
        assert (item.start, item.count, item.need_logits) == (length - 1, 1, True)
        assert len(sequence.blocks) == blocks_for(length, TOKENS)


def test_blocks_of_a_failed_pull_stay_used_until_drained():
    scheduler = make()
    sequence = Sequence(legs(make_prompt(13), greedy(4))[1])
    scheduler.add(sequence)
    scheduler.granted(sequence)
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
def test_plan_never_writes_blocks_that_another_request_reads(seed, blocks):
    rng = random.Random(seed)
    revoked = set()
    scheduler = make(blocks=blocks, max_batch_tokens=rng.randint(4, 20), chunk_tokens=rng.randint(1, 12))
    scheduler._before_preemption = revoked.add
    scheduler._take_back = lambda _: rng.random() < 0.8
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
            except OverloadedError:
                now = scheduler.statistics()
                assert (now.asking + now.granted if sequence.leg is Leg.DECODE else now.waiting) >= 8
            else:
                if sequence.leg is Leg.DECODE and rng.random() < 0.5:
                    scheduler.allocate_early(sequence)
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
            if sequence.phase is Phase.ASKING and not sequence.blocks and rng.random() < 0.5:
                scheduler.granted(sequence)
            elif sequence.phase.is_remote and rng.random() < 0.4:
                if sequence.phase is Phase.GRANTED or not sequence.blocks or rng.random() < 0.3:
                    keys.append(scheduler.detach(sequence))
                else:
                    scheduler.pulled(sequence)
            elif sequence.phase is Phase.COMPUTING and sequence.leg is Leg.PREFILL and sequence.remaining == 0:
                scheduler.hold(sequence)
            elif (
                len(sequence.generated) >= sequence.request.params.max_tokens
                or (not sequence.phase.is_remote and rng.random() < 0.02)
                or (sequence.phase is Phase.HOLDING and rng.random() < 0.3)
            ):
                scheduler.end(sequence)
        if keys and rng.random() < 0.5:
            scheduler.drained(keys.pop(rng.randrange(len(keys))))
        pool.check_integrity()
    for sequence in scheduler.sequences():
        if sequence.phase.is_remote:
            keys.append(scheduler.detach(sequence))
        scheduler.end(sequence)
    for key in keys:
        scheduler.drained(key)
    assert scheduler.is_empty
    assert pool.statistics().used == 0
    pool.check_integrity()


def decode(length, seed=0):
    return Sequence(legs(make_prompt(length, seed), greedy(4))[1])


def test_those_that_wait_for_their_grants_hold_no_slot():
    scheduler = make(max_running=1, max_waiting=8)
    slow = [decode(9, seed) for seed in range(5)]
    for sequence in slow:
        scheduler.add(sequence)
        scheduler.allocate_early(sequence)
    quick = decode(9, seed=9)
    scheduler.add(quick)
    scheduler.granted(quick)
    assert scheduler.plan().admitted == (quick,)
    assert scheduler.statistics().asking == 5


def test_early_blocks_are_reclaimed_youngest_first():
    scheduler = make(blocks=8)
    taken = []
    scheduler._take_back = lambda sequence: taken.append(sequence) is None
    first, second = decode(12), decode(12, seed=1)
    for sequence in (first, second):
        scheduler.add(sequence)
        assert scheduler.allocate_early(sequence)
    third = decode(12, seed=2)
    scheduler.add(third)
    assert not scheduler.allocate_early(third), "there are none left, and early blocks are not taken for early blocks"
    scheduler.granted(third)
    assert scheduler.plan().admitted == (third,)
    assert taken == [second]
    assert (second.phase, second.blocks) == (Phase.ASKING, [])
    assert first.blocks
    here = local(12, seed=3)
    scheduler.add(here)
    assert scheduler.plan().admitted == (here,)
    assert taken == [second, first]
    scheduler.granted(second)
    assert scheduler.plan().admitted == ()
    assert scheduler.is_short
    scheduler.pool.check_integrity()


def test_early_blocks_are_reclaimed_before_a_preemption():
    scheduler = make(blocks=6)
    old, early = local(8, 40), decode(12, seed=1)
    scheduler.add(old)
    run(scheduler, scheduler.plan())
    scheduler.add(early)
    assert scheduler.allocate_early(early)
    for _ in range(12):
        run(scheduler, scheduler.plan())
    assert early.blocks == []
    assert scheduler.statistics().preemptions == 0


def test_early_blocks_that_are_read_into_stay():
    scheduler = make(blocks=4)
    early = decode(12)
    scheduler.add(early)
    assert scheduler.allocate_early(early)
    scheduler._take_back = lambda _: False
    scheduler.add(local(12, seed=1))
    assert scheduler.plan().admitted == ()
    assert (early.phase, len(early.blocks)) == (Phase.ASKING, 3)
    scheduler.granted(early)
    assert (early.phase, len(early.blocks)) == (Phase.PULLING, 3)
    assert scheduler.will_free, "they are being read into, and given back after the answer"


def test_early_blocks_of_a_pull_that_had_not_begun_are_taken_at_the_next_plan():
    scheduler = make(blocks=4)
    early, here = decode(12), local(12, seed=1)
    scheduler.add(early)
    assert scheduler.allocate_early(early)
    scheduler.add(here)
    has_begun = False
    scheduler._take_back = lambda _: has_begun
    assert scheduler.plan().admitted == ()
    has_begun = True
    assert scheduler.plan().admitted == (here,)
    assert (early.phase, early.blocks) == (Phase.ASKING, [])


def test_the_oldest_is_first_and_prompts_for_others_come_behind_what_is_answered_from_here():
    scheduler = make(blocks=8)
    old, young = local(12), decode(12, seed=1)
    old.submitted_s, young.submitted_s = 3.0, 2.0
    other = Sequence(legs(make_prompt(13, 2), greedy(4))[0], submitted_s=1.0)
    scheduler.add(other)
    scheduler.add(young)
    scheduler.granted(young)
    scheduler.add(old)
    assert scheduler.plan().admitted == (young, old)
    assert not scheduler.is_short, "a prompt for others waits, and nothing that is answered from here"


def test_prompt_for_others_that_does_not_fit_blocks_no_other_request():
    scheduler = make(blocks=4)
    held = Sequence(legs(make_prompt(13), greedy(4))[0])
    scheduler.add(held)
    run(scheduler, scheduler.plan())
    run(scheduler, scheduler.plan())
    scheduler.hold(held)
    scheduler.add(Sequence(legs(make_prompt(13, 1), greedy(4))[0]))
    scheduler.plan()
    assert not scheduler.is_short
    scheduler.add(local(8, seed=2))
    assert scheduler.plan().admitted == ()
    assert scheduler.is_short


def test_a_prompt_for_others_does_not_wait_for_ever_for_those_that_come_later():
    scheduler = make(blocks=4)
    other = Sequence(legs(make_prompt(13), greedy(4))[0], submitted_s=1.0)
    scheduler.add(other)
    for second in range(2, 60):
        one = local(12, seed=second)
        one.submitted_s = float(second)
        scheduler.add(one)
        admitted = scheduler.plan().admitted
        if other in admitted:
            break
        for sequence in admitted:
            scheduler.end(sequence)
    assert 10 <= second <= 13


def test_only_requests_answered_here_free_blocks():
    scheduler = make()
    prefill = Sequence(legs(make_prompt(4), greedy(4))[0])
    scheduler.add(prefill)
    run(scheduler, scheduler.plan())
    assert not scheduler.will_free
    scheduler.hold(prefill)
    assert scheduler.held == [prefill]
    assert not scheduler.will_free
    scheduler.add(local(4, seed=1))
    scheduler.plan()
    assert scheduler.will_free
