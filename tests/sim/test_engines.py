"""The simulation of whole engines: every seed holds every invariant and ends every circle of waits within its bound,
and each way of waiting that went wrong, put back, is caught as a broken wait.
"""

from __future__ import annotations

import pytest

from kvxfer._native import _core
from kvxfer.testing.sim import Invariant, Violation
from kvxfer.testing.sim.command import main
from kvxfer.testing.sim.engines import EngineBug, EngineOptions, EngineReport, engine_world
from kvxfer.testing.sim.engines.play_engines import play_many_engines

SEEDS_MAX = {
    EngineBug.NEVER_REVOKE: 120,
    EngineBug.EARLY_BLOCKS_STAY: 120,
    EngineBug.FIXED_WAIT: 20,
    EngineBug.HUNG_ENGINE_UNNOTICED: 120,
}
"""Each bug is caught within so many seeds from SEED_BASE on."""
SEED_BASE = 25


def played(first: int, count: int, options: EngineOptions = EngineOptions()) -> EngineReport:  # noqa: B008
    batch = play_many_engines(first, count, "core", options, EngineBug.NONE, jobs=1)
    assert not batch.failures, "\n".join([*batch.failures[0].recent[-40:], str(batch.failures[0])])
    assert batch.totals.seeds == count
    return batch.totals


def caught_by(seed: int, bug: EngineBug) -> Invariant | None:
    try:
        engine_world(seed, machines=_core, bug=bug).run()
    except Violation as violation:
        return violation.invariant
    return None


def test_50_seeds_end_every_wait_within_its_bound() -> None:
    totals = played(0, 50)
    assert totals.served > 0.8 * totals.requests
    assert totals.remote > 0.4 * totals.served
    assert totals.revoked > 0
    assert totals.taken_back > 0


@pytest.mark.nightly
def test_800_seeds_meet_everything() -> None:
    totals = played(1000, 800)
    assert totals.served > 0.85 * totals.requests
    assert totals.circles > 10
    assert set(totals.lanes) == {"memory", "stream", "mapped", "unix"}
    assert set(totals.failures) >= {"grant_unknown", "grant_revoked", "grant_expired", "peer_gone"}
    assert set(totals.struck) >= {"hangs", "hangs for ever", "killed", "stopped", "cut", "partition"}


def test_quiet_worlds_answer_everybody_who_stays() -> None:
    totals = played(0, 20, EngineOptions(has_faults=False))
    assert not {"hangs", "killed", "stopped", "cut", "partition"} & set(totals.struck)
    assert set(totals.errors) <= {"client_left", "overloaded", "grant_unknown", "grant_expired", "grant_revoked"}
    assert totals.served >= 0.8 * totals.requests


@pytest.mark.parametrize("bug", sorted(SEEDS_MAX))
def test_bug_is_caught(bug: EngineBug) -> None:
    for seed in range(SEED_BASE, SEED_BASE + SEEDS_MAX[bug]):
        if caught_by(seed, bug) is not None:
            assert caught_by(seed, bug) is Invariant.WAITING, seed
            assert caught_by(seed, EngineBug.NONE) is None
            return
    raise AssertionError(f"not caught in {SEEDS_MAX[bug]} seeds")


def test_every_bug_is_listed() -> None:
    assert set(SEEDS_MAX) == set(EngineBug) - {EngineBug.NONE}


@pytest.mark.parametrize("seed", [1, 6, 17])
def test_same_seed_same_history(seed: int) -> None:
    one, other = (engine_world(seed, machines=_core).run() for _ in range(2))
    assert one == other
    assert one.digest


def test_a_failing_seed_is_printed_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--world", "engines", "--bug", "fixed_wait", "--jobs", "1"]
    assert main([*asked, "--seeds", "1"]) == 1
    printed = capsys.readouterr().out
    assert "seed 0: Violation: invariant 7 (waiting)" in printed
    assert "replay: python -m kvxfer.testing.sim --world engines --replay 0 --bug fixed_wait\n" in printed
    assert main([*asked, "--replay", "0"]) == 1
    assert "circle of waits" in capsys.readouterr().out
    assert main(["--world", "engines", "--bug", "no_such_bug"]) == 2
