"""Agents that follow what they were told are on time, however late they hear of it; load stays bounded."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.protocol.directory import Directory, IncarnationEnded
from kvxfer.protocol.pace import DOUBT_MAX, DURATION_MAX_S, CoordinatorPace, Pace
from kvxfer.types import Load
from tests.support.directory import DEAD_NS, LIMITS, MS, hello

PACE = Pace(1.0, 3.0, 2000.0)
paces = st.builds(
    Pace, st.floats(0.01, 10.0), st.floats(10.1, 3600.0), st.one_of(st.floats(0.1, 1e6), st.just(float("inf")))
)


@given(paces, st.integers(0, 1 << 20))
def test_heartbeats_a_second_are_bounded_and_durations_too(pace: Pace, agents: int) -> None:
    stretch = pace.stretch(agents)
    told = pace.told(stretch, agents)
    assert stretch >= 1
    assert told.dead_after_ms <= DURATION_MAX_S * 1e3
    assert told.return_within_ms <= DURATION_MAX_S * 1e3
    is_capped = told.dead_after_ms >= DURATION_MAX_S * 1e3 - 1
    assert is_capped or agents / (pace.heartbeat_s * stretch) <= pace.heartbeats_a_s_max * (1 + 1e-9)


@given(paces, st.lists(st.integers(0, 1 << 20), min_size=2, max_size=2).map(sorted))
def test_more_agents_never_mean_shorter_durations(pace: Pace, agents: list[int]) -> None:
    few, many = agents
    assert pace.stretch(few) <= pace.stretch(many)


@given(paces, st.integers(0, 1 << 40), st.floats(1.0, 1e4))
def test_a_promise_counts_up_to_what_was_told(pace: Pace, promised_ms: int, longest: float) -> None:
    assert 1.0 <= pace.stretch_of(promised_ms, longest=longest) <= longest


@given(paces, st.integers(1, 1 << 20))
def test_who_lost_its_connection_is_back_before_its_silence_means_death(pace: Pace, agents: int) -> None:
    told = pace.told(pace.stretch(agents), agents)
    absent_s = CoordinatorPace(pace, agents).stretch_of_absent(agents) * pace.dead_after_s
    slack_s = 0.01
    assert told.heartbeat_ms / 1e3 + told.return_within_ms / 1e3 < absent_s + slack_s
    assert told.patience_s(has_other=False) >= told.dead_after_ms / 1e3
    patience_s = told.patience_s(has_other=True)
    assert patience_s >= 2 * told.heartbeat_ms / 1e3
    is_long = 2 * told.heartbeat_ms > told.dead_after_ms
    assert is_long or patience_s + told.return_within_ms / 1e3 <= absent_s + slack_s


def test_few_agents_have_the_configured_durations() -> None:
    assert PACE.told(PACE.stretch(4), 4).heartbeat_ms == 1000
    assert PACE.told(PACE.stretch(2000), 2000).dead_after_ms == 3000


def test_ten_thousand_agents_are_told_five_seconds() -> None:
    told = PACE.told(PACE.stretch(10_000), 10_000)
    assert (told.heartbeat_ms, told.dead_after_ms, told.return_within_ms) == (5000, 15000, 40000)


@pytest.mark.parametrize("wrong", [(0.0, 3.0, 1.0), (3.0, 3.0, 1.0), (1.0, 3.0, 0.0)])
def test_a_pace_must_make_sense(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="heartbeat_s"):
        Pace(*wrong)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    lags=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_an_agent_that_keeps_its_promises_is_never_late(sizes: list[int], lags: list[int]) -> None:
    """Others come and go, so what is told grows and shrinks; the agent hears each answer up to three heartbeats late,
    and goes on by what it heard last."""
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=100, pace=Pace(1.0, 3.0, 4.0))
    registration = directory.register(hello("a"), fresh_number=1, now_ns=0)
    heard = [registration.pace]
    now_ns, streams, number = 0, [], 1
    for size, lag in zip(sizes, itertools.cycle(lags), strict=False):
        while len(streams) < size:
            number += 1
            streams.append(
                directory.register(hello(f"b{number}", number.to_bytes(16, "big")), fresh_number=number, now_ns=now_ns)
            )
        for gone in streams[size:]:
            directory.deregister(gone.stream, now_ns=now_ns)
        del streams[size:]
        pace = heard[max(0, len(heard) - 1 - lag)]
        directory.heartbeat(
            registration.stream, Load(), is_draining=False, now_ns=now_ns, promised_ms=pace.heartbeat_ms
        )
        heard.append(directory.pace)
        end_ns = now_ns + pace.heartbeat_ms * MS
        while now_ns < end_ns:
            now_ns = min(now_ns + 250 * MS, end_ns)
            directory.tick(now_ns)
            member = directory.known("a")
            assert member is not None
            assert not member[0].is_suspect
            for other in streams:
                directory.heartbeat(other.stream, Load(), is_draining=False, now_ns=now_ns)


def test_a_silent_agent_ends_after_its_own_long_promise_and_not_before() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=100, pace=Pace(1.0, 3.0, 1.0))
    others = [directory.register(hello(f"b{n}", n.to_bytes(16, "big")), fresh_number=n, now_ns=0) for n in (1, 2, 3)]
    silent = directory.register(hello("a"), fresh_number=4, now_ns=0)
    assert silent.pace.heartbeat_ms == 4000
    now_ns = 0
    ended_ns = 0
    while not ended_ns:
        now_ns += 250 * MS
        for other in others:
            directory.heartbeat(other.stream, Load(), is_draining=False, now_ns=now_ns)
        if directory.tick(now_ns):
            ended_ns = now_ns
    assert 12_000 * MS <= ended_ns <= 14_000 * MS


def test_a_restarted_coordinator_ends_nobody_while_agents_still_come_back() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=100, pace=Pace(1.0, 3.0, 100.0))
    now_ns = 0
    for number in range(1, 11):  # one each second: longer than dead_after in all
        directory.register(hello(f"b{number}", number.to_bytes(16, "big"), number), fresh_number=None, now_ns=now_ns)
        for _ in range(4):
            now_ns += 250 * MS
            assert directory.tick(now_ns) == ()
        assert not directory.is_settled
    for _ in range(12):
        now_ns += 250 * MS
        directory.tick(now_ns)
    assert directory.is_settled


@pytest.mark.parametrize(("agents", "silent", "is_held"), [(3, 3, False), (40, 20, False), (100, 40, True)])
def test_a_coordinator_to_which_many_are_silent_at_once_doubts_itself(agents: int, silent: int, is_held: bool) -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16))
    streams = [
        directory.register(hello(f"b{n}", n.to_bytes(16, "big")), fresh_number=n, now_ns=0).stream
        for n in range(1, agents + 1)
    ]
    now_ns = 0

    def run(duration_ns: int, speaking: list[int]) -> int:
        nonlocal now_ns
        found, end_ns = 0, now_ns + duration_ns
        while now_ns < end_ns:
            now_ns += 250 * MS
            for stream in speaking:
                directory.heartbeat(stream, Load(), is_draining=False, now_ns=now_ns)
            found += sum(isinstance(effect, IncarnationEnded) for effect in directory.tick(now_ns))
        return found

    assert run(DEAD_NS, streams) == 0
    assert directory.is_settled
    lost = run(5 * DEAD_NS, streams[silent:])
    assert lost == (0 if is_held else silent)
    assert directory.statistics().members["suspect"] == silent - lost
    if is_held:
        assert run(DEAD_NS, streams) == 0, "they speak again"
        assert directory.statistics().members["suspect"] == 0
        assert run((DOUBT_MAX + 2) * DEAD_NS, streams[silent:]) == silent, "not for ever"


def test_who_was_cut_off_again_while_all_came_back_has_time_to_return() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16))
    now_ns = 250 * MS
    streams = [
        directory.register(hello(f"b{n}", n.to_bytes(16, "big"), n), fresh_number=None, now_ns=now_ns).stream
        for n in (1, 2)
    ]
    directory.stream_ended(streams[0], now_ns=now_ns)
    settled_ns = 0
    while not (ended := directory.tick(now_ns)):
        now_ns += 250 * MS
        directory.heartbeat(streams[1], Load(), is_draining=False, now_ns=now_ns)
        settled_ns = settled_ns or now_ns * directory.is_settled
    assert settled_ns >= DEAD_NS
    assert now_ns - settled_ns >= DEAD_NS - 250 * MS
    assert len(ended) == 1


def test_a_restarted_coordinator_tells_what_it_takes_for_all_that_will_come_back() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=20_000, pace=PACE)
    told = PACE.told(PACE.stretch(10_000), 10_000)
    first = dataclasses.replace(hello("a", bytes(16), 1), return_within_ms=told.return_within_ms)
    now_ns = 250 * MS
    assert directory.register(first, fresh_number=None, now_ns=now_ns).pace == told
    directory.register(hello("b", bytes(16), 2), fresh_number=None, now_ns=now_ns)
    while not directory.is_settled:
        assert directory.pace == told
        assert directory.tick(now_ns) == ()
        now_ns += 250 * MS
    assert now_ns >= told.return_within_ms * MS, "one whose attempt fails at the end has time for another"
    assert directory.pace.heartbeat_ms == 1000


def test_what_agents_say_of_before_is_bounded() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=4000, pace=PACE)
    liar = dataclasses.replace(hello("a", bytes(16), 1), return_within_ms=3_600_000)
    assert directory.register(liar, fresh_number=None, now_ns=0).pace.heartbeat_ms == 2000


def test_who_is_late_when_most_are_heard_again_has_time_to_come_back() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16))
    streams = [
        directory.register(hello(f"b{n}", n.to_bytes(16, "big")), fresh_number=n, now_ns=0).stream
        for n in range(1, 101)
    ]
    now_ns = 0

    def run(duration_ns: int, speaking: list[int]) -> list[int]:
        """When agents ended."""
        nonlocal now_ns
        found, end_ns = [], now_ns + duration_ns
        while now_ns < end_ns:
            now_ns += 250 * MS
            for stream in speaking:
                directory.heartbeat(stream, Load(), is_draining=False, now_ns=now_ns)
            found += [now_ns for effect in directory.tick(now_ns) if isinstance(effect, IncarnationEnded)]
        return found

    assert run(DEAD_NS, streams) == []
    assert run(10 * DEAD_NS, streams[50:]) == []
    heard_ns = now_ns
    ended = run(3 * DEAD_NS, streams[10:])
    assert len(ended) == 10
    assert min(ended) - heard_ns >= DEAD_NS


def test_agents_that_come_later_than_the_coordinator_waited_for_unsettle_it() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=20_000, pace=PACE)
    now_ns = 0
    while not directory.is_settled:
        now_ns += 250 * MS
        directory.tick(now_ns)
    told = PACE.told(PACE.stretch(10_000), 10_000)
    first = dataclasses.replace(hello("a", bytes(16), 1), return_within_ms=told.return_within_ms)
    back = directory.register(first, fresh_number=None, now_ns=now_ns)
    assert not directory.is_settled
    assert not directory.change_since(None).is_settled
    assert back.pace == told
    back_ns = now_ns
    while not directory.is_settled:
        now_ns += 250 * MS
        directory.heartbeat(back.stream, Load(), is_draining=False, now_ns=now_ns)
        assert directory.tick(now_ns) == ()
    assert now_ns - back_ns >= told.return_within_ms * MS

    # One that ended here, or comes long after the start, says nothing of others.
    directory.deregister(back.stream, now_ns=now_ns)
    directory.register(first, fresh_number=None, now_ns=now_ns)
    assert directory.is_settled
    while now_ns < 601_000 * MS:
        now_ns += 250 * MS
        directory.tick(now_ns)
    other = dataclasses.replace(hello("b", bytes(16), 2), return_within_ms=told.return_within_ms)
    directory.register(other, fresh_number=None, now_ns=now_ns)
    assert directory.is_settled
