"""One bucket of several processes: whatever they take and whenever they look, it is within a moment's fill of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy.keylimits import KeyLimits, KeyMeter, KeyPass, KeyRefusal, LimitKind, MinuteBucket
from kvxfer.router.group.key_cells import LOOK_S, KeyCells
from kvxfer.router.group.segment import HEADER, KEY_SEATS, SharedCounts

ROWS = 3
EPSILON = 1e-5
"""Cells hold millionths."""


class Process:
    """One meter, of a holder at seat 5, which looks each LOOK_S."""

    def __init__(self, segment: SharedCounts, row: int, limits: KeyLimits, now: float, like: Process | None) -> None:
        self.cells = KeyCells(segment, row)
        self.use = self.cells.seat(5)
        if like is not None:
            requests, tokens = like.meter.levels(now)
            if requests is not None:
                self.use.requests.tell(requests, now, like.use.requests.seen)
            if tokens is not None:
                self.use.tokens.tell(tokens, now, like.use.tokens.seen)
        self.meter: KeyMeter = KeyMeter(limits, now, self.use)
        self.looked_s = now


class Several:
    """Processes over one segment, in simulated time, beside one bucket from which the same is taken."""

    def __init__(self, rate: float, rows: int = ROWS) -> None:
        self.limits = KeyLimits(tokens_per_minute=rate)
        self.segment = SharedCounts.make(rows)
        self.now = 1000.0
        self.processes = [Process(self.segment, row, self.limits, self.now, None) for row in range(rows)]
        self.one = MinuteBucket(rate, self.now)

    def advance(self, seconds: float) -> None:
        """Each process looks when it is time to."""
        end_s = self.now + seconds
        while True:
            due = min(self.processes, key=lambda process: process.looked_s)
            if due.looked_s + LOOK_S > end_s:
                break
            due.looked_s += LOOK_S
            due.cells.look(due.looked_s)
        self.now = end_s

    def begin(self, row: int, amount: float) -> KeyPass | None:
        """A request that reserves so much; None where it is refused."""
        entered = self.processes[row].meter.enter(self.now)
        if isinstance(entered, KeyRefusal):
            return None
        if entered.reserve(amount, self.now) is not None:
            entered.end(self.now)
            return None
        self.one.take(amount, self.now)
        return entered

    def end(self, taken: KeyPass, cost: float) -> None:
        self.one.put_back(taken.reserved - cost, self.now)
        taken.end(self.now, cost)

    def replace(self, row: int) -> None:
        """It was killed; another one begins as the last process is, which leads."""
        self.segment.clear(row)
        self.processes[row] = Process(self.segment, row, self.limits, self.now, self.processes[-1])

    def errors(self) -> list[float]:
        """By how much each is fuller than the one bucket."""
        self.one.look(self.now)
        found = []
        for process in self.processes:
            level = process.meter.levels(self.now)[1]
            assert level is not None
            found.append(level - self.one.level)
        return found


RATES = st.sampled_from([3.0, 60.0, 6000.0])
TAKES = st.tuples(st.floats(0.0, 3.0), st.integers(0, ROWS - 1), st.floats(0.0, 1.2), st.booleans())


@given(RATES, st.lists(TAKES, max_size=60))
def test_processes_together_admit_what_one_bucket_does(
    rate: float, steps: list[tuple[float, int, float, bool]]
) -> None:
    """Each is at least as full as the one bucket, and fuller by the fill between two looks at most."""
    several = Several(rate)
    try:
        begun_s, taken, largest = several.now, 0.0, 0.0
        for seconds, row, part, is_replaced in steps:
            several.advance(seconds)
            if is_replaced and row < ROWS - 1:
                several.replace(row)
            amount = part * max(1.0, rate)
            if several.begin(row, amount) is not None:
                taken += amount
                largest = max(largest, amount - max(1.0, rate))
            if not row % 2:
                errors = several.errors()
                assert min(errors) >= -EPSILON * max(1.0, rate)
                assert max(errors) <= rate / 60 * LOOK_S + EPSILON * max(1.0, rate)
        filled = max(1.0, rate) + (several.now - begun_s) / 60 * rate
        assert taken <= filled + rate / 60 * LOOK_S * ROWS + largest + EPSILON * max(1.0, rate)
    finally:
        several.segment.close()


@given(RATES, st.lists(st.tuples(TAKES, st.floats(0.0, 1.5)), max_size=40))
def test_what_is_given_back_is_given_to_all(
    rate: float, steps: list[tuple[tuple[float, int, float, bool], float]]
) -> None:
    several = Several(rate)
    try:
        running: list[KeyPass] = []
        ended = 0
        for (seconds, row, part, ends), cost in steps:
            several.advance(seconds)
            taken = several.begin(row, part * max(1.0, rate))
            if taken is not None:
                running.append(taken)
            if ends and running:
                one = running.pop(0)
                several.end(one, one.reserved * cost)
                ended += 1
            assert max(several.errors()) <= rate / 60 * LOOK_S * (ended + 1) + EPSILON * max(1.0, rate)
    finally:
        several.segment.close()


def test_use_is_seen_at_the_next_request_and_levels_agree() -> None:
    several = Several(60.0)
    assert several.begin(0, 40.0) is not None
    assert several.begin(1, 30.0) is None
    assert several.begin(1, 20.0) is not None
    assert several.begin(2, 1.0) is None
    assert several.errors() == pytest.approx([0.0] * ROWS, abs=EPSILON)
    several.advance(30.0)
    assert several.begin(2, 31.0) is None
    assert several.begin(2, 30.0) is not None
    several.segment.close()


def test_a_holder_that_rests_costs_no_look_and_loses_nothing() -> None:
    """A full bucket, and use elsewhere after a long rest: the rest does not fill what was used after it."""
    several = Several(60.0)
    several.advance(100.0)
    assert several.begin(0, 60.0) is not None
    for row in (1, 2):
        assert several.begin(row, 1.0) is None
    assert several.errors() == pytest.approx([0.0] * ROWS, abs=EPSILON)
    several.segment.close()


def test_a_process_that_begins_does_not_begin_full() -> None:
    several = Several(60.0)
    assert several.begin(0, 60.0) is not None
    several.replace(0)
    assert several.begin(0, 1.0) is None
    several.advance(10.0)
    assert several.errors() == pytest.approx([0.0] * ROWS, abs=EPSILON)
    several.segment.close()


def test_requests_at_once_are_of_all_and_a_dead_process_has_none() -> None:
    segment = SharedCounts.make(ROWS)
    limits = KeyLimits(max_inflight=2)
    processes = [Process(segment, row, limits, 0.0, None) for row in range(ROWS)]
    first = processes[0].meter.enter(0.0)
    assert isinstance(first, KeyPass)
    assert isinstance(processes[1].meter.enter(0.0), KeyPass)
    for process in processes:
        refusal = process.meter.enter(0.0)
        assert isinstance(refusal, KeyRefusal)
        assert refusal.limit is LimitKind.INFLIGHT
    segment.clear(1)
    assert isinstance(processes[2].meter.enter(0.0), KeyPass)
    first.end(0.0)
    first.end(0.0)
    assert segment.key_inflight(5) == 1
    segment.close()


def test_what_runs_moves_with_its_holder() -> None:
    """A limit that begins and ends while requests run: no count is left anywhere."""
    segment = SharedCounts.make(ROWS)
    cells = KeyCells(segment, 0)
    meter = KeyMeter(KeyLimits(), 0.0)
    before = meter.enter(0.0)
    assert isinstance(before, KeyPass)
    meter.adopt(KeyLimits(max_inflight=2, requests_per_minute=60), 0.0, cells.seat(3))
    assert segment.key_inflight(3) == 1
    inside = meter.enter(0.0)
    assert isinstance(inside, KeyPass)
    assert isinstance(meter.enter(0.0), KeyRefusal)
    meter.adopt(KeyLimits(), 0.0)
    assert segment.key_inflight(3) == 0
    used = segment.keys.copy()
    for taken in (before, inside):
        taken.end(0.0, is_counted=False)
    assert meter.inflight == 0
    assert (segment.keys == used).all()  # what ended later is not told of
    segment.close()


def test_numbers_go_round() -> None:
    segment = SharedCounts.make(2)
    segment.keys[0, 1, 5] = (1 << 63) - 5_000_000
    segment.keys[1, 1, 5] = (1 << 63) - 1
    limits = KeyLimits(requests_per_minute=60)
    one, other = (Process(segment, row, limits, 0.0, None) for row in range(2))
    for _ in range(30):
        for process in (one, other):
            assert isinstance(process.meter.enter(0.0), KeyPass)
    for process in (one, other):
        assert isinstance(process.meter.enter(0.0), KeyRefusal)
        assert process.meter.levels(0.0)[0] == pytest.approx(0.0)
    assert segment.keys[0, 1, 5] < 0
    segment.close()


def test_a_request_without_bound_is_no_number_that_does_not_fit() -> None:
    segment = SharedCounts.make(2)
    limits = KeyLimits(tokens_per_minute=60)
    one, other = (Process(segment, row, limits, 0.0, None) for row in range(2))
    taken = one.meter.enter(0.0)
    assert isinstance(taken, KeyPass)
    assert taken.reserve(1e30, 0.0) is None
    assert isinstance(other.meter.enter(100.0), KeyRefusal)
    taken.end(0.0, 0.0)
    other.meter.look(100.0)
    assert isinstance(other.meter.enter(200.0), KeyPass)
    segment.close()


def test_cells_of_keys_are_of_the_same_memory_and_apart_from_the_loads() -> None:
    segment = SharedCounts.make(2)
    segment.keys[1, 2, KEY_SEATS - 1] = 7
    assert segment.table[1, -1] == 7
    segment.table[1, HEADER] = 3
    segment.keys[1, 0, 0] = 4
    segment.clear(1)
    assert not segment.table[1, :HEADER].any()
    assert segment.keys[1, 0, 0] == 0
    assert segment.keys[1, 2, KEY_SEATS - 1] == 7
    segment.close()
