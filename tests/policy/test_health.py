"""Health of a worker: every event in every state, and whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.policy.health import (
    BLAMES,
    SHARE_MIN,
    TABLE,
    Blame,
    CountedRequests,
    HealthEvent,
    HealthOptions,
    HealthState,
    WorkerHealth,
    blame_of,
)

OPTIONS = HealthOptions()
E, S = HealthEvent, HealthState


class Machine:
    """A worker's health with a clock beside it. Without randomness the first wait is 0.25 s, then 0.5 s, 1 s ..."""

    def __init__(self, options: HealthOptions = OPTIONS) -> None:
        self.now_s = 1000.0
        self.health = WorkerHealth(options)

    @property
    def state(self) -> HealthState:
        return self.health.state(self.now_s)

    @property
    def is_closed(self) -> bool:
        return self.health.is_closed(self.now_s)

    def fail(self, kind: str, request_id: str = "", *, is_counted: bool = False) -> HealthState:
        self.health.failed(kind, request_id, self.now_s, 0.0, is_counted=is_counted)
        return self.state

    def succeed(self, request_id: str = "") -> HealthState:
        self.health.succeeded(request_id, self.now_s, 0.0)
        return self.state

    def probe(self, event: HealthEvent) -> HealthState:
        self.health.probed(event, self.now_s, 0.0)
        return self.state

    def begin(self, request_id: str) -> bool:
        return self.health.begin(request_id, self.now_s)

    def until_probe(self) -> float:
        assert self.health.probe_due_s is not None
        return self.health.probe_due_s - self.now_s

    def half_open(self) -> None:
        if self.state is not S.OUT:
            assert self.fail("unreachable") is S.OUT
        self.now_s += self.until_probe()
        assert self.probe(E.PROBE_PASSED) is S.HALF_OPEN


def test_health_table_has_every_event_in_every_state() -> None:
    assert set(TABLE) == set(HealthState)
    assert all(set(row) == set(HealthEvent) for row in TABLE.values())


def test_health_refused_connection_ejects_at_once() -> None:
    machine = Machine()
    assert machine.fail("unreachable", "r1", is_counted=True) is S.OUT
    assert machine.is_closed
    assert machine.health.ejected_for == "unreachable"
    assert machine.until_probe() == 0.25


@pytest.mark.parametrize("kind", sorted(kind for kind, blame in BLAMES.items() if blame is Blame.IN_A_ROW))
def test_health_failures_in_a_row_eject(kind: str) -> None:
    machine = Machine()
    assert [machine.fail(kind, f"r{number}") for number in range(3)] == [S.IN, S.IN, S.OUT]


def test_health_success_between_ends_the_row() -> None:
    machine = Machine()
    for _ in range(10):
        machine.fail("error")
        machine.fail("hung")
        assert machine.succeed() is S.IN
        assert machine.health.is_plain


def test_health_failures_of_one_request_count_once() -> None:
    machine, counted = Machine(), CountedRequests()
    for _ in range(10):
        assert machine.fail("error", "r1", is_counted=counted.add("r1")) is S.IN
    assert machine.health.failures_in_a_row == 1


@pytest.mark.parametrize("kind", sorted(kind for kind, blame in BLAMES.items() if blame is Blame.NEVER))
def test_health_faults_of_others_never_count(kind: str) -> None:
    machine = Machine()
    for number in range(500):
        assert machine.fail(kind, f"r{number}") is S.IN
    assert machine.health.is_plain


@pytest.mark.parametrize("kind", ["unread", "connect_timeout"])
def test_health_burst_of_resets_ejects_no_live_worker(kind: str) -> None:
    machine = Machine()
    for number in range(500):
        assert machine.fail(kind, f"r{number}") is S.IN
        assert machine.health.probe_due_s == 0.0
        if number % 50 == 0:
            assert machine.probe(E.PROBE_PASSED) is S.IN
    assert machine.probe(E.PROBE_PASSED) is S.IN
    assert machine.health.is_plain
    assert machine.health.probe_due_s is None


def test_health_doubt_is_confirmed_by_a_refused_probe() -> None:
    machine = Machine()
    machine.fail("unread", "r1")
    assert machine.probe(E.PROBE_REFUSED) is S.OUT


def test_health_doubt_counts_beside_a_failed_probe() -> None:
    machine = Machine()
    machine.fail("unread", "r1")
    assert machine.probe(E.PROBE_FAILED) is S.IN
    assert machine.probe(E.PROBE_FAILED) is S.OUT


def test_health_probes_that_pass_do_not_excuse_requests_that_fail() -> None:
    machine = Machine()
    for number in range(3):
        assert machine.state is S.IN
        machine.fail("hung", f"r{number}")
        machine.probe(E.PROBE_PASSED)
    assert machine.state is S.OUT


