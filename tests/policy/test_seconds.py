"""The policy ``seconds``: the cheapest of all, by times that it learnt, whatever workers say."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.policy.candidates import have_equal_pools
from kvxfer.policy.chooser import Chooser, Policy, Prompt
from kvxfer.policy.place import PlaceReason, place
from kvxfer.policy.search import best_pair, ranked
from kvxfer.policy.seconds import Seconds
from kvxfer.types import Role
from tests.policy.small_world import (
    BLOCK,
    TRUE_CURVE,
    Engine,
    Request,
    World,
    cluster,
    hot_prefix,
    no_sharing,
    percentile,
    sessions,
)

SOME = 400


def p90(engines: list[Engine], requests: list[Request], policy: Policy, **world: Any) -> float:
    return percentile(World(engines, policy, **world).run(requests), 0.9, skip=SOME // 8)


def busy(engines: list[Engine]) -> list[float]:
    return [engine.busy_s for engine in engines if engine.role is Role.PREFILL]


@given(st.integers(0, 1000), st.sampled_from([0.125, 16.0, 1024.0]), st.booleans())
@settings(max_examples=6)
def test_all_times_scaled_are_the_same_choices(seed: int, scale: float, weighs_alone: bool) -> None:
    """By powers of two, which no rounding tells apart from 1.0."""
    chosen = []
    for times in (1.0, scale):
        engines = [*cluster(3, 2, cache=40 * BLOCK), Engine("slow", Role.PREFILL, factor=3.0)]
        made = World(engines, Policy.SECONDS, scale=times, seed=seed, weighs_alone=weighs_alone).run(
            sessions(12, 8, 12.0, seed)
        )
        chosen.append([(one.prefill, one.decode) for one in made])
    assert chosen[0] == chosen[1]


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_it_is_the_least_of_all_pairs_and_of_all_that_decode_alone(seed: int) -> None:
    draw = random.Random(seed)
    world = World(cluster(4, 3), Policy.SECONDS, seed=seed)
    world.run(sessions(4, 5, 20.0, seed))
    times = world.chooser.times
    for engine in world.engines.values():
        times.worker(engine.ref).line.add(1 << 30, draw.uniform(0, 1), 1e3, 0.1)
        engine.decoding = draw.randrange(4)
    prompt = Prompt("m", 0.0, (chain := draw.choice(sessions(4, 5, 20.0, seed)).chain).size, chain)
    scores = Seconds(times, world.chooser.facts(prompt), 1e3)
    candidates = [engine.candidate() for engine in world.engines.values()]
    sources = [one for one in candidates if one.member.info.role is Role.PREFILL]
    decoders = [one for one in candidates if one.member.info.role is Role.DECODE]
    amounts = {
        (s.agent_id, d.agent_id): scores.prefill(s).amount
        + scores.decode(d).amount
        + scores.between(s, d, is_equal=have_equal_pools(s.member, d.member)).amount
        for s, d in itertools.product(sources, decoders)
    }
    found, _ = best_pair(ranked(sources, scores.prefill, seed), ranked(decoders, scores.decode, 0), scores, frozenset())
    assert found is not None
    assert found.cost.amount == pytest.approx(min(amounts.values()))
    alone = min(scores.alone(one).amount for one in decoders)
    placed = place(candidates, model="m", tie_break=seed, scores=scores)
    assert (placed.prefill is None) == (alone <= min(amounts.values()))
    assert placed.reason is (PlaceReason.REMOTE if placed.prefill is not None else PlaceReason.CHEAPER_ALONE)


def test_nothing_learnt_is_least_loaded() -> None:
    engines = cluster(4, 4)
    for at, engine in enumerate(engines):
        engine.prefilling = engine.decoding = at % 4
    candidates = [engine.candidate() for engine in engines]
    for tie in range(4):
        placed = place(
            candidates,
            model="m",
            tie_break=tie,
            scores=Chooser(Policy.SECONDS).scores(Prompt("m", 100.0), 0.0),
        )
        assert placed == place(candidates, model="m", tie_break=tie)


def test_the_next_turn_goes_where_the_last_one_was() -> None:
    made = World(cluster(4, 2), Policy.SECONDS, weighs_alone=False).run(sessions(20, 10, 4.0))
    blind = World(cluster(4, 2), Policy.LEAST_LOADED).run(sessions(20, 10, 4.0))
    cached, without = (sum(one.cached for one in run) for run in (made, blind))
    possible = sum(one.tokens for one in made)
    assert cached > 0.8 * possible > without


def test_a_hot_prefix_comes_to_all_and_makes_no_worker_hot() -> None:
    engines = cluster(4, 2)
    made = World(engines, Policy.SECONDS, weighs_alone=False).run(hot_prefix(SOME, 8.0))
    assert len({one.prefill for one in made if one.blocks[0] == "hot-0"}) == 4
    assert max(busy(engines)) <= 1.5 * sum(busy(engines)) / 4
    assert p90(cluster(4, 2), hot_prefix(SOME, 8.0), Policy.SECONDS, weighs_alone=False) <= 1.15 * p90(
        cluster(4, 2), hot_prefix(SOME, 8.0), Policy.LEAST_LOADED
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighs_alone", [True, False])
def test_without_sharing_it_costs_nothing(seed: int, weighs_alone: bool) -> None:
    ours = p90(cluster(2, 2), no_sharing(SOME, 4.0, seed), Policy.SECONDS, weighs_alone=weighs_alone)
    assert ours <= 1.1 * p90(cluster(2, 2), no_sharing(SOME, 4.0, seed), Policy.LEAST_LOADED)


def test_a_fast_worker_gets_more_and_the_slow_one_does_not_starve() -> None:
    engines = [Engine("fast", Role.PREFILL, factor=0.5), Engine("slow", Role.PREFILL), *cluster(0, 2)]
    made = World(engines, Policy.SECONDS, weighs_alone=False).run(no_sharing(SOME, 4.0))
    shares = [sum(one.prefill == name for one in made[SOME // 4 :]) for name in ("fast", "slow")]
    assert shares[0] > 1.2 * shares[1] > 0.15 * SOME


def test_a_slow_worker_that_is_mended_is_found_out() -> None:
    engines = [Engine("was slow", Role.PREFILL, factor=6.0), Engine("p", Role.PREFILL), *cluster(0, 2)]
    world = World(engines, Policy.SECONDS, weighs_alone=False)
    world.run(no_sharing(SOME, 3.0))
    engines[0].factor = 1.0
    later = no_sharing(SOME, 4.5, seed=1)
    for one in later:
        one.at_s += 1000.0
    made = world.run(later)
    assert sum(one.prefill == "was slow" for one in made[SOME // 2 :]) > 0.3 * SOME / 2


@pytest.mark.parametrize("lie", [lambda _: 10**9, lambda _: 0, lambda cached: cached // 2], ids=["all", "none", "half"])
def test_a_worker_that_lies_about_its_cache_harms_nobody(lie: Any) -> None:
    engines = [Engine("liar", Role.PREFILL, lie=lie), Engine("p", Role.PREFILL), *cluster(0, 2)]
    made = World(engines, Policy.SECONDS, weighs_alone=False).run(sessions(40, 12, 8.0))
    shares = [sum(one.prefill == name for one in made) for name in ("liar", "p")]
    assert min(shares) > 0.1 * len(made)
    honest = percentile(World(cluster(2, 2), Policy.LEAST_LOADED).run(sessions(40, 12, 8.0)), 0.9, skip=50)
    assert percentile(made, 0.9, skip=50) <= 1.25 * honest


def test_one_paced_stream_of_unlike_prompts_takes_turns() -> None:
    engines = cluster(2, 2)
    made = World(engines, Policy.SECONDS, weighs_alone=False).run(
        [Request(float(at), (f"one-{at}", f"two-{at}")) for at in range(200)]
    )
    shares = [sum(one.prefill == name for one in made[20:]) for name in ("p0", "p1")]
    assert 0.45 * 180 <= shares[0] <= 0.55 * 180
    assert sum(shares) == 180


def test_the_estimate_is_the_time_that_it_takes() -> None:
    made = World(cluster(2, 2), Policy.SECONDS, weighs_alone=False).run(sessions(30, 10, 5.0))[100:]
    errors = sorted(abs(one.predicted_s - one.ttft_s) / one.ttft_s for one in made if one.predicted_s is not None)
    assert len(errors) == len(made)
    assert errors[len(errors) // 2] <= 0.2


def test_a_short_prompt_is_computed_where_it_is_decoded_and_a_long_one_is_not() -> None:
    engines = cluster(2, 2)
    world = World(engines, Policy.SECONDS)
    world.run(no_sharing(SOME, 2.0))
    for engine in engines:
        engine.decoding = 20 * (engine.role is Role.DECODE)
    candidates = [engine.candidate() for engine in engines]

    def placed(tokens: float) -> PlaceReason:
        scores = world.chooser.scores(Prompt("m", tokens), 1e6)
        return place(candidates, model="m", tie_break=0, scores=scores).reason

    assert placed(20_000) is PlaceReason.REMOTE
    for engine in engines:
        engine.decoding = 0
    candidates = [engine.candidate() for engine in engines]
    assert placed(20) is PlaceReason.CHEAPER_ALONE


def test_a_lost_worker_is_forgotten_and_its_requests_end_quietly() -> None:
    engines = cluster(2, 1)
    chooser = Chooser(Policy.SECONDS)
    candidates = [engine.candidate() for engine in engines]
    prompt = Prompt("m", 100.0, 400.0, Request(0.0, ("a", "b")).chain)
    placed = place(candidates, model="m", tie_break=0, scores=chooser.scores(prompt, 0.0))
    source = next(one for one in candidates if placed.prefill is one.member)
    choice = chooser.chosen(prompt, placed, source, candidates[2], 0.0)
    assert chooser.facts(prompt).held
    chooser.forget(source.member.ref)
    chooser.forget(candidates[2].member.ref)
    assert not chooser.facts(prompt).held
    choice.prefilled(1.0, tokens=100, cached=3)
    choice.first_token(2.0)
    choice.answered(3.0)
    choice.over(4.0)
    choice.over(5.0)
    assert chooser.times.worker(source.member.ref).line.wait_s(5.0) == 0.0


def test_what_is_lost_is_waited_for_by_nobody() -> None:
    engines = cluster(1, 1)
    world = World(engines, Policy.SECONDS)
    world.run(no_sharing(20, 1.0))
    candidates = [engine.candidate() for engine in engines]
    prompt = Prompt("m", 5000.0)
    placed = place(candidates, model="m", tie_break=0, scores=world.chooser.scores(prompt, 1e3))
    choice = world.chooser.chosen(prompt, placed, candidates[0], candidates[1], 1e3)
    worker = world.chooser.times.worker(engines[0].ref)
    assert worker.line.wait_s(1e3) == pytest.approx(TRUE_CURVE.seconds(5000.0), rel=0.1)
    choice.over(1e3 + 0.1)
    assert worker.line.wait_s(1e3 + 0.1) == 0.0
    assert world.chooser.times.worker(engines[1].ref).decoding == 0
