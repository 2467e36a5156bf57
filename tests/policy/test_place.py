"""Placement: never a worker that must not be taken, always the same for the same, and fair."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import DoesNotFitError, NoWorkerError
from kvxfer.policy import search
from kvxfer.policy.candidates import Candidate
from kvxfer.policy.capacity import Capacity, Need, capacity_of
from kvxfer.policy.place import PlaceReason, Sizes, place
from kvxfer.policy.scores import Cost, LeastLoaded, distance
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
    unknown_fingerprint,
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
        is_last_choice=st.booleans(),
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
    except NoWorkerError:
        assert not decoders or not local
        return
    decode = usable[chosen.decode.ref.agent_id]
    assert decode.member.info.role.can_decode
    near = [c for c in decoders if not c.is_last_choice and c.agent_id not in avoided]
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
    last = dataclasses.replace(p, is_last_choice=True)
    assert chosen_pair(last, d) == (None, "d", PlaceReason.PREFILL_EJECTED)
    assert chosen_pair(last, d, allows_local_prefill=False) == ("p", "d", PlaceReason.REMOTE)
    other = dataclasses.replace(d, member=dataclasses.replace(d.member, pools=(pool(dtype="float16"),)))
    mine = dataclasses.replace(p, member=dataclasses.replace(p.member, pools=(pool(),)))
    assert chosen_pair(mine, other) == (None, "d", PlaceReason.INCOMPATIBLE_POOLS)
    with pytest.raises(NoWorkerError, match="local prefill is off"):
        chosen_pair(mine, other, allows_local_prefill=False)


def test_a_pair_is_not_made_while_one_does_not_know_its_weights() -> None:
    def engine(name: str, role: Role, weights: str, **changes: Any) -> Candidate:
        return worker(name, role, pools=(pool(weights_fingerprint=weights, **changes),))

    unknown = unknown_fingerprint("being read", bytes(16))
    local = (None, "d", PlaceReason.WEIGHTS_UNKNOWN)
    known = engine("p", Role.PREFILL, "w")
    assert chosen_pair(known, engine("d", Role.DECODE, "w")) == ("p", "d", PlaceReason.REMOTE)
    assert chosen_pair(known, engine("d", Role.DECODE, unknown)) == local
    assert chosen_pair(engine("p", Role.PREFILL, unknown), engine("d", Role.DECODE, "w")) == local
    assert chosen_pair(engine("p", Role.PREFILL, unknown), engine("d", Role.DECODE, unknown)) == local
    d, other = engine("d", Role.DECODE, "w"), engine("o", Role.PREFILL, "x")
    assert chosen_pair(engine("p", Role.PREFILL, unknown), other, d) == local
    assert chosen_pair(engine("p", Role.PREFILL, unknown), known, d)[0] == "p"
    bridged = {"axes": "page:HNC", "packing": "isa vec"}
    sides = [
        engine(n, r, unknown, block_tokens=t, **bridged) for n, r, t in (("p", Role.PREFILL, 8), ("d", Role.DECODE, 16))
    ]
    assert chosen_pair(*sides) == local


@pytest.mark.parametrize("is_known_there", [False, True])
def test_a_pair_is_looked_for_among_few_where_many_do_not_know_their_weights(
    is_known_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a fingerprint of its own, which must not make it a kind of its own."""
    roles = (Role.PREFILL, Role.DECODE)
    engines = [
        worker(f"{role.value}{at}", role, pools=(pool(weights_fingerprint=unknown_fingerprint("", nonce)),))
        for at, nonce in enumerate(bytes([at]) * 16 for at in range(100))
        for role in roles
    ]
    busy = Load(queued_requests=9)
    if is_known_there:
        engines += [worker(f"known {role.value}", role, pools=(pool(),), load=busy) for role in roles]
    compared: list[str] = []
    judge = search.can_read

    def counted(source: Candidate, destination: Candidate, *, has_equal_pools: bool) -> bool:
        compared.append(source.agent_id)
        return judge(source, destination, has_equal_pools=has_equal_pools)

    monkeypatch.setattr(search, "can_read", counted)
    pair = chosen_pair(*engines)
    assert len(compared) == (4 if is_known_there else 1)
    if is_known_there:
        assert pair == ("known prefill", "known decode", PlaceReason.REMOTE)
    else:
        assert (pair[0], pair[2]) == (None, PlaceReason.WEIGHTS_UNKNOWN)