def test_health_probes_that_fail_are_excused_by_a_request_that_succeeds() -> None:
    machine = Machine()
    for _ in range(10):
        machine.probe(E.PROBE_FAILED)
        machine.probe(E.PROBE_FAILED)
        assert machine.succeed() is S.IN


def test_health_way_back_leads_over_a_probe_one_request_and_a_slow_start() -> None:
    machine = Machine()
    machine.fail("unreachable")
    assert machine.probe(E.PROBE_PASSED) is S.OUT  # it was not due
    machine.half_open()
    assert not machine.is_closed
    assert machine.begin("trial")
    assert machine.is_closed  # to all others
    assert machine.succeed("another") is S.HALF_OPEN  # let in before it was ejected
    assert machine.succeed("trial") is S.SLOW_START
    assert not machine.is_closed
    assert machine.health.share(machine.now_s) == SHARE_MIN
    machine.now_s += OPTIONS.slow_start_s / 2
    assert machine.health.share(machine.now_s) == pytest.approx((1 + SHARE_MIN) / 2)
    machine.now_s += OPTIONS.slow_start_s / 2
    assert machine.state is S.IN
    assert machine.health.share(machine.now_s) == 1.0
    assert machine.health.is_plain


def test_health_half_open_lets_one_request_in_at_a_time() -> None:
    machine = Machine()
    machine.half_open()
    for number in range(5):
        assert not machine.is_closed
        assert machine.begin(f"r{number}")
        assert machine.is_closed
        assert machine.fail("refused", f"r{number}") is S.HALF_OPEN  # the client's own fault: no verdict
        machine.health.end(f"r{number}")
    assert machine.begin("last")
    assert machine.fail("error", "last", is_counted=True) is S.OUT  # one is enough, whatever was counted elsewhere


def test_health_request_from_before_the_ejection_decides_nothing() -> None:
    machine = Machine()
    machine.half_open()
    machine.begin("trial")
    assert machine.fail("lost", "old") is S.HALF_OPEN
    assert machine.fail("hung", "old") is S.HALF_OPEN
    assert machine.fail("unreachable", "old") is S.OUT  # which is news


def test_health_waits_grow_until_it_was_in_again() -> None:
    machine = Machine()
    machine.fail("unreachable")
    waits = []
    for _ in range(6):
        waits.append(machine.until_probe())
        machine.now_s += waits[-1]
        assert machine.probe(E.PROBE_REFUSED) is S.OUT
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    machine.half_open()
    machine.begin("trial")
    assert machine.fail("error", "trial") is S.OUT
    assert machine.until_probe() == 5.0
    machine.half_open()
    machine.begin("trial")
    machine.succeed("trial")
    assert machine.fail("unreachable") is S.OUT  # in its slow start
    assert machine.until_probe() == 5.0
    machine.half_open()
    machine.begin("trial")
    machine.succeed("trial")
    machine.now_s += OPTIONS.slow_start_s
    assert machine.state is S.IN
    machine.fail("unreachable")
    assert machine.until_probe() == 0.25


def test_health_request_that_succeeds_where_all_are_out_brings_it_back() -> None:
    machine = Machine()
    machine.fail("unreachable")
    assert machine.begin("tried all the same")
    assert machine.fail("error", "tried all the same") is S.OUT
    assert machine.until_probe() == 0.25  # requests do not put the probe off
    assert machine.succeed("tried all the same") is S.SLOW_START


def test_health_share_of_the_worse_is_less() -> None:
    shares = []
    machine = Machine()
    machine.fail("unreachable")
    for _ in range(4):
        shares.append(machine.health.share(machine.now_s))
        machine.now_s += machine.until_probe()
        machine.probe(E.PROBE_FAILED)
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 4
    assert 0 < shares[-1] < shares[0] < SHARE_MIN


def test_health_options_are_checked() -> None:
    for wrong in ({"failures_to_eject": 0}, {"eject_base_s": 9.0}, {"slow_start_s": 0.0}, {"eject_cap_s": 0.0}):
        with pytest.raises(ConfigError):
            HealthOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not 'nonsense'"):
        blame_of("nonsense")


def test_counted_requests_are_bounded() -> None:
    counted = CountedRequests(most=3)
    assert [counted.add(name) for name in ("a", "b", "a", "", "", "c", "d", "a", "d")] == [
        *(False, False, True, False, False, False, False, False, True)
    ]
    assert len(counted) == 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "succeed", "fail", "probe", "wait"]),
        st.sampled_from(["r1", "r2", "r3", ""]),
        st.sampled_from(sorted(BLAMES)),
        st.sampled_from([E.PROBE_PASSED, E.PROBE_FAILED, E.PROBE_REFUSED]),
        st.floats(0, 12),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS, st.floats(0, 1, exclude_max=True))
