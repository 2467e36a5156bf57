"""The light is judged on time that the watcher was awake, and never darkens early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.liveness import AwakeClock, Light, Liveness, LivenessLimits

MS = 1_000_000
LIMITS = LivenessLimits(suspect_after_ns=1500 * MS, dead_after_ns=3000 * MS, gap_max_ns=500 * MS)


def pass_time(liveness: Liveness[str], start_ns: int, duration_ns: int) -> int:
    """Observe every 250 ms, as a coordinator that is scheduled well does."""
    for now_ns in range(start_ns, start_ns + duration_ns, 250 * MS):
        liveness.observe(now_ns)
    return start_ns + duration_ns


def test_silence_turns_yellow_then_red() -> None:
    liveness: Liveness[str] = Liveness(LIMITS, 0)
    liveness.beat("a", 0)
    now_ns = pass_time(liveness, 0, 1499 * MS)
    assert liveness.light("a", now_ns) is Light.GREEN
    now_ns = pass_time(liveness, now_ns, 1 * MS)
    assert liveness.light("a", now_ns) is Light.YELLOW
    now_ns = pass_time(liveness, now_ns, 1500 * MS)
    assert liveness.light("a", now_ns) is Light.RED


def test_watcher_that_slept_declares_no_key_dead() -> None:
    liveness: Liveness[str] = Liveness(LIMITS, 0)
    liveness.beat("a", 0)
    now_ns = pass_time(liveness, 0, 900 * MS)
    an_hour_later_ns = now_ns + 3600 * 1000 * MS
    assert liveness.light("a", an_hour_later_ns) is Light.GREEN
    now_ns = pass_time(liveness, an_hour_later_ns, 2000 * MS)
    assert liveness.light("a", now_ns) is Light.RED


def test_a_forgotten_key_is_unknown() -> None:
    liveness: Liveness[str] = Liveness(LIMITS, 0)
    liveness.beat("a", 0)
    assert "a" in liveness
    liveness.forget("a")
    liveness.forget("a")
    assert len(liveness) == 0
    with pytest.raises(KeyError):
        liveness.light("a", 1)


@pytest.mark.parametrize("limits", [(0, 1, 1), (2, 1, 1), (1, 1, 1), (1, 2, 0)])
def test_limits_must_make_sense(limits: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        LivenessLimits(*limits)


@given(st.lists(st.integers(-(10**10), 10**12), max_size=60))
def test_awake_time_never_runs_faster_than_the_clock_nor_back(gaps_ns: list[int]) -> None:
    clock, now_ns, last_ns = AwakeClock(0, gap_max_ns=LIMITS.gap_max_ns), 0, 0
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        awake_ns = clock.observe(now_ns)
        assert last_ns <= awake_ns <= last_ns + LIMITS.gap_max_ns
        assert awake_ns - last_ns <= max(gap_ns, 0)
        last_ns = awake_ns


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 10**10)), max_size=60))
def test_never_red_before_dead_after_of_real_silence(events: list[tuple[str, bool, int]]) -> None:
    liveness: Liveness[str] = Liveness(LIMITS, 0)
    now_ns, seen_ns = 0, {}
    for key, is_beat, gap_ns in events:
        now_ns += gap_ns
        if is_beat:
            liveness.beat(key, now_ns)
            seen_ns[key] = now_ns
        for known, beat_ns in seen_ns.items():
            light = liveness.light(known, now_ns)
            if now_ns - beat_ns < LIMITS.suspect_after_ns:
                assert light is Light.GREEN
            if now_ns - beat_ns < LIMITS.dead_after_ns:
                assert light is not Light.RED
