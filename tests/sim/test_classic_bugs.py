"""Each classic bug of KV transfer, put back into a test build of the machines, is caught by the simulation within a
stated number of seeds, by the invariant that it breaks; without a bug the same seeds of the same build are clean.

What catches them is the reference models, never an assertion of the machines: another exception fails these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.testing.sim import Invariant, Violation, world

pytestmark = [pytest.mark.checkout, pytest.mark.no_sanitizer]

SEEDS_MAX = 200

CAUGHT_BY = {
    "SKIP_CONFIRM": {Invariant.CONFIRMED, Invariant.NOTIFICATION},
    "VERDICT_BEFORE_LAST_BYTE": {Invariant.CONFIRMED, Invariant.NOTIFICATION},
    "VERDICT_OF_ZERO_COPY": {Invariant.CONFIRMED, Invariant.NOTIFICATION},
    "FREE_BEFORE_DRAIN": {Invariant.RESERVATION},
    "COMMIT_TWICE": {Invariant.ONCE},
    "RENEW_REVIVES": {Invariant.ONCE, Invariant.CONFIRMED},
    "MIX_TWO_SOURCES": {
        Invariant.CONFIRMED,
        Invariant.ONCE,
    },  # ONCE: a push that went to another incarnation of its target
    "PUSH_WITHOUT_OFFER": {Invariant.RESERVATION},
    "NOTIFY_BEFORE_COMMIT": {Invariant.NOTIFICATION},
    "CONFIRM_UNREADABLE": {Invariant.CONFIRMED, Invariant.NOTIFICATION},
    "VERDICT_OF_BEFORE": {Invariant.CONFIRMED, Invariant.NOTIFICATION},
}


@pytest.fixture
def bugs() -> Iterator[Any]:
    from kvxfer._native import _machines_bugs

    yield _machines_bugs
    _machines_bugs.seed_bug(_machines_bugs.Bug.NONE)


def first_violation(machines: Any) -> tuple[int, Violation]:
    for seed in range(SEEDS_MAX):
        try:
            world(seed, machines=machines).run()
        except Violation as violation:
            return seed, violation
    raise AssertionError(f"not caught in {SEEDS_MAX} seeds")


@pytest.mark.parametrize("name", sorted(CAUGHT_BY))
def test_bug_is_caught(bugs: Any, name: str) -> None:
    bugs.seed_bug(getattr(bugs.Bug, name))
    seed, violation = first_violation(bugs)
    assert violation.invariant in CAUGHT_BY[name], f"seed {seed}: {violation}"
    bugs.seed_bug(bugs.Bug.NONE)
    for clean in range(seed + 1):
        world(clean, machines=bugs).run()


def test_without_a_bug_the_test_build_decides_as_production_does(bugs: Any) -> None:
    from kvxfer._native import _core

    for seed in range(20):
        assert world(seed, machines=bugs).run() == world(seed, machines=_core).run()


def test_every_bug_is_listed(bugs: Any) -> None:
    names = {name for name in dir(bugs.Bug) if name.isupper()} - {"NONE"}
    assert names == set(CAUGHT_BY)


def test_a_revived_grant_confirms(bugs: Any) -> None:
    """The worst of RENEW_REVIVES, not only the second end of the grant: an ok after the owner took the blocks back."""
    bugs.seed_bug(bugs.Bug.RENEW_REVIVES)
    for seed in range(2 * SEEDS_MAX):
        try:
            world(seed, machines=bugs).run()
        except Violation as violation:
            if violation.invariant is Invariant.CONFIRMED:
                return
    raise AssertionError("no revived grant confirmed anything")


def test_two_sources_are_truly_mixed(bugs: Any) -> None:
    """The worst of MIX_TWO_SOURCES: one transfer with blocks of two incarnations."""
    bugs.seed_bug(bugs.Bug.MIX_TWO_SOURCES)
    texts = []
    for seed in range(2 * SEEDS_MAX):
        try:
            world(seed, machines=bugs).run()
        except Violation as violation:
            texts.append(str(violation))
            if "was read from incarnation" in texts[-1]:
                return
    raise AssertionError(texts)
