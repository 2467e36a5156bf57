"""Placement: never a worker that must not be taken, always the same for the same, and fair."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import NoWorker
from kvxfer.policy.place import Candidate, PlaceReason, place, transfer_cost
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Incarnation,
    Load,
    Member,
    PoolRecord,
    Role,
    WorkerInfo,
)

RECORD = CompatibilityRecord("m", "c", "w", "float32", 2, 1, 8, 16, "bhd", "none", "rope", "sdpa")


def pool(**changes: Any) -> PoolRecord:
    return PoolRecord(1, dataclasses.replace(RECORD, **changes), 8, 64, Exposure.POOL, True)


def worker(
    name: str,
    role: Role,
    *,
    model: str = "m",
    host: str = "h",
    url: str = "http://x",
    load: Load = Load(),  # noqa: B008
    pools: tuple[PoolRecord, ...] = (),
    suspect: bool = False,
    draining: bool = False,
    **candidate: Any,
) -> Candidate:
    info = WorkerInfo(name, role, model, url)
    ref = AgentRef(name, Incarnation(1, bytes(16)))
    address = DataAddress("127.0.0.1", 1, "", host)
    return Candidate(Member(ref, info, address, pools, load, suspect, draining), **candidate)


CANDIDATES = st.lists(
    st.builds(
        worker,
        name=st.integers(0, 40).map(lambda number: f"w{number}"),
        role=st.sampled_from(Role),
        model=st.sampled_from(["m", "m", "m", "other"]),
        host=st.sampled_from(["h", "h2", ""]),
        url=st.sampled_from(["http://x", "http://x", ""]),
        load=st.builds(Load, st.integers(0, 3), st.integers(0, 3), st.integers(0, 9000), st.integers(0, 8), st.just(8)),
        pools=st.sampled_from([(), (pool(),), (pool(dtype="float16"),), (pool(), pool(dtype="float16"))]),
        suspect=st.booleans(),
        draining=st.booleans(),
        prefill_inflight=st.integers(0, 5),
        decode_inflight=st.integers(0, 5),
        is_aside=st.booleans(),
    ),
    max_size=25,
    unique_by=lambda candidate: candidate.agent_id,
)
NAMES = st.frozensets(st.integers(0, 40).map(lambda number: f"w{number}"), max_size=10)


@given(CANDIDATES, NAMES, NAMES, st.integers(0, 1 << 62), st.booleans(), st.booleans(), st.randoms())
def test_a_placement_never_breaks_a_rule(
    candidates: list[Candidate],
    excluded: frozenset[str],
    avoided: frozenset[str],
    tie: int,
    wants: bool,
    local: bool,
    shuffle: Any,
) -> None:
    rules: dict[str, Any] = {
        "model": "m",
        "tie_break": tie,
        "wants_remote_prefill": wants,
        "allows_local_prefill": local,
        "excluded": excluded,
        "avoided": avoided,
    }
    usable = {
        c.agent_id: c
        for c in candidates
        if c.agent_id not in excluded
        and c.member.info.model == "m"
        and c.member.info.http_url
        and not c.member.is_suspect
        and not c.member.is_draining
    }
    decoders = [c for c in usable.values() if c.member.info.role.can_decode]
    try:
        chosen = place(candidates, **rules)
    except NoWorker:
        assert not decoders or not local
        return
    decode = usable[chosen.decode.ref.agent_id]
    assert decode.member.info.role.can_decode
    near = [c for c in decoders if not c.is_aside and c.agent_id not in avoided]
    assert not near or decode in near
    if chosen.prefill is None:
        assert local
        assert chosen.reason is not PlaceReason.REMOTE
    else:
        assert chosen.reason is PlaceReason.REMOTE
        prefill = usable[chosen.prefill.ref.agent_id]
        assert prefill.member.info.role.can_prefill
        assert prefill.agent_id != decode.agent_id
        if prefill.member.pools and decode.member.pools:
            records = {item.record for item in prefill.member.pools}
            assert any(item.record in records for item in decode.member.pools)
        assert wants or not local
    shuffled = list(candidates)
    shuffle.shuffle(shuffled)
    assert place(shuffled, **rules) == chosen


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1 << 40))
def test_equal_workers_are_taken_equally_often(prefillers: int, decoders: int, base: int) -> None:
    workers = [worker(f"p{n}", Role.PREFILL) for n in range(prefillers)]
    workers += [worker(f"d{n}", Role.DECODE) for n in range(decoders)]
    rounds = prefillers * decoders
    pairs = Counter()  # type: ignore[var-annotated]
    for tie in range(base, base + rounds):
        chosen = place(workers, model="m", tie_break=tie)
        assert chosen.prefill is not None
        pairs[chosen.prefill.ref.agent_id, chosen.decode.ref.agent_id] += 1
    prefill_share = Counter(pair[0] for pair in pairs.elements())
    decode_share = Counter(pair[1] for pair in pairs.elements())
    assert set(decode_share.values()) == {prefillers}
    assert max(prefill_share.values()) - min(prefill_share.values()) <= decoders


@given(st.integers(2, 5), st.integers(2, 5), st.lists(st.integers(0, 1 << 62), min_size=60, max_size=60))
def test_counting_in_flight_keeps_the_load_level(prefillers: int, decoders: int, ties: list[int]) -> None:
    workers = {f"p{n}": worker(f"p{n}", Role.PREFILL) for n in range(prefillers)}
    workers |= {f"d{n}": worker(f"d{n}", Role.DECODE) for n in range(decoders)}
    for tie in ties:
        chosen = place(workers.values(), model="m", tie_break=tie)
        assert chosen.prefill is not None
        p, d = workers[chosen.prefill.ref.agent_id], workers[chosen.decode.ref.agent_id]
        workers[p.agent_id] = dataclasses.replace(p, prefill_inflight=p.prefill_inflight + 1)
        workers[d.agent_id] = dataclasses.replace(d, decode_inflight=d.decode_inflight + 1)
        for letter in "pd":
            counts = [c.prefill_inflight + c.decode_inflight for name, c in workers.items() if name[0] == letter]
            assert max(counts) - min(counts) <= 1


def chosen_pair(*workers: Candidate, **rules: Any) -> tuple[str | None, str, PlaceReason]:
    chosen = place(workers, **{"model": "m", "tie_break": 0, **rules})
    source = None if chosen.prefill is None else chosen.prefill.ref.agent_id
    return source, chosen.decode.ref.agent_id, chosen.reason


def test_reasons() -> None:
    p, d, both = worker("p", Role.PREFILL), worker("d", Role.DECODE), worker("b", Role.BOTH)
    assert chosen_pair(p, d) == ("p", "d", PlaceReason.REMOTE)
    assert chosen_pair(d) == (None, "d", PlaceReason.NO_PREFILL_WORKER)
    assert chosen_pair(both) == (None, "b", PlaceReason.ONLY_ITSELF)
    assert chosen_pair(p, both) == ("p", "b", PlaceReason.REMOTE)
    assert chosen_pair(both, d) == ("b", "d", PlaceReason.REMOTE)
    assert chosen_pair(p, d, wants_remote_prefill=False) == (None, "d", PlaceReason.NOT_WANTED)
    assert chosen_pair(p, d, wants_remote_prefill=False, allows_local_prefill=False) == ("p", "d", PlaceReason.REMOTE)
    aside = dataclasses.replace(p, is_aside=True)
    assert chosen_pair(aside, d) == (None, "d", PlaceReason.PREFILL_ASIDE)
    assert chosen_pair(aside, d, allows_local_prefill=False) == ("p", "d", PlaceReason.REMOTE)
    other = dataclasses.replace(d, member=dataclasses.replace(d.member, pools=(pool(dtype="float16"),)))
    mine = dataclasses.replace(p, member=dataclasses.replace(p.member, pools=(pool(),)))
    assert chosen_pair(mine, other) == (None, "d", PlaceReason.INCOMPATIBLE_POOLS)
    with pytest.raises(NoWorker, match="local prefill is off"):
        chosen_pair(mine, other, allows_local_prefill=False)


def test_the_two_of_a_pair_are_brought_near_each_other_unless_load_says_otherwise() -> None:
    here, there = worker("p1", Role.PREFILL, host="a"), worker("p2", Role.PREFILL, host="b")
    d = worker("d", Role.DECODE, host="b")
    for tie in range(4):
        assert chosen_pair(here, there, d, tie_break=tie)[0] == "p2"
    busy = dataclasses.replace(there, prefill_inflight=1)
    assert chosen_pair(here, busy, d)[0] == "p1"
    many = [worker(f"p{n:03}", Role.PREFILL, host="a") for n in range(100)]
    assert chosen_pair(*many, worker("q", Role.PREFILL, host="b"), d)[0] == "q"
    assert chosen_pair(here, there, d, cost_between=lambda source, _: float(source.ref.agent_id == "p2"))[0] == "p1"
    assert transfer_cost(here.member, d.member) > transfer_cost(there.member, d.member) > 0
    shared = dataclasses.replace(there.member, pools=(pool(),))
    assert transfer_cost(shared, d.member) == 0


def test_pools_that_can_be_made_into_each_other_are_a_pair() -> None:
    """vLLM's transposed keys: other block sizes, and other tensor parallel sizes where the shares of heads add up."""

    def engine(name: str, role: Role, ranks: int = 1, **changes: Any) -> Candidate:
        record = dataclasses.replace(RECORD, **{"kv_heads": 8, "axes": "page:HNC", "packing": "isa vec", **changes})
        page = 64 * record.kv_heads * record.block_tokens
        return worker(name, role, pools=(PoolRecord(1, record, 8, page, Exposure.POOL, False),), ranks=ranks)

    d, incompatible = engine("d", Role.DECODE), (None, "d", PlaceReason.INCOMPATIBLE_POOLS)
    remote = ("p", "d", PlaceReason.REMOTE)
    assert chosen_pair(engine("p", Role.PREFILL, block_tokens=128, packing="isa vec16"), d) == remote
    assert chosen_pair(engine("p", Role.PREFILL, 2, kv_heads=4), d) == remote
    assert chosen_pair(engine("p", Role.PREFILL), engine("d", Role.DECODE, 2, kv_heads=4, block_tokens=4)) == remote
    assert chosen_pair(engine("p", Role.PREFILL, 4, kv_heads=4), d) == incompatible
    assert chosen_pair(engine("p", Role.PREFILL, kv_heads=4), d) == incompatible  # its second rank is not there yet
    for changes in ({"dtype": "float16"}, {"axes": "page:NHC"}, {"packing": "isa amx"}, {"weights_fingerprint": "x"}):
        assert chosen_pair(engine("p", Role.PREFILL, block_tokens=128, **changes), d) == incompatible
    alike = engine("q", Role.PREFILL)
    for tie in range(4):
        assert chosen_pair(engine("p", Role.PREFILL, block_tokens=4), alike, d, tie_break=tie)[0] == "q"
    busy = dataclasses.replace(alike, prefill_inflight=1)
    assert chosen_pair(engine("p", Role.PREFILL, block_tokens=4), busy, d)[0] == "p"


def test_queued_prompts_and_full_pools_count() -> None:
    light, heavy = worker("p1", Role.PREFILL), worker("p0", Role.PREFILL, load=Load(queued_prefill_tokens=4096))
    empty = worker("d1", Role.DECODE, load=Load(free_blocks=100, total_blocks=100))
    full = worker("d0", Role.DECODE, load=Load(free_blocks=1, total_blocks=100))
    for tie in range(4):
        assert chosen_pair(light, heavy, empty, full, tie_break=tie)[:2] == ("p1", "d1")


def test_hundreds_of_workers_are_placed_quickly_enough_to_stay_on_the_loop() -> None:
    workers = [worker(f"p{n}", Role.PREFILL, pools=(pool(),)) for n in range(300)]
    workers += [worker(f"d{n}", Role.DECODE, pools=(pool(),)) for n in range(300)]
    compared = 0

    def counting(source: Member, destination: Member) -> float:
        nonlocal compared
        compared += 1
        return 0.0

    place(workers, model="m", tie_break=5, cost_between=counting)
    assert compared <= 200
