"""What is presumed in workers' caches: beside a plain cache, and within its bounds."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.policy.prefixes import Chain, Prefixes
from kvxfer.types import AgentRef, Incarnation

STEP = 100


def ref(name: str) -> AgentRef:
    return AgentRef(name, Incarnation(1, bytes(16)))


def chain(text: str) -> Chain:
    """A prompt of letters: a key stands for all letters up to it."""
    return Chain([hash(text[:at]) for at in range(1, len(text) + 1)], [STEP * at for at in range(1, len(text) + 1)])


class Lru:
    """The cache that a worker is presumed to have."""

    def __init__(self, keys: int) -> None:
        self.keys, self.order = keys, OrderedDict[str, None]()

    def held(self, text: str) -> int:
        return STEP * next((at for at in range(len(text), 0, -1) if text[:at] in self.order), 0)

    def insert(self, text: str) -> None:
        for at in range(len(text), 0, -1):
            self.order[text[:at]] = None
            self.order.move_to_end(text[:at])
        while len(self.order) > self.keys:
            self.order.popitem(last=False)


TEXTS = st.text("ab", min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from("pqr"), TEXTS), max_size=60), st.integers(6, 20))
def test_it_presumes_what_a_cache_of_that_size_holds(given_: list[tuple[str, str]], keys: int) -> None:
    prefixes, caches = Prefixes(), {name: Lru(keys) for name in "pqr"}
    for name, text in given_:
        expected = {ref(n): cache.held(text) for n, cache in caches.items() if cache.held(text)}
        assert prefixes.held(chain(text)).sizes == expected
        prefixes.insert(ref(name), chain(text), keys * STEP)
        caches[name].insert(text)
    assert prefixes.facts == sum(len(cache.order) for cache in caches.values())


@given(st.lists(st.tuples(st.sampled_from("pqr"), TEXTS, st.booleans()), max_size=60), st.integers(1, 12))
def test_the_limit_is_hard_and_a_lost_worker_holds_nothing(ops: list[tuple[str, str, bool]], limit: int) -> None:
    prefixes = Prefixes(limit)
    for name, text, is_lost in ops:
        if is_lost:
            prefixes.forget(ref(name))
            assert ref(name) not in prefixes.held(chain(text)).sizes
        else:
            prefixes.insert(ref(name), chain(text), 1e9)
        assert prefixes.facts <= limit
        assert sum(1 for key in prefixes._by_key) <= limit
    for name in "pqr":
        prefixes.forget(ref(name))
    for _ in range(200):
        prefixes.insert(ref("new"), chain("b"), 1e9)
    assert prefixes.facts == len(prefixes._by_key) == min(1, limit)


@pytest.mark.parametrize("count", [100_000, pytest.param(10_000_000, marks=pytest.mark.nightly)])
def test_random_insertions_stay_within_the_limit(count: int) -> None:
    prefixes, draw, limit = Prefixes(10_000), random.Random(1), 10_000
    for number in range(count // 4):
        keys = [draw.getrandbits(64) for _ in range(4)]
        prefixes.insert(ref(f"w{number % 50}"), Chain(keys, [2048, 4096, 6144, 8192]), 1e12)
        assert prefixes.facts <= limit
    assert len(prefixes._by_key) <= limit


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.25, 0.5]))
def test_answers_teach_how_far_back_a_cache_reaches(seed: int, part: float) -> None:
    """A worker holds a part of what it says, because others use it too: presumptions become true again."""
    keys, draw = 400, random.Random(seed)
    cache, prefixes, wrong = Lru(round(keys * part)), Prefixes(), [0, 0]
    for number in range(1200):
        text = "".join(draw.choice("abc") for _ in range(1)) + f"{draw.randrange(60):02}" + "xyz"
        one = Chain([hash(text[:at]) for at in range(1, 7)], [STEP * at for at in range(1, 7)])
        presumed, delivered = prefixes.held(one).sizes.get(ref("p"), 0), cache.held(text)
        wrong[number >= 600] += presumed - delivered >= 2 * STEP
        prefixes.insert(ref("p"), one, keys * STEP)
        prefixes.correct(ref("p"), one, presumed, delivered)
        cache.insert(text)
    assert wrong[1] <= 0.25 * 600
    assert wrong[1] <= wrong[0] + 30