def test_the_two_of_a_pair_are_brought_near_each_other_unless_load_says_otherwise() -> None:
    here, there = worker("p1", Role.PREFILL, host="a"), worker("p2", Role.PREFILL, host="b")
    d = worker("d", Role.DECODE, host="b")
    for tie in range(4):
        assert chosen_pair(here, there, d, tie_break=tie)[0] == "p2"
    busy = dataclasses.replace(there, prefill_inflight=1)
    assert chosen_pair(here, busy, d)[0] == "p1"
    many = [worker(f"p{n:03}", Role.PREFILL, host="a") for n in range(100)]
    assert chosen_pair(*many, worker("q", Role.PREFILL, host="b"), d)[0] == "q"
    assert distance(here, d, is_equal=True) > distance(there, d, is_equal=False) > distance(there, d, is_equal=True) > 0
    shared = dataclasses.replace(there, member=dataclasses.replace(there.member, pools=(pool(),)))
    assert distance(shared, d, is_equal=True) == 0


def test_a_worker_that_computed_the_prompt_is_taken_first() -> None:
    busy, idle = worker("p1", Role.PREFILL, prefill_inflight=9, host="a"), worker("p2", Role.PREFILL, host="b")
    d, e = worker("d", Role.DECODE, host="b"), worker("e", Role.DECODE, host="a")
    assert chosen_pair(busy, idle, d, e, preferred=busy.member.ref)[:2] == ("p1", "e")
    lost = dataclasses.replace(busy, is_last_choice=True)
    assert chosen_pair(lost, idle, d, e, preferred=busy.member.ref)[:2] == ("p2", "d")
    pairs = frozenset({(busy.member.ref, one.member.ref) for one in (d, e)})
    assert chosen_pair(busy, idle, d, e, preferred=busy.member.ref, ejected_pairs=pairs)[:2] == ("p2", "d")


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

    class Counting(LeastLoaded):
        def between(self, source: Candidate, destination: Candidate, *, is_equal: bool) -> Cost:
            nonlocal compared
            compared += 1
            return super().between(source, destination, is_equal=is_equal)

    place(workers, model="m", tie_break=5, scores=Counting())
    assert compared <= 2


def sized(name: str, role: Role, *, context: int = 0, blocks: int = 0, **more: Any) -> Candidate:
    """A worker with a context of ``context`` tokens and a pool of ``blocks`` blocks of 16; 0: it does not say."""
    pools = (dataclasses.replace(pool(), block_count=blocks),) if blocks else ()
    candidate = worker(name, role, pools=pools, **more)
    info = dataclasses.replace(candidate.member.info, max_context_tokens=context, block_tokens=16)
    return dataclasses.replace(candidate, member=dataclasses.replace(candidate.member, info=info))


def sizes(prompt: int = 1, answer: int = 1, *, likely: int = 1, **too_small: Any) -> dict[str, Sizes]:
    return {"sizes": Sizes(Need(prompt, answer), Need(max(prompt, likely), answer), **too_small)}


def test_a_prompt_goes_to_a_prefiller_that_can_hold_it_and_is_computed_by_the_decoder_where_none_can() -> None:
    small, large = sized("p0", Role.PREFILL, context=2048, blocks=8), sized("p1", Role.PREFILL, context=2048, blocks=64)
    d = sized("d", Role.DECODE, context=2048, blocks=64)
    for tie in range(6):
        assert chosen_pair(small, large, d, tie_break=tie, **sizes(129)) == ("p1", "d", PlaceReason.REMOTE)
    assert chosen_pair(small, d, **sizes(128)) == ("p0", "d", PlaceReason.REMOTE)
    assert chosen_pair(small, d, **sizes(129)) == (None, "d", PlaceReason.PREFILL_TOO_SMALL)
    with pytest.raises(DoesNotFitError, match=r"129 prompt tokens and 1 more .* the largest holds 129 tokens"):
        chosen_pair(small, d, allows_local_prefill=False, **sizes(129))
    # Its context counts as its pool does, and for it the answer's length does not.
    short = sized("p2", Role.PREFILL, context=200)
    assert chosen_pair(short, d, **sizes(199, 500)) == ("p2", "d", PlaceReason.REMOTE)
    assert chosen_pair(short, d, **sizes(200, 500)) == (None, "d", PlaceReason.PREFILL_TOO_SMALL)


