"""Placement over workers that are not all well: shares, ejected pairs, engines that work alone, names of models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import NoWorkerError
from kvxfer.policy.candidates import Candidate
from kvxfer.policy.place import PlaceReason, place
from kvxfer.policy.scores import LEAST_LOADED
from kvxfer.types import AgentRef, DataAddress, Incarnation, Load, Member, Role, WorkerInfo


def worker(name: str, role: Role, *, model: str = "m", dialect: str = "vllm", **candidate: Any) -> Candidate:
    info = WorkerInfo(name, role, model, "http://x", dialect=dialect)
    ref = AgentRef(name, Incarnation(1, bytes(16)))
    return Candidate(Member(ref, info, DataAddress("", 0, "", ""), (), Load()), **candidate)


def pairs_of(*names: tuple[str, str]) -> frozenset[tuple[AgentRef, AgentRef]]:
    nonce = Incarnation(1, bytes(16))
    return frozenset((AgentRef(p, nonce), AgentRef(d, nonce)) for p, d in names)


P, D = worker("p", Role.PREFILL), worker("d", Role.DECODE)


@given(st.integers(0, 50), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_cost_of_a_share_is_as_if_it_carried_more(inflight: int, one: float, other: float) -> None:
    def costs(share: float) -> list[float]:
        candidate = worker("w", Role.BOTH, decode_inflight=inflight, share=share)
        return [LEAST_LOADED.prefill(candidate).amount, LEAST_LOADED.decode(candidate).amount]

    assert costs(1.0) == [inflight, inflight]
    for less, more in zip(costs(min(one, other)), costs(max(one, other)), strict=True):
        assert less >= more >= inflight


def test_place_worker_in_slow_start_carries_its_share() -> None:
    warm, cold, carried = "warm", "cold", Counter[str]()
    for number in range(110):
        candidates = [
            worker(warm, Role.DECODE, decode_inflight=carried[warm]),
            worker(cold, Role.DECODE, decode_inflight=carried[cold], share=0.1),
        ]
        carried[place(candidates, model="m", tie_break=number).decode.ref.agent_id] += 1
    assert carried[cold] == pytest.approx(10, abs=1)


def test_place_least_bad_of_workers_that_are_all_out_comes_first() -> None:
    candidates = [worker(f"d{n}", Role.DECODE, is_last_choice=True, share=0.1 / (n + 1)) for n in range(3)]
    for tie_break in range(6):
        assert place(candidates, model="m", tie_break=tie_break).decode.ref.agent_id == "d0"


def test_place_ejected_pair_is_passed_over() -> None:
    p2, d2 = worker("p2", Role.PREFILL), worker("d2", Role.DECODE)
    for tie_break in range(8):
        placement = place([P, D, d2], model="m", tie_break=tie_break, ejected_pairs=pairs_of(("p", "d")))
        assert (placement.prefill, placement.decode) == (P.member, d2.member)
        placement = place([P, p2, D], model="m", tie_break=tie_break, ejected_pairs=pairs_of(("p", "d")))
        assert (placement.prefill, placement.decode) == (p2.member, D.member)


def test_place_ejected_pair_that_is_the_only_one_leaves_the_prompt_to_the_decoder() -> None:
    ejected = pairs_of(("p", "d"))
    placement = place([P, D], model="m", tie_break=0, ejected_pairs=ejected)
    assert (placement.prefill, placement.reason) == (None, PlaceReason.PAIR_EJECTED)
    placement = place([P, D], model="m", tie_break=0, ejected_pairs=ejected, allows_local_prefill=False)
    assert (placement.prefill, placement.reason) == (P.member, PlaceReason.REMOTE)


def test_place_engine_that_works_alone_takes_no_part_in_pairs() -> None:
    alone = [worker(f"a{n}", Role.BOTH, dialect="plain", is_alone=True) for n in range(2)]
    for allows in (True, False):
        for tie_break in range(4):
            placement = place(alone, model="m", tie_break=tie_break, allows_local_prefill=allows)
            assert (placement.prefill, placement.reason) == (None, PlaceReason.ENGINE_ALONE)
    placement = place([P, alone[0]], model="m", tie_break=0)
    assert (placement.prefill, placement.decode) == (None, alone[0].member)


@pytest.mark.parametrize("allows", [True, False])
def test_place_beside_pairs_an_engine_that_works_alone_is_taken_while_it_carries_less(allows: bool) -> None:
    chosen = []
    for inflight in (0, 1, 3):
        alone = worker("a", Role.BOTH, dialect="plain", is_alone=True, decode_inflight=inflight)
        p = worker("p", Role.PREFILL, prefill_inflight=1)
        placement = place([p, D, alone], model="m", tie_break=0, allows_local_prefill=allows)
        chosen.append((placement.decode.ref.agent_id, placement.prefill is not None, placement.reason))
    assert chosen == [
        ("a", False, PlaceReason.ENGINE_ALONE),
        ("a", False, PlaceReason.ENGINE_ALONE),
        ("d", True, PlaceReason.REMOTE),
    ]


def test_place_engine_alone_is_no_decoder_of_a_pair_of_its_dialect() -> None:
    p = worker("p", Role.PREFILL, dialect="plain")
    alone = worker("a", Role.BOTH, dialect="plain", is_alone=True, decode_inflight=9)
    placement = place([p, alone], model="m", tie_break=0)
    assert (placement.prefill, placement.decode) == (None, alone.member)


def test_place_finds_a_worker_by_any_name_of_its_model() -> None:
    d = worker("d", Role.DECODE, model="base", aliases=frozenset({"adapter"}))
    other = worker("d2", Role.DECODE, model="base")
    assert place([d, other], model="adapter", tie_break=0).decode == d.member
    assert {place([d, other], model="base", tie_break=n).decode.ref.agent_id for n in range(2)} == {"d", "d2"}
    with pytest.raises(NoWorkerError):
        place([d, other], model="another", tie_break=0)
