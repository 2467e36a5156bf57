"""The limits of an API key: what is refused, when it may be asked again, and that nothing counts twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.policy.keylimits import KeyLimits, KeyMeter, KeyPass, KeyRefusal, LimitKind, MinuteBucket


def entered(meter: KeyMeter, now: float = 0.0) -> KeyPass:
    found = meter.enter(now)
    assert isinstance(found, KeyPass), found
    return found


def refused(meter: KeyMeter, now: float = 0.0) -> KeyRefusal:
    found = meter.enter(now)
    assert isinstance(found, KeyRefusal), found
    return found


def test_no_limits_refuse_nothing() -> None:
    meter = KeyMeter(KeyLimits(), 0.0)
    passes = [entered(meter) for _ in range(1000)]
    assert all(one.reserve(1e9, 0.0) is None for one in passes)
    assert meter.inflight == 1000
    for one in passes:
        one.end(0.0)
    assert meter.inflight == 0


def test_requests_of_a_minute_are_used_up_and_come_back_with_time() -> None:
    meter = KeyMeter(KeyLimits(requests_per_minute=60), 0.0)
    for _ in range(60):
        entered(meter).end(0.0)
    assert refused(meter) == KeyRefusal(LimitKind.REQUESTS, 60, 1.0)
    assert refused(meter, 0.5).retry_after_s == pytest.approx(0.5)
    entered(meter, 1.0).end(1.0)
    assert refused(meter, 1.0).limit is LimitKind.REQUESTS


def test_a_request_a_minute_is_admitted_once_a_minute() -> None:
    meter = KeyMeter(KeyLimits(requests_per_minute=0.5), 0.0)
    entered(meter).end(0.0)
    assert refused(meter, 60.0).retry_after_s == pytest.approx(60.0)
    entered(meter, 120.0).end(120.0)


def test_requests_at_once_are_bounded_until_one_ends() -> None:
    meter = KeyMeter(KeyLimits(max_inflight=2), 0.0)
    first, _ = entered(meter), entered(meter)
    assert refused(meter).limit is LimitKind.INFLIGHT
    first.end(0.0)
    first.end(0.0)
    entered(meter)
    assert refused(meter).limit is LimitKind.INFLIGHT
    assert meter.inflight == 2


def test_tokens_are_settled_by_what_the_request_cost() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=100), 0.0)
    one = entered(meter)
    assert one.reserve(90, 0.0) is None
    other = entered(meter)
    assert other.reserve(20, 0.0) == KeyRefusal(LimitKind.TOKENS, 100, 6.0)
    other.end(0.0)
    one.end(0.0, 10)
    again = entered(meter)
    assert again.reserve(90, 0.0) is None
    again.end(0.0)  # as reserved
    assert refused(meter).limit is LimitKind.TOKENS


def test_a_request_larger_than_a_minute_needs_a_full_bucket_and_is_paid_back() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=60), 0.0)
    one = entered(meter)
    assert one.reserve(180, 0.0) is None
    one.end(0.0)
    assert refused(meter, 0.0).retry_after_s == pytest.approx(121.0)
    assert refused(meter, 100.0).limit is LimitKind.TOKENS
    late = entered(meter, 130.0)
    refusal = late.reserve(180, 130.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(50.0)
    late.end(130.0)
    assert entered(meter, 180.0).reserve(180, 180.0) is None


def test_an_answer_longer_than_expected_is_paid_back() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=60), 0.0)
    one = entered(meter)
    assert one.reserve(10, 0.0) is None
    one.end(0.0, 120)
    assert refused(meter, 60.0).limit is LimitKind.TOKENS
    entered(meter, 61.0)


def test_what_a_limit_refuses_is_not_counted_as_a_request() -> None:
    meter = KeyMeter(KeyLimits(requests_per_minute=2, tokens_per_minute=100), 0.0)
    holding = entered(meter)
    assert holding.reserve(95, 0.0) is None
    for _ in range(10):
        one = entered(meter)
        assert one.reserve(50, 0.0) is not None
        one.end(0.0)
        one.end(0.0)
    assert meter.inflight == 1
    last = entered(meter)
    last.end(0.0, is_counted=False)
    entered(meter).end(0.0)
    assert refused(meter).limit is LimitKind.REQUESTS


def test_reserving_twice_or_after_the_end_takes_nothing() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=100), 0.0)
    one = entered(meter)
    for _ in range(5):
        assert one.reserve(60, 0.0) is None
    assert one.reserved == 60
    one.end(0.0, 0)
    assert one.reserve(60, 0.0) is None
    assert entered(meter).reserve(100, 0.0) is None


def test_new_limits_keep_what_was_used() -> None:
    meter = KeyMeter(KeyLimits(requests_per_minute=10, max_inflight=5), 0.0)
    running = [entered(meter) for _ in range(5)]
    meter.adopt(KeyLimits(requests_per_minute=20, max_inflight=2), 0.0)
    assert refused(meter).limit is LimitKind.INFLIGHT
    for one in running:
        one.end(0.0)
    for _ in range(15):
        entered(meter).end(0.0)
    assert refused(meter).limit is LimitKind.REQUESTS
    meter.adopt(KeyLimits(requests_per_minute=1), 30.0)
    entered(meter, 30.0).end(30.0)
    assert refused(meter, 30.0).limit is LimitKind.REQUESTS
    meter.adopt(KeyLimits(), 30.0)
    for _ in range(100):
        entered(meter, 30.0).end(30.0)


def test_a_request_from_before_a_limit_gives_back_nothing() -> None:
    meter = KeyMeter(KeyLimits(), 0.0)
    old = entered(meter)
    assert old.reserve(1000, 0.0) is None
    meter.adopt(KeyLimits(tokens_per_minute=100), 0.0)
    new = entered(meter)
    assert new.reserve(100, 0.0) is None
    old.end(0.0, 0)
    assert refused(meter).limit is LimitKind.TOKENS


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests_per_minute": -1},
        {"tokens_per_minute": math.inf},
        {"tokens_per_minute": math.nan},
        {"max_inflight": -2},
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KeyLimits(**wrong)  # type: ignore[arg-type]


RATES = st.floats(0.1, 1e5)
STEPS = st.floats(0.0, 100.0)


@given(RATES, st.lists(st.tuples(STEPS, st.floats(0.0, 1e6)), max_size=50))
def test_a_bucket_gives_no_more_than_it_was_filled_with(rate: float, asked: list[tuple[float, float]]) -> None:
    """Up to one last take that was larger than the bucket."""
    bucket = MinuteBucket(rate, 0.0)
    now = taken = largest = 0.0
    for step, amount in asked:
        now += step
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken += amount
            largest = max(largest, amount - bucket.capacity)
    filled = bucket.capacity + now / 60 * rate
    assert taken <= (filled + max(0.0, largest)) * (1 + 1e-6) + 1e-6
    assert bucket.level <= bucket.capacity


@given(RATES, st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.0, 1e9))
def test_waiting_as_long_as_was_said_is_enough(rate: float, used: float, wanted: float, begun: float) -> None:
    bucket = MinuteBucket(rate, begun)
    bucket.take(used, begun)
    wait_s = bucket.wait_s(wanted, begun)
    assert bucket.wait_s(wanted, begun + wait_s * (1 + 1e-9) + 1e-6) == 0


@given(RATES, st.lists(st.floats(-100, 100), max_size=30))
def test_a_clock_that_goes_back_gives_nothing(rate: float, steps: list[float]) -> None:
    bucket = MinuteBucket(rate, 0.0)
    bucket.take(1e9, 0.0)
    before, most, now = bucket.level, 0.0, 0.0
    for step in steps:
        now += step
        most = max(most, now)
        bucket.wait_s(1.0, now)
    assert bucket.level <= before + most / 60 * rate + 1e-3


ACTIONS = st.one_of(
    st.tuples(st.just("enter"), STEPS),
    st.tuples(st.just("reserve"), st.floats(0.0, 500.0)),
    st.tuples(st.just("end"), st.none() | st.floats(0.0, 500.0)),
    st.tuples(st.just("end twice"), st.floats(0.0, 500.0)),
    st.tuples(st.just("adopt"), st.integers(0, 3)),
)
LIMITS = [
    KeyLimits(requests_per_minute=30, tokens_per_minute=300, max_inflight=3),
    KeyLimits(),
    KeyLimits(requests_per_minute=5),
    KeyLimits(tokens_per_minute=100, max_inflight=1),
]


@given(st.lists(ACTIONS, max_size=80))
def test_whatever_happens_each_request_is_released_once(actions: list[tuple[str, float | None]]) -> None:
    meter = KeyMeter(LIMITS[0], 0.0)
    open_passes: list[KeyPass] = []
    now = 0.0
    for what, value in actions:
        if what == "enter":
            now += value or 0.0
            bound = meter.limits.max_inflight
            found = meter.enter(now)
            if isinstance(found, KeyPass):
                assert not bound or meter.inflight <= bound
                open_passes.append(found)
            else:
                assert found.retry_after_s > 0
        elif what == "reserve" and open_passes:
            open_passes[-1].reserve(value or 0.0, now)
        elif what in ("end", "end twice") and open_passes:
            one = open_passes.pop(0)
            one.end(now, value)
            if what == "end twice":
                one.end(now, value)
        elif what == "adopt":
            meter.adopt(LIMITS[int(value or 0)], now)
        assert meter.inflight == len(open_passes)
    for one in open_passes:
        one.end(now, 0.0)
    assert meter.inflight == 0


@given(st.lists(st.tuples(STEPS, st.floats(1.0, 200.0), st.floats(0.0, 400.0)), max_size=40))
def test_tokens_over_time_stay_within_the_rate(requests: list[tuple[float, float, float]]) -> None:
    """What requests cost in the end, up to what one of them may cost beyond its reservation."""
    limits = KeyLimits(tokens_per_minute=120)
    meter = KeyMeter(limits, 0.0)
    now = cost = over = 0.0
    for step, expected, real in requests:
        now += step
        found = meter.enter(now)
        if isinstance(found, KeyPass):
            if found.reserve(expected, now) is None:
                cost += real
                over = max(over, real, expected)
                found.end(now, real)
            else:
                found.end(now)
    assert cost <= 120 + now / 60 * 120 + over + 1e-6