def test_health_keeps_its_rules_whatever_happens(
    steps: list[tuple[str, str, str, HealthEvent, float, bool]], random: float
) -> None:
    machine = Machine()
    health, trials = machine.health, dict[str, int]()
    was = machine.state
    for what, name, kind, event, wait_s, is_counted in steps:
        now_s = machine.now_s
        was = health.state(now_s)
        is_trial = name in trials
        due_s = health.probe_due_s
        if what == "begin":
            let_in = not health.is_closed(now_s)
            if health.begin(name, now_s):
                assert was in (S.OUT, S.HALF_OPEN)
                assert not (was is S.HALF_OPEN and let_in and trials)  # never two that were let in
                trials[name] = trials.get(name, 0) + 1
        elif what == "end":
            health.end(name)
            if trials.get(name, 0) > 1:
                trials[name] -= 1
            else:
                trials.pop(name, None)
        elif what == "succeed":
            health.succeeded(name, now_s, random)
            if health.state(now_s) is S.SLOW_START and was is not S.SLOW_START:
                assert is_trial
                assert was in (S.OUT, S.HALF_OPEN)
                trials.clear()
        elif what == "fail":
            before = health.ejections
            health.failed(kind, name, now_s, random, is_counted=is_counted)
            if BLAMES[kind] in (Blame.NEVER, Blame.DOUBT):
                assert (health.state(now_s), health.ejections) == (was, before)
            if BLAMES[kind] is Blame.AT_ONCE:
                assert health.state(now_s) is S.OUT
        elif what == "probe":
            health.probed(event, now_s, random)
            if was is S.OUT and health.state(now_s) is not S.OUT:
                assert event is E.PROBE_PASSED
                assert due_s is not None
                assert now_s >= due_s
                assert health.state(now_s) is S.HALF_OPEN
        else:
            machine.now_s += wait_s
        state = machine.state
        assert 0 < health.share(machine.now_s) <= 1
        assert health.is_steady == (state is S.IN)
        assert machine.is_closed == (state is S.OUT or (state is S.HALF_OPEN and bool(trials)))
        if state is S.OUT:
            assert health.probe_due_s is not None
            assert health.probe_due_s - machine.now_s <= OPTIONS.eject_cap_s
        elif health.probe_due_s is not None:
            assert health.probe_due_s == 0.0
        if state is S.IN and was is not S.IN:
            assert was is S.SLOW_START


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 30))
def test_health_comes_back_within_a_stated_time_once_all_is_well(random: float, refused: int) -> None:
    """From the moment at which the worker answers again."""
    now_s, health = 0.0, WorkerHealth(OPTIONS)
    health.failed("unreachable", "", now_s, random)
    for _ in range(refused):
        assert health.probe_due_s is not None
        now_s = health.probe_due_s
        health.probed(E.PROBE_REFUSED, now_s, random)
    well_s = now_s
    assert health.probe_due_s is not None
    now_s = health.probe_due_s
    health.probed(E.PROBE_PASSED, now_s, random)
    assert health.begin("trial", now_s)
    health.succeeded("trial", now_s, random)
    assert now_s - well_s <= OPTIONS.eject_cap_s
    assert health.state(now_s + OPTIONS.slow_start_s + 1e-6) is S.IN


steps = st.tuples(st.sampled_from(list(HealthEvent)), st.floats(0.0, 3.0), st.floats(0.0, 0.999))


@given(st.lists(steps, max_size=40), st.lists(st.floats(0.0, 20.0), max_size=5))
def test_health_that_another_process_tells_is_the_same_now_and_later(
    events: list[tuple[HealthEvent, float, float]], later: list[float]
) -> None:
    machine, told = Machine(), WorkerHealth(OPTIONS)
    for event, wait_s, random in events:
        machine.now_s += wait_s
        machine.health.apply(event, machine.now_s, random, reason="why")
        told.take(machine.health.account(machine.now_s))
    for wait_s in [0.0, *later]:
        machine.now_s += wait_s
        assert told.state(machine.now_s) is machine.state
        assert told.is_closed(machine.now_s) == machine.is_closed
        assert told.share(machine.now_s) == machine.health.share(machine.now_s)
        assert (told.is_plain, told.is_steady) == (machine.health.is_plain, machine.health.is_steady)
        assert told.failures_in_a_row == machine.health.failures_in_a_row
        assert (told.ejected_for, told.ejections) == (machine.health.ejected_for, machine.health.ejections)


def test_health_trial_in_another_process_closes_a_half_open_worker() -> None:
    machine, told = Machine(), WorkerHealth(OPTIONS)
    machine.health.apply(E.REFUSED, machine.now_s, 0.0)
    machine.now_s += 1.0
    machine.health.probed(E.PROBE_PASSED, machine.now_s, 0.0)
    assert machine.health.begin("r", machine.now_s)
    told.take(machine.health.account(machine.now_s))
    assert told.is_closed(machine.now_s)
    machine.health.end("r")
    told.take(machine.health.account(machine.now_s))
    assert not told.is_closed(machine.now_s)
