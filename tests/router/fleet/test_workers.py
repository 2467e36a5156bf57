"""The fleet: where workers come from, what placement sees of them, and what an admin changes."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from kvxfer.errors import ConfigError, InvalidArgumentError, NoWorkerError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.place import place
from kvxfer.protocol.http_url import HostList
from kvxfer.router.fleet.facts import EngineIdentity, EngineLoad
from kvxfer.router.fleet.sources.flags import workers_from_flags
from kvxfer.router.fleet.worker import WorkerSource
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import Load, Membership, Role
from tests.support.fleet import fleet, member, stock


def names(workers: Workers) -> list[str]:
    return [candidate.agent_id for candidate in workers.candidates()]


def test_workers_another_incarnation_starts_afresh() -> None:
    workers, _ = fleet()
    old, new = member("d0"), member("d0", number=2)
    workers.update(Membership(1, (old,)))
    ended: list[str] = []
    workers.failed(old.ref, "unreachable")
    workers.watch(old.ref, lambda: ended.append("old"))
    claim = workers.claim(old.ref, Part.DECODE)
    assert workers.candidates()[0].decode_inflight == 1
    workers.update(Membership(2, (new,), (old.ref,)))
    assert ended == ["old"]
    [candidate] = workers.candidates()
    assert (candidate.is_last_choice, candidate.decode_inflight) == (False, 0)
    assert workers.inflight() == {("d0", "decode"): 1, ("d0", "prefill"): 0}
    claim.release()
    claim.release()
    assert workers.statistics().inflight == 0
    workers.watch(old.ref, lambda: ended.append("at once"))
    assert ended == ["old", "at once"]
    with pytest.raises(NoWorkerError):
        workers.worker(old.ref)


def test_workers_same_incarnation_that_returns_has_its_requests() -> None:
    workers, _ = fleet()
    one = member("d0")
    workers.update(Membership(1, (one,)))
    with workers.claim(one.ref, Part.DECODE):
        workers.update(Membership(2))
        assert names(workers) == []
        workers.update(Membership(3, (one,)))
        assert workers.candidates()[0].decode_inflight == 1
    assert workers.candidates()[0].decode_inflight == 0


def test_workers_unchanged_membership_ends_none() -> None:
    workers, _ = fleet()
    workers.update(Membership(1, (member("d0"),)))
    ended: list[int] = []
    unwatch = workers.watch(member("d0").ref, lambda: ended.append(1))
    workers.update(Membership(2, (member("d0", load=Load(1)),)))
    assert workers.candidates()[0].member.load == Load(1)
    unwatch()
    unwatch()
    workers.update(Membership(3))
    assert ended == []
    assert repr(workers) == "Workers(revision=3, members=0, is_connected=None)"


def test_workers_suspicions_of_a_lost_coordinator_only_push_a_worker_back() -> None:
    workers, _ = fleet()
    known, suspect = member("d0"), dataclasses.replace(member("d1", port=2), is_suspect=True)

    def seen() -> list[tuple[bool, bool]]:
        return [(candidate.member.is_suspect, candidate.is_last_choice) for candidate in workers.candidates()]

    workers.is_connected = True
    workers.update(Membership(1, (known, suspect)))
    assert seen() == [(False, False), (True, False)]
    workers.is_connected = False
    assert seen() == [(False, False), (False, True)]
    workers.update(Membership(2, (suspect,), (known.ref,)))
    assert seen() == [(False, False)]


def test_workers_all_of_a_part_under_suspicion_are_tried_as_before() -> None:
    """What is said of all decode workers is not taken back by a prefill worker that is live."""
    workers, _ = fleet()
    workers.is_connected = True
    prefill = member("p0", role=Role.PREFILL)
    d0, d1 = (dataclasses.replace(member(f"d{n}", port=2 + n), is_suspect=True) for n in range(2))

    def suspects() -> set[str]:
        return {one.member.ref.agent_id for one in workers.candidates() if one.member.is_suspect}

    workers.update(Membership(1, (prefill, d0, d1)))
    assert suspects() == set()
    assert not any(candidate.is_last_choice for candidate in workers.candidates())
    workers.update(Membership(2, (prefill, d0, dataclasses.replace(d1, is_suspect=False))))
    assert suspects() == {"d0"}
    other = dataclasses.replace(d1, is_suspect=False, info=dataclasses.replace(d1.info, model="other"))
    workers.update(Membership(3, (prefill, d0, other), (d1.ref,)))
    assert suspects() == set()


def test_workers_with_an_address_beside_the_allowed_ones_get_nothing(caplog: pytest.LogCaptureFixture) -> None:
    workers, _ = fleet(allowed=HostList("allow_http_host", ["127.0.0.0/8"]))
    outside = member("d1")
    outside = dataclasses.replace(outside, info=dataclasses.replace(outside.info, http_url="http://10.0.0.1:1"))
    with caplog.at_level(logging.WARNING, "kvxfer.router"):
        for revision in range(3):
            workers.update(Membership(revision, (member("d0"), outside)))
    assert names(workers) == ["d0"]
    assert [record.message for record in caplog.records] == ["a worker gets no requests"]
    assert workers.models() == ("m",)
    assert [entry["is_ready"] for entry in workers.describe()] == [True, False]


def test_workers_of_an_unknown_dialect_or_without_http_are_listed_and_get_nothing() -> None:
    workers, _ = fleet()
    workers.update(Membership(1, (member("d0", dialect="another"), member("d1", port=0))))
    assert names(workers) == ["d1"]  # placement leaves it out by its address
    assert workers.statistics().decode_ready == 0
    assert [one.ref.agent_id for one in workers.members()] == ["d0", "d1"]


def test_workers_of_a_source_that_are_named_again_keep_their_incarnation() -> None:
    workers, _ = fleet()
    workers.replace("file", [stock("a"), stock("b")])
    before = [candidate.member.ref for candidate in workers.candidates()]
    workers.failed(before[0], "unreachable")
    workers.replace("file", [stock("b"), stock("a"), stock("c")])
    after = {candidate.member.ref: candidate.is_last_choice for candidate in workers.candidates()}
    assert set(before) < set(after)
    assert after[before[0]]
    workers.replace("file", [stock("a", Role.PREFILL), stock("b")])
    refs = [candidate.member.ref for candidate in workers.candidates()]
    assert refs[0] not in before
    assert refs[1] == before[1]


def test_workers_that_two_sources_name_count_once(caplog: pytest.LogCaptureFixture) -> None:
    workers, _ = fleet()
    with caplog.at_level(logging.WARNING, "kvxfer.router"):
        for _ in range(3):
            workers.replace("file", [stock("a", port=1000), stock("b", port=2000, source="file")])
            workers.replace("flags", [stock("x", port=1000)])
    assert names(workers) == ["x", "b"]
    assert len(caplog.records) == 1
    workers.update(Membership(1, (member("c", port=1000),)))
    assert names(workers) == ["c", "b"]
    assert workers.statistics().shadowed == 2
    workers.update(Membership(2))
    workers.replace("flags", [])
    assert names(workers) == ["a", "b"]


def test_workers_behind_one_address_are_several_by_rank() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock(f"a-dp{rank}", port=1000, dp_rank=rank) for rank in range(3)])
    assert len(names(workers)) == 3


@pytest.mark.parametrize("ranks", [(None, 0), (0, None), (0, 0), (None, None), (1, 0)])
def test_workers_without_a_rank_are_all_ranks_of_their_address(ranks: tuple[int | None, int | None]) -> None:
    """Whatever the order, and whichever source names them: the second is refused by name, or both are there."""
    workers, _ = fleet()
    first, second = (
        stock(name, port=1000, dp_rank=rank, source=WorkerSource.ADMIN) for name, rank in zip("ab", ranks, strict=True)
    )
    workers.add(first)
    if ranks == (1, 0):
        workers.add(second)
        assert sorted(names(workers)) == ["a", "b"]
        return
    with pytest.raises(InvalidArgumentError, match=r"a at http://127\.0\.0\.1:1000 is known already, from admin"):
        workers.add(second)
    assert names(workers) == ["a"]
    urls = ["http://127.0.0.1:1000" + ("" if rank is None else f"?dp_rank={rank}") for rank in ranks]
    with pytest.raises(ConfigError, match="there is another worker of that name, or at that address"):
        workers_from_flags(engine=[f"{urls[0]}{'&' if '?' in urls[0] else '?'}name=a", urls[1]])
    other, _ = fleet()
    other.replace("flags", [first])
    other.replace("file", [stock("b", port=1000, dp_rank=ranks[1], source="file")])
    assert len(names(other)) == other.statistics().shadowed == 1


def test_workers_drain_outlasts_what_their_source_lists() -> None:
    workers, _ = fleet()
    workers.replace("file", [stock("a"), stock("b")])
    assert workers.drain("a")
    for again in ([stock("a"), stock("b")], [stock("b")], [stock("a", Role.BOTH), stock("b")]):
        workers.replace("file", again)
        with pytest.raises(NoWorkerError):
            place(workers.candidates(), model="m", tie_break=0, excluded=frozenset({"b"}))
    assert workers.statistics().drained == 1
    assert workers.drain("a", False)
    assert place(workers.candidates(), model="m", tie_break=0, excluded=frozenset({"b"})).decode.ref.agent_id == "a"
    assert not workers.drain("not there")


def test_workers_drain_of_a_coordinators_worker_holds_for_its_next_incarnation() -> None:
    workers, _ = fleet()
    workers.update(Membership(1, (member("d0"),)))
    claim = workers.claim(member("d0").ref, Part.DECODE)
    workers.drain("d0")
    assert workers.candidates()[0].member.is_draining
    assert workers.inflight()["d0", "decode"] == 1  # what runs goes on
    claim.release()
    workers.update(Membership(2, (member("d0", number=2),)))
    assert workers.candidates()[0].member.is_draining
    [entry] = workers.describe()
    assert (entry["is_draining"], entry["is_drained_here"], entry["is_ready"]) == (True, True, False)


def test_workers_an_admin_adds_and_removes() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a", port=1000)])
    workers.add(stock("b", source=WorkerSource.ADMIN))
    for wrong in (stock("a", port=3000), stock("c", port=1000)):
        with pytest.raises(InvalidArgumentError, match=r"a at http://127\.0\.0\.1:1000 is known already, from flags"):
            workers.add(wrong)
    assert names(workers) == ["b", "a"]
    assert workers.remove("b")
    assert not workers.remove("b")
    workers.add(stock("b", source=WorkerSource.ADMIN))
    assert names(workers) == ["b", "a"]


def test_workers_that_are_removed_stay_away_until_their_source_says_something_new() -> None:
    workers, _ = fleet()
    workers.replace("file", [stock("a"), stock("b")])
    workers.update(Membership(1, (member("d0", port=9),)))
    workers.drain("a")
    assert workers.remove("a")
    assert workers.remove("d0")
    workers.replace("file", [stock("a"), stock("b")])
    workers.update(Membership(2, (member("d0", port=9, load=Load(3)),)))
    assert names(workers) == ["b"]
    workers.update(Membership(3, (member("d0", port=9, number=2),)))
    workers.replace("file", [stock("a", Role.BOTH), stock("b")])
    assert names(workers) == ["d0", "a", "b"]
    assert not any(candidate.member.is_draining for candidate in workers.candidates())


def test_workers_that_are_removed_let_their_requests_end() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a")])
    ref = workers.candidates()[0].member.ref
    ended: list[int] = []
    workers.watch(ref, lambda: ended.append(1))
    with workers.claim(ref, Part.DECODE):
        workers.remove("a")
        assert ended == []
        assert workers.worker(ref).agent_id == "a"
    with pytest.raises(NoWorkerError):
        workers.worker(ref)


def test_workers_whose_model_is_unknown_get_nothing_until_they_say_it() -> None:
    workers, _ = fleet()
    assert workers.why_none() == "no worker is known"
    workers.replace("flags", [stock("a", model="")])
    assert names(workers) == []
    assert workers.without_model() == ("a",)
    [entry] = workers.entries()
    entry.trouble = "GET /v1/models: 401"
    assert workers.why_none() == "no worker has said yet which model it serves: a (GET /v1/models: 401)"
    assert workers.statistics().without_model == 1
    workers.learn(entry, identity=EngineIdentity(("base", "adapter"), 4096))
    [candidate] = workers.candidates()
    assert (candidate.member.info.model, candidate.aliases) == ("base", {"adapter"})
    assert candidate.capacity.context_tokens == 4096
    assert workers.models() == ("adapter", "base")
    assert place(workers.candidates(), model="adapter", tie_break=0).decode.ref.agent_id == "a"


def test_workers_model_that_was_given_is_not_overruled() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a", model="given")])
    [entry] = workers.entries()
    workers.learn(entry, identity=EngineIdentity(("said",)))
    assert workers.models() == ("given", "said")
    assert workers.candidates()[0].member.info.model == "given"


def test_workers_load_that_they_say_is_what_placement_sees() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a"), stock("b")])
    entry = workers.entries()[0]
    workers.learn(entry, said=EngineLoad(running=9, queued=1, used=0.5, blocks=100, block_tokens=16))
    candidate = workers.candidates()[0]
    assert candidate.member.load == Load(1, 9, 0, 50, 100)
    assert candidate.capacity.pool_tokens == 1600
    assert all(place(workers.candidates(), model="m", tie_break=n).decode.ref.agent_id == "b" for n in range(4))
    workers.replace("flags", [stock("a"), stock("b")])
    assert workers.candidates()[0] == candidate


def test_workers_plain_engine_is_offered_as_one_that_works_alone() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a", dialect="plain"), stock("b", dialect="vllm"), stock("c", dialect="sglang")])
    seen = [(candidate.is_alone, candidate.clips_answers) for candidate in workers.candidates()]
    assert seen == [(True, False), (False, True), (False, False)]


def test_workers_candidates_are_made_anew_only_where_something_changed() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("a"), stock("b")])
    first = workers.candidates()
    assert workers.candidates() is first
    with workers.claim(first[0].member.ref, Part.PREFILL):
        second = workers.candidates()
        assert second[1] is first[1]
        assert (second[0].prefill_inflight, second[0].decode_inflight) == (1, 0)
    assert workers.candidates() == first
    for candidate in first:
        workers.succeeded(candidate.member.ref)
    assert workers.candidates() is workers.candidates()


def test_workers_statistics_and_counters() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("p", Role.PREFILL), stock("d")])
    refs = {candidate.agent_id: candidate.member.ref for candidate in workers.candidates()}
    workers.failed(refs["p"], "unreachable")
    known = workers.statistics()
    assert (known.members, known.prefill_ready, known.decode_ready, known.ejected) == (2, 0, 1, 1)
    assert known.states == {"in": 1, "out": 1, "half_open": 0, "slow_start": 0}
    assert workers.counters.ejections == {("p", "unreachable"): 1}
    assert {name: state.value for name, state in workers.states().items()} == {"p": "out", "d": "in"}
    workers.replace("flags", [stock("d")])
    assert workers.counters.ejections == {}