def test_a_request_goes_to_a_decoder_that_can_hold_prompt_and_answer() -> None:
    small, large = sized("d0", Role.DECODE, context=2048, blocks=8), sized("d1", Role.DECODE, context=2048, blocks=64)
    for tie in range(6):
        assert chosen_pair(small, large, tie_break=tie, **sizes(100, 30))[1] == "d1"
        assert chosen_pair(small, sized("d2", Role.BOTH, context=2048), tie_break=tie, **sizes(100, 30))[1] == "d2"
    assert {chosen_pair(small, large, tie_break=tie, **sizes(100, 29))[1] for tie in range(2)} == {"d0", "d1"}
    with pytest.raises(DoesNotFitError, match="the largest holds 1025 tokens") as caught:
        chosen_pair(small, large, **sizes(100, 926))
    assert (caught.value.field, caught.value.prompt_tokens) == ("max_tokens", 100)
    with pytest.raises(DoesNotFitError) as caught:
        chosen_pair(small, large, **sizes(2000))
    assert caught.value.field == "prompt"
    with pytest.raises(
        DoesNotFitError, match="a prompt and 3000 more do not fit"
    ):  # known though the prompt's tokens are not
        chosen_pair(small, large, **sizes(1, 3000))


@pytest.mark.parametrize("state", [{"suspect": True}, {"draining": True}])
def test_prompt_that_only_a_draining_worker_holds_is_not_too_long(state: dict[str, bool]) -> None:
    small, large = sized("d0", Role.DECODE, blocks=8), sized("d1", Role.DECODE, blocks=64, **state)
    with pytest.raises(NoWorkerError):
        chosen_pair(small, large, **sizes(300))
    with pytest.raises(NoWorkerError):
        chosen_pair(sized("d2", Role.DECODE, blocks=64), small, excluded=frozenset({"d2"}), **sizes(300))
    p = sized("p", Role.PREFILL, blocks=64, **state)
    with pytest.raises(NoWorkerError, match="prefill_too_small"):
        chosen_pair(
            p,
            sized("q", Role.PREFILL, blocks=8),
            sized("d2", Role.DECODE, blocks=64),
            allows_local_prefill=False,
            **sizes(300),
        )


def test_estimate_decides_only_the_order_of_tries() -> None:
    small, large = sized("p0", Role.PREFILL, blocks=8), sized("p1", Role.PREFILL, blocks=64, prefill_inflight=5)
    d0, d1 = sized("d0", Role.DECODE, blocks=8), sized("d1", Role.DECODE, blocks=64, decode_inflight=5)
    assert chosen_pair(small, large, d0, d1)[:2] == ("p0", "d0")
    assert chosen_pair(small, large, d0, d1, **sizes(likely=300))[:2] == ("p1", "d1")
    assert chosen_pair(small, d0, **sizes(likely=300)) == ("p0", "d0", PlaceReason.REMOTE)


def test_refusal_for_size_counts_for_workers_that_are_no_larger() -> None:
    equals = [sized(f"p{n}", Role.PREFILL, context=2048, blocks=8) for n in range(9)]
    larger = sized("q", Role.PREFILL, context=2048, blocks=9, prefill_inflight=50)
    d = sized("d", Role.DECODE, context=2048, blocks=64)
    refused = frozenset({"p3"})
    assert chosen_pair(*equals, larger, d, **sizes(too_small_to_prefill=refused))[0] == "q"
    local = (None, "d", PlaceReason.PREFILL_TOO_SMALL)
    assert chosen_pair(*equals, d, **sizes(too_small_to_prefill=refused)) == local
    # One that does not say how large it is is asked itself, and so is one with more context and less pool.
    unknown, other = sized("u", Role.PREFILL), sized("o", Role.PREFILL, context=4096, blocks=7)
    assert chosen_pair(equals[3], unknown, d, **sizes(too_small_to_prefill=refused))[0] == "u"
    assert chosen_pair(equals[3], other, d, **sizes(too_small_to_prefill=refused))[0] == "o"
    assert chosen_pair(unknown, sized("v", Role.PREFILL), d, **sizes(too_small_to_prefill=frozenset("u")))[0] == "v"
    with pytest.raises(DoesNotFitError):
        chosen_pair(d, sized("e", Role.DECODE, context=2048, blocks=64), **sizes(too_small_to_decode=frozenset("d")))


