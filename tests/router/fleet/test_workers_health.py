"""How the fleet's requests eject a worker or a pair, and how they come back."""

from __future__ import annotations

import logging

import pytest

from kvxfer.openai.transfer_params import Part
from kvxfer.policy.health import BLAMES, HealthEvent
from kvxfer.policy.pairs import PairVerdict
from kvxfer.policy.place import place
from kvxfer.router.failure import FailureKind
from kvxfer.router.fleet.workers import Workers
from kvxfer.types import AgentRef, Membership, Role
from tests.support.fleet import FakeClock, fleet, member, stock


def two_decoders() -> tuple[Workers, FakeClock, AgentRef, AgentRef]:
    workers, clock = fleet()
    workers.replace("flags", [stock("d0"), stock("d1")])
    one, other = (candidate.member.ref for candidate in workers.candidates())
    return workers, clock, one, other


def chosen(workers: Workers, draws: int = 8) -> set[str]:
    return {place(workers.candidates(), model="m", tie_break=n).decode.ref.agent_id for n in range(draws)}


def test_failure_kinds_of_the_router_all_have_a_blame() -> None:
    assert {kind.value for kind in FailureKind} <= set(BLAMES)


def test_workers_refused_connection_takes_a_worker_out_of_rotation_at_once(caplog: pytest.LogCaptureFixture) -> None:
    workers, _, dead, _ = two_decoders()
    assert chosen(workers) == {"d0", "d1"}
    with caplog.at_level(logging.WARNING, "kvxfer.router"):
        for number in range(5):
            workers.failed(dead, "unreachable", f"r{number}")
    assert chosen(workers) == {"d1"}
    assert len(caplog.records) == 1
    assert workers.statistics().ejected == 1


def test_workers_way_back_is_a_probe_one_request_and_a_slow_start() -> None:
    workers, clock, dead, _ = two_decoders()
    workers.failed(dead, "unreachable", "r1")
    [entry] = [entry for entry in workers.entries() if entry.worker.ref == dead]
    clock.now_s += 0.25
    workers.probed(entry, HealthEvent.PROBE_PASSED)
    assert workers.states()["d0"] == "half_open"
    with workers.claim(dead, Part.DECODE, "trial") as claim:
        assert claim.is_trial
        assert chosen(workers) == {"d1"}
    assert chosen(workers) == {"d0", "d1"}  # without a verdict the next one is let in
    with workers.claim(dead, Part.DECODE, "trial 2"):
        workers.succeeded(dead, "trial 2")
        assert workers.states()["d0"] == "slow_start"
    shares = []
    for _ in range(5):
        shares.append(workers.candidates()[0].share)
        clock.now_s += 2.5
    assert shares[0] == 0.1
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert workers.states()["d0"] == "in"
    assert workers.candidates() is workers.candidates()
    assert chosen(workers) == {"d0", "d1"}
    assert workers.counters.probes == {("d0", "probe_passed"): 1}


def test_workers_failure_of_the_one_request_takes_it_out_for_longer() -> None:
    workers, clock, dead, _ = two_decoders()
    workers.failed(dead, "unreachable")
    [entry] = [entry for entry in workers.entries() if entry.worker.ref == dead]
    clock.now_s += 0.25
    workers.probed(entry, HealthEvent.PROBE_PASSED)
    with workers.claim(dead, Part.DECODE, "trial"):
        workers.failed(dead, "error", "trial")
    assert chosen(workers) == {"d1"}
    assert entry.health.probe_due_s == clock.now_s + 0.5
    assert workers.counters.ejections == {("d0", "unreachable"): 1, ("d0", "error"): 1}


def test_workers_request_that_fails_everywhere_counts_once() -> None:
    workers, _, one, other = two_decoders()
    for number in range(2):
        for ref in (one, other, one, other):
            workers.failed(ref, "error", f"poison {number}")
    assert [entry.health.failures_in_a_row for entry in workers.entries()] == [2, 0]
    workers.succeeded(one)
    assert workers.entries()[0].health.is_plain


@pytest.mark.parametrize("kind", ["refused", "does_not_fit", "overloaded", "exhausted", "unread", "connect_timeout"])
def test_workers_burst_of_500_requests_ejects_no_live_worker(kind: str) -> None:
    workers, _, one, _ = two_decoders()
    for number in range(500):
        workers.failed(one, kind, f"r{number}")
    for entry in workers.entries():
        workers.probed(entry, HealthEvent.PROBE_PASSED)
    assert chosen(workers) == {"d0", "d1"}
    assert workers.counters.ejections == {}


