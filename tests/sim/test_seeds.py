"""The simulation on the production machines: every seed holds every invariant, worlds without faults serve every
request, and the same seed is the same history.
"""

from __future__ import annotations

import pytest

from kvxfer._native import _core
from kvxfer.testing.sim import Invariant, SimReport, WorldOptions, world
from kvxfer.testing.sim.checkers import Violation
from kvxfer.testing.sim.command import main
from kvxfer.testing.sim.faults import (
    FRAME_KINDS,
    IMPOSSIBLE,
    REQUEST_KINDS,
    TIMED_KINDS,
    FaultWeights,
    Kind,
    TransferPhase,
)
from kvxfer.testing.sim.play import play_many
from kvxfer.testing.sim.virtual_clock import S

SEEDS = 200
QUICK_SEEDS = 50


def test_50_seeds_hold_every_invariant() -> None:
    batch = play_many(SEEDS, QUICK_SEEDS, "core", WorldOptions(), jobs=1)
    assert not batch.failures, "\n".join([*batch.failures[0].recent[-40:], str(batch.failures[0])])
    assert batch.totals.seeds == QUICK_SEEDS
    assert batch.totals.served > 0.5 * batch.totals.requests
    assert batch.totals.rest_max_ns < WorldOptions().rest_ns


@pytest.fixture(scope="module")
def chaos() -> SimReport:
    batch = play_many(0, SEEDS, "core", WorldOptions(), jobs=1)
    assert not batch.failures, "\n".join([*batch.failures[0].recent[-40:], str(batch.failures[0])])
    return batch.totals


@pytest.mark.deep
def test_every_seed_holds_every_invariant(chaos: SimReport) -> None:
    assert chaos.seeds == SEEDS


@pytest.mark.deep
def test_machines_do_not_pass_by_failing_everything(chaos: SimReport) -> None:
    assert chaos.committed_share > 0.4
    assert chaos.served > 0.5 * chaos.requests
    assert set(chaos.lanes) == set(chaos.post_lanes) == {"mapped", "memory", "stream", "cma", "ucx", "unix"}
    for op in ("fetch", "push"):
        assert chaos.post_committed_share(op) > 0.5
        assert {code for kind, _, code in chaos.posts if kind == op} >= {
            "refused",
            "checksum",
            "grant_revoked",
            "memory_gone",
        }


@pytest.mark.deep
def test_rest_comes_within_the_stated_bound(chaos: SimReport) -> None:
    assert chaos.rest_max_ns < WorldOptions().rest_ns < 25 * S


@pytest.mark.deep
def test_no_impossible_cell_was_struck(chaos: SimReport) -> None:
    assert chaos.impossible_cells() == []


@pytest.mark.deep
def test_almost_every_possible_cell_was_struck(chaos: SimReport) -> None:
    """All of them take 2,000 seeds (`make sim SEEDS=2000`); of the kinds, none may be asleep."""
    assert len(chaos.empty_cells()) < 12
    assert {kind for kind, _ in chaos.struck} == set(Kind)


def test_cells_and_groups_are_whole() -> None:
    acts = {Kind.PULL_BEFORE_GRANT, Kind.REGRANT}
    assert set(FRAME_KINDS) | set(TIMED_KINDS) | set(REQUEST_KINDS) | acts == set(Kind)
    assert all(IMPOSSIBLE.values())


def test_memory_that_is_gone_for_every_lane_and_a_lost_session_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-sided read finds nothing, the next lane sends something else instead, and no word of that arrives."""
    monkeypatch.setattr(FaultWeights, "swarm", lambda _: FaultWeights({Kind.GONE_THEN_LOST: 2.0}))
    batch = play_many(0, 20, "core", WorldOptions(), jobs=1)
    assert not batch.failures, batch.failures[0]
    totals = batch.totals
    assert {phase for kind, phase in totals.struck if kind is Kind.GONE_THEN_LOST} >= {
        TransferPhase.READING,
        TransferPhase.CONFIRMING,
    }
    assert totals.finals["FAILED", "memory_gone"] + totals.finals["FAILED", "grant_revoked"] > 20
    assert totals.committed_share > 0.5


def test_quiet_worlds_serve_everybody() -> None:
    batch = play_many(0, 40, "core", WorldOptions(has_faults=False), jobs=1)
    assert not batch.failures, batch.failures[0]
    totals = batch.totals
    assert set(totals.finals) == {("COMMITTED", "ok")}
    assert set(totals.posts) == {("fetch", "COMMITTED", "ok"), ("push", "COMMITTED", "ok")}
    assert sum(totals.posts.values()) == totals.posted >= 40 * 10
    assert totals.served == totals.requests >= 40 * 20
    assert totals.struck.total() == sum(n for (kind, _), n in totals.struck.items() if kind is Kind.PULL_BEFORE_GRANT)


@pytest.mark.parametrize("seed", [0, 7, 23, 41, 99])
def test_same_seed_same_history(seed: int) -> None:
    one, other = (world(seed, machines=_core).run() for _ in range(2))
    assert one.digest == other.digest
    assert one == other


def test_other_seed_other_history() -> None:
    assert len({world(seed, machines=_core).run().digest for seed in range(5)}) == 5


def test_worlds_are_as_large_as_promised() -> None:
    for seed in range(5):
        run = world(seed, machines=_core)
        assert sum(name.startswith("p") for name in run.slots) >= 2
        assert sum(name.startswith("d") for name in run.slots) >= 2
        assert run.run().requests >= 20


@pytest.mark.deep
def test_jobs_change_nothing() -> None:
    one, two = (play_many(300, 60, "core", WorldOptions(), jobs=jobs).totals for jobs in (1, 2))
    assert one == two


def test_a_failing_seed_is_printed_and_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvxfer.testing.sim.checkers import Checkers

    def broken(self: Checkers, incarnation: int, id_: bytes) -> None:
        raise Violation(Invariant.ONCE, "made up")

    monkeypatch.setattr(Checkers, "drained", broken)
    assert main(["--seeds", "3", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "seed 0: Violation: invariant 3 (once): made up" in printed
    assert "replay: python -m kvxfer.testing.sim --replay 0\n" in printed
    assert main(["--replay", "0"]) == 1
    assert "made up" in capsys.readouterr().out


def test_bad_machines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machines", "bugs:no_such_bug"]) == 2
    assert main(["--machines", "rust"]) == 2
    assert "no machines 'rust'" in capsys.readouterr().err
