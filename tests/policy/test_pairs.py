"""Ejected pairs: only what lies between two workers that work with others."""

from __future__ import annotations

import random as random_module

import pytest

from kvxfer.errors import ConfigError
from kvxfer.policy.pairs import NO_PAIRS, PairOptions, PairTable, PairVerdict
from kvxfer.types import AgentRef, Incarnation

V = PairVerdict


def ref(name: str) -> AgentRef:
    return AgentRef(name, Incarnation(1, bytes(16)))


P, P2, D, D2 = ref("p"), ref("p2"), ref("d"), ref("d2")


def works_but_for_one() -> PairTable:
    """Both ends of (P, D) work with others."""
    table = PairTable()
    table.succeeded(P, D2, 0.0)
    table.succeeded(P2, D, 0.0)
    return table


def test_pair_that_fails_while_both_ends_work_with_others_is_ejected_alone() -> None:
    table = works_but_for_one()
    assert [table.failed(P, D, 1.0, 0.0) for _ in range(2)] == [V.PAIR, V.PAIR]
    assert table.ejected(1.0) == NO_PAIRS
    assert table.failed(P, D, 1.0, 0.0) is V.PAIR
    assert table.ejected(1.0) == {(P, D)}
    assert table.ejections == {(P, D): 1}
    assert table.ejected(1.99) == {(P, D)}
    assert table.ejected(2.0) == NO_PAIRS


def test_pair_that_is_ejected_is_tried_by_one_request_and_comes_back_or_waits_longer() -> None:
    table = works_but_for_one()
    for _ in range(3):
        table.failed(P, D, 1.0, 0.0)
    table.failed(P, D, 1.5, 0.0)  # let in before
    assert table.ejected(2.0) == NO_PAIRS
    table.started(P, D, 2.0)
    assert table.ejected(2.0) == {(P, D)}  # to all others
    assert table.failed(P, D, 2.1, 0.0) is V.PAIR
    assert table.ejected(4.09) == {(P, D)}  # twice as long
    table.started(P, D, 4.2)
    assert table.succeeded(P, D, 4.3)
    assert table.ejected(4.3) == NO_PAIRS
    assert not table.succeeded(P, D, 4.4)


def test_pair_without_a_verdict_is_tried_again() -> None:
    table = works_but_for_one()
    for _ in range(3):
        table.failed(P, D, 1.0, 0.0)
    table.started(P, D, 2.0)
    assert table.ejected(2.99) == {(P, D)}
    assert table.ejected(3.0) == NO_PAIRS


def test_pair_success_between_ends_the_row() -> None:
    table = works_but_for_one()
    for _ in range(10):
        table.failed(P, D, 1.0, 0.0)
        table.failed(P, D, 1.0, 0.0)
        table.succeeded(P, D, 1.1)
    assert table.ejected(1.1) == NO_PAIRS


def test_pair_is_not_ejected_where_an_end_did_not_lately_work_with_others() -> None:
    table = PairTable()
    for _ in range(10):
        assert table.failed(P, D, 1.0, 0.0) is V.UNKNOWN
    table.succeeded(P, D2, 2.0)
    for _ in range(10):
        assert table.failed(P, D, 2.0, 0.0) is V.UNKNOWN  # D has no other
    table = works_but_for_one()
    assert table.failed(P, D, 61.0, 0.0) is V.UNKNOWN  # that was not lately
    assert table.ejected(61.0) == NO_PAIRS


@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_pair_whose_one_end_fails_with_all_is_that_ends_fault(broken: str) -> None:
    table = PairTable()
    table.succeeded(P2, D2, 0.0)
    table.succeeded(P2, D, 0.0)
    table.succeeded(P, D2, 0.0)
    if broken == "prefill":
        table.failed(P, D2, 1.0, 0.0)
        assert table.failed(P, D, 1.1, 0.0) is V.PREFILL
        assert table.failed(P, D2, 1.2, 0.0) is V.PREFILL
    else:
        table.failed(P2, D, 1.0, 0.0)
        assert table.failed(P, D, 1.1, 0.0) is V.DECODE
    assert table.ejected(1.2) == NO_PAIRS


def test_pair_ends_that_are_gone_are_forgotten() -> None:
    table = works_but_for_one()
    for _ in range(3):
        table.failed(P, D, 1.0, 0.0)
    table.forget(P)
    assert table.ejected(1.0) == NO_PAIRS
    assert (len(table), table.ejected_count, table.ejections) == (1, 0, {})
    table.forget(D)
    table.forget(ref("never seen"))
    assert len(table) == 0
    assert repr(table) == "PairTable(pairs=0, ejected=0)"


@pytest.mark.parametrize("seed", range(20))
def test_pair_that_is_broken_is_found_among_many_and_no_other(seed: int) -> None:
    source = random_module.Random(seed)
    table, now_s = PairTable(), 0.0
    prefills, decodes = [ref(f"p{n}") for n in range(4)], [ref(f"d{n}") for n in range(4)]
    broken = (source.choice(prefills), source.choice(decodes))
    for _ in range(2000):
        now_s += 0.05
        pair = (source.choice(prefills), source.choice(decodes))
        if pair in table.ejected(now_s):
            continue
        table.started(*pair, now_s)
        if pair == broken:
            table.failed(*pair, now_s, source.random())
        else:
            table.succeeded(*pair, now_s)
    assert set(table.ejections) == {broken}
    assert table.ejections[broken] < 30  # once in the time that it is tried again, not each time


def test_pair_options_are_checked() -> None:
    for wrong in ({"failures_to_eject": 0}, {"eject_base_s": 40.0}, {"lately_s": 0.0}):
        with pytest.raises(ConfigError):
            PairOptions(**wrong)  # type: ignore[arg-type]