def test_an_engine_that_clips_answers_takes_what_its_context_would_cut() -> None:
    short = sized("d0", Role.DECODE, context=500, clips_answers=True)
    long = sized("d1", Role.DECODE, context=4096, clips_answers=True, decode_inflight=9)
    assert chosen_pair(short, **sizes(400, 300))[1] == "d0"
    assert chosen_pair(short, long, **sizes(400, 300))[1] == "d1"
    for prompt, answer in ((500, 1), (1, 501)):
        with pytest.raises(DoesNotFitError):
            chosen_pair(short, **sizes(prompt, answer))


def test_capacity_is_what_a_member_says_in_all_places() -> None:
    def said(*pools: PoolRecord, context: int = 0, load: Load = Load(), block_tokens: int = 16) -> Capacity:  # noqa: B008
        member = worker("w", Role.BOTH, pools=pools, load=load).member
        info = dataclasses.replace(member.info, max_context_tokens=context, block_tokens=block_tokens)
        return capacity_of(dataclasses.replace(member, info=info))

    assert said() == Capacity(None, None)
    assert said(context=100) == Capacity(100, None)
    assert said(pool()) == Capacity(None, 128)
    assert said(pool(), dataclasses.replace(pool(), block_count=4)) == Capacity(None, 64)
    assert said(pool(), load=Load(total_blocks=5)) == Capacity(None, 80)
    assert said(load=Load(total_blocks=5)) == Capacity(None, 80)
    assert said(load=Load(total_blocks=5), block_tokens=0) == Capacity(None, None)
    pages = [dataclasses.replace(pool(axes="page:HNC", layers=3), block_count=blocks) for blocks in (20, 11)]
    assert said(*pages) == Capacity(None, 10 * 16)  # 31 pages of three layers


@given(st.integers(1, 400), st.integers(1, 400), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_worker_too_small_is_never_chosen_and_a_request_that_fits_one_is_never_refused(
    prompt: int, answer: int, blocks: list[int]
) -> None:
    workers = [sized(f"d{n}", Role.BOTH, blocks=count) for n, count in enumerate(blocks)]
    fits = {c.agent_id for c in workers if c.capacity.holds(Need(prompt, answer))}
    prefills = {c.agent_id for c in workers if c.capacity.holds_prompt(Need(prompt, answer))}
    try:
        source, decoder, _ = chosen_pair(*workers, **sizes(prompt, answer))
    except DoesNotFitError:
        assert not fits
        return
    assert decoder in fits
    assert source is None or source in prefills - {decoder}


def test_a_decoder_that_computes_nothing_alone_gets_pairs_only() -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE, computes_alone=False)
    for wants in (True, False):
        found = place([p, d], model="m", tie_break=0, wants_remote_prefill=wants)
        assert found.prefill is p.member
    assert place([d], model="m", tie_break=0, generates=False).prefill is None
    with pytest.raises(NoWorkerError, match="no decode worker computes a prompt itself"):
        place([d], model="m", tie_break=0)
    ejected = dataclasses.replace(p, is_last_choice=True)
    assert place([ejected, d], model="m", tie_break=0).prefill is p.member
    pair = frozenset({(p.member.ref, d.member.ref)})
    assert place([p, d], model="m", tie_break=0, ejected_pairs=pair).prefill is p.member


def test_what_is_not_to_be_split_goes_where_it_can_be_computed() -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE, computes_alone=False)
    one = worker("one", Role.BOTH, is_alone=True, decode_inflight=50, is_last_choice=True)
    found = place([p, d, one], model="m", tie_break=0, wants_remote_prefill=False)
    assert (found.prefill, found.decode) == (None, one.member)
    assert place([p, d, one], model="m", tie_break=0).prefill is p.member
    one = worker("one", Role.BOTH, is_alone=True, decode_inflight=50)
    found = place([p, d, one], model="m", tie_break=0, wants_remote_prefill=False, allows_local_prefill=False)
    assert (found.prefill, found.reason) == (None, PlaceReason.ENGINE_ALONE)
