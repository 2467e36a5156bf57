"""When a silent stream is given up, and when a request's time is up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy.silence import (
    LOOK_MAX_S,
    Progress,
    WorkerSigns,
    is_dead_silence,
    is_to_be_asked,
    look_again_s,
)

LIMIT_S = 60.0
NOW_S = 1000.0
LONG_AGO_S = NOW_S - 2 * LIMIT_S
JUST_S = NOW_S - 1.0


def signs(
    *,
    heard_s: float = LONG_AGO_S,
    worked_s: float = -math.inf,
    counts_tokens: bool = False,
    is_out: bool = False,
    others: int = 0,
) -> WorkerSigns:
    return WorkerSigns(heard_s, worked_s, counts_tokens, is_out, others)


@pytest.mark.parametrize(
    ("known", "is_dead"),
    [
        (signs(heard_s=JUST_S, others=5), False),
        (signs(heard_s=JUST_S), False),
        (signs(worked_s=JUST_S, counts_tokens=True, others=5), False),
        (signs(worked_s=LONG_AGO_S, counts_tokens=True), True),
        (signs(worked_s=LONG_AGO_S, counts_tokens=True, others=5), True),
        (signs(heard_s=JUST_S, worked_s=LONG_AGO_S, counts_tokens=True), False),
        (signs(others=1), True),
        (signs(), False),
        (signs(heard_s=JUST_S, worked_s=JUST_S, counts_tokens=True, others=5, is_out=True), True),
        (signs(is_out=True), True),
    ],
)
def test_a_silence_is_judged_by_what_else_is_known(known: WorkerSigns, is_dead: bool) -> None:
    assert is_dead_silence(known, now_s=NOW_S, limit_s=LIMIT_S) is is_dead


TIMES = st.one_of(st.just(-math.inf), st.floats(0.0, NOW_S))


@given(
    st.builds(
        WorkerSigns,
        heard_s=TIMES,
        worked_s=TIMES,
        counts_tokens=st.booleans(),
        is_out=st.booleans(),
        others=st.integers(0, 9),
    ),
    st.floats(0.1, 600.0),
)
def test_a_worker_that_is_well_by_any_sign_loses_no_stream(known: WorkerSigns, limit_s: float) -> None:
    is_dead = is_dead_silence(known, now_s=NOW_S, limit_s=limit_s)
    is_at_work = NOW_S - max(known.heard_s, known.worked_s) < limit_s
    assert is_dead <= (known.is_out or not is_at_work)
    if is_dead and not known.is_out:  # it was asked before
        assert is_to_be_asked(known, now_s=NOW_S, limit_s=limit_s)


def test_a_worker_is_asked_when_nothing_was_heard_for_half_of_the_limit() -> None:
    assert not is_to_be_asked(signs(heard_s=NOW_S - 29.0), now_s=NOW_S, limit_s=LIMIT_S)
    assert is_to_be_asked(signs(heard_s=NOW_S - 31.0), now_s=NOW_S, limit_s=LIMIT_S)
    assert not is_to_be_asked(signs(worked_s=NOW_S - 29.0, counts_tokens=True), now_s=NOW_S, limit_s=LIMIT_S)
    assert (look_again_s(2.0), look_again_s(600.0)) == (0.5, LOOK_MAX_S)


def test_a_request_may_be_silent_for_its_limit_before_and_after_its_answer_begins() -> None:
    progress = Progress(10.0, limit_s=5.0)
    assert progress.look(0, 10.0) == 15.0
    assert progress.look(0, 14.0) == 15.0
    assert progress.look(1, 14.5) == 19.5
    assert progress.look(1, 18.0) == 19.5
    for second in range(1, 2000):
        assert progress.look(1 + second, 20.0 + second) == 25.0 + second
    assert not progress.is_total(1e9)


def test_a_bound_of_the_whole_holds_whatever_the_progress() -> None:
    progress = Progress(10.0, limit_s=5.0, total_s=7.0)
    assert progress.look(0, 10.0) == 15.0
    assert progress.look(1, 14.0) == 17.0
    assert (progress.is_total(16.9), progress.is_total(17.0)) == (False, True)