def test_workers_that_are_all_out_are_all_tried() -> None:
    workers, _, one, other = two_decoders()
    for ref in (one, other):
        workers.failed(ref, "unreachable")
    assert chosen(workers) == {"d0", "d1"}
    with workers.claim(one, Part.DECODE, "r"):
        workers.succeeded(one, "r")
    assert chosen(workers) == {"d0"}


def test_workers_ask_for_a_probe_where_one_is_due_sooner() -> None:
    workers, _, one, _ = two_decoders()
    asked: list[int] = []
    workers.on_probe_due = lambda: asked.append(1)
    workers.failed(one, "error")
    assert asked == []
    workers.failed(one, "unread")
    assert asked == [1]
    workers.replace("flags", [stock("d0")])
    assert asked == [1, 1]


def test_workers_pair_that_fails_between_two_that_work_is_passed_over() -> None:
    workers, clock = fleet()
    workers.replace(
        "flags", [*(stock(name, Role.PREFILL) for name in ("p0", "p1")), *(stock(name) for name in ("d0", "d1"))]
    )
    refs = {candidate.agent_id: candidate.member.ref for candidate in workers.candidates()}
    workers.pair_succeeded(refs["p0"], refs["d1"])
    workers.pair_succeeded(refs["p1"], refs["d0"])
    for number in range(3):
        assert workers.pair_failed(refs["p0"], refs["d0"], f"r{number}") is PairVerdict.PAIR
        assert workers.pair_failed(refs["p0"], refs["d0"], f"r{number}") is PairVerdict.UNKNOWN  # counts once

    def pairs() -> set[tuple[str, str]]:
        found = set()
        for tie_break in range(32):
            placement = place(
                workers.candidates(), model="m", tie_break=tie_break, ejected_pairs=workers.ejected_pairs()
            )
            assert placement.prefill is not None
            found.add((placement.prefill.ref.agent_id, placement.decode.ref.agent_id))
        return found

    assert ("p0", "d0") not in pairs()
    assert {name for pair in pairs() for name in pair} == {"p0", "p1", "d0", "d1"}  # both still work
    assert workers.counters.pair_ejections == {("p0", "d0"): 1}
    assert workers.describe_pairs() == [{"prefill": "p0", "decode": "d0"}]
    assert workers.counters.ejections == {}
    clock.now_s += 1.0
    assert ("p0", "d0") in pairs()
    workers.pair_started(refs["p0"], refs["d0"])
    assert ("p0", "d0") not in pairs()
    workers.pair_succeeded(refs["p0"], refs["d0"])
    assert ("p0", "d0") in pairs()
    assert workers.statistics().pairs_ejected == 0


def test_workers_end_that_fails_with_every_partner_is_ejected_itself() -> None:
    workers, _ = fleet()
    workers.replace("flags", [stock("p0", Role.PREFILL), stock("p1", Role.PREFILL), stock("d0"), stock("d1")])
    refs = {candidate.agent_id: candidate.member.ref for candidate in workers.candidates()}
    for name in ("d0", "d1"):
        workers.pair_succeeded(refs["p1"], refs[name])
    verdicts = [workers.pair_failed(refs["p0"], refs[f"d{n % 2}"], f"r{n}") for n in range(4)]
    assert verdicts == [PairVerdict.UNKNOWN, *[PairVerdict.PREFILL] * 3]
    assert workers.counters.ejections == {("p0", "transfer"): 1}
    assert workers.states()["p0"] == "out"


def test_workers_that_are_gone_are_told_nothing() -> None:
    workers, _ = fleet()
    workers.update(Membership(1, (member("d0"), member("p0", Role.PREFILL, port=2))))
    refs = [one.ref for one in workers.members()]
    workers.update(Membership(2))
    workers.failed(refs[0], "unreachable")
    workers.succeeded(refs[0])
    workers.pair_succeeded(refs[1], refs[0])
    assert workers.pair_failed(refs[1], refs[0]) is PairVerdict.UNKNOWN
    assert (workers.counters.ejections, workers.statistics().pairs) == ({}, 0)
