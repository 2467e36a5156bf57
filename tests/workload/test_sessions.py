"""Conversations: what a turn's prompt begins with, and when turns are due in both modes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.sessions import MadeUp, grouped, in_order, moved, sessions_in, with_mode


@st.composite
def made_up(draw: st.DrawFn) -> tuple[MadeUp, list[WorkloadRequest]]:
    prompt = draw(st.integers(2, 200))
    shape = MadeUp(
        prompt_tokens=prompt,
        output_tokens=draw(st.integers(1, 50)),
        length_spread=draw(st.floats(0, 0.9)),
        shared_prefix_tokens=draw(st.integers(0, prompt - 1)),
        turns=draw(st.integers(1, 5)),
        think_s=draw(st.floats(0, 10)),
    )
    count = draw(st.integers(1, 30))
    begins = np.cumsum(draw(st.lists(st.floats(0, 5), min_size=count, max_size=count)))
    return shape, shape.requests(begins[: -(-count // shape.turns)], count, draw(st.integers(0, 5)))


def by_session(requests: Any) -> dict[int | None, list[WorkloadRequest]]:
    found = collections.defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return found


@given(made_up())
@settings(max_examples=40)
def test_a_turn_begins_with_the_turn_before_and_its_answer(made: tuple[MadeUp, list[WorkloadRequest]]) -> None:
    shape, requests = made
    prompts = PromptMaker(hash_tokens=shape.hash_tokens, token_high=1 << 30)
    shared = prompts.tokens(requests[0]).tolist()[: shape.shared_prefix_tokens]
    for turns in by_session(requests).values() if shape.turns > 1 else ():
        assert [request.turn for request in turns] == list(range(len(turns)))
        for before, after in itertools.pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert prompts.tokens(after).tolist()[: before.prompt_tokens] == prompts.tokens(before).tolist()
            assert after.due_s == pytest.approx((before.due_s or 0) + shape.think_s)
    beginnings = set()
    for request in requests:
        tokens = prompts.tokens(request).tolist()
        assert tokens[: shape.shared_prefix_tokens] == shared
        if request.turn == 0:
            beginnings.add(tokens[shape.shared_prefix_tokens])
    assert len(beginnings) == sessions_in(requests), "two sessions share more than the shared prefix"


@given(made_up())
def test_made_up_lengths_are_within_their_spread(made: tuple[MadeUp, list[WorkloadRequest]]) -> None:
    shape, requests = made
    assert [request.number for request in requests] == list(range(len(requests)))
    for request in requests:
        assert abs(request.output_tokens - shape.output_tokens) <= shape.output_tokens * shape.length_spread
        if request.turn == 0:
            low = shape.prompt_tokens * (1 - shape.length_spread)
            high = shape.prompt_tokens * (1 + shape.length_spread)
            assert max(low, shape.shared_prefix_tokens + 1) <= request.prompt_tokens + 1e-6
            assert request.prompt_tokens <= max(high, shape.shared_prefix_tokens + 1)


def test_the_mean_length_is_the_asked_one() -> None:
    shape = MadeUp(prompt_tokens=1000, output_tokens=100, length_spread=0.5)
    requests = shape.requests(np.arange(20_000.0), 20_000, 1)
    assert np.mean([request.prompt_tokens for request in requests]) == pytest.approx(1000, rel=0.01)
    assert np.mean([request.output_tokens for request in requests]) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    "wrong",
    [{"length_spread": 1.0}, {"shared_prefix_tokens": 512}, {"turns": 0}, {"think_s": -1.0}, {"output_tokens": 0}],
)
def test_made_up_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        MadeUp(**wrong)


def test_a_session_that_grows_too_long_is_refused() -> None:
    shape = MadeUp(prompt_tokens=1 << 20, turns=20)
    with pytest.raises(InvalidArgumentError, match="the prompt of turn"):
        shape.requests([0.0], 20, 0)


def test_too_many_hash_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.workload.sessions.IDS_MAX", 1000)
    shape = MadeUp(prompt_tokens=100, shared_prefix_tokens=1)
    with pytest.raises(InvalidArgumentError, match="blocks of 1 tokens: a shared prefix of a multiple of 512 tokens"):
        shape.requests(np.arange(20.0), 20, 0)


rows = st.lists(
    st.tuples(
        st.none() | st.integers(0, 3),
        st.floats(0, 100),
        st.none() | st.floats(0, 20),
        st.none() | st.floats(0, 20),
    ),
    max_size=20,
)


@given(rows)
def test_rows_of_a_session_become_its_turns_in_time(given_rows: list[Any]) -> None:
    requests = [
        WorkloadRequest(place, 5, 5, due, session=session, hash_ids=(place,))
        for place, (session, due, _, _) in enumerate(given_rows)
    ]
    delays, took = [row[2] for row in given_rows], [row[3] for row in given_rows]
    made = grouped(requests, delays, took)
    assert [request.number for request in made] == list(range(len(requests)))
    assert [request.due_s for request in made] == sorted(row[1] for row in given_rows)
    for session, turns in by_session(made).items():
        if session is None:
            assert all(request.turn == 0 and request.think_s == 0 for request in turns)
            continue
        assert [request.turn for request in turns] == list(range(len(turns)))
        for before, after in itertools.pairwise(turns):
            place = after.hash_ids[0]
            gap = (after.due_s or 0) - (before.due_s or 0) - (took[before.hash_ids[0]] or 0)
            expected = delays[place] if delays[place] is not None else max(0.0, gap)
            assert after.think_s == pytest.approx(expected)


def test_turns_without_times_follow_the_turn_before_by_their_delay() -> None:
    requests = [
        WorkloadRequest(0, 5, 5, 10.0, session=0),
        WorkloadRequest(1, 5, 5, None, session=0, turn=1),
        WorkloadRequest(2, 5, 5, 11.0),
        WorkloadRequest(3, 5, 5, None, session=0, turn=1),
    ]
    made = grouped(requests, [None, 3.0, None, 0.5])
    assert [(request.due_s, request.turn, request.think_s) for request in made] == [
        (10.0, 0, 0.0),
        (11.0, 0, 0.0),
        (13.0, 1, 3.0),
        (13.5, 2, 0.5),
    ]


@given(made_up())
def test_modes_only_change_when_later_turns_are_due(made: tuple[MadeUp, list[WorkloadRequest]]) -> None:
    timed = Workload("w", made[1])
    think = with_mode(timed, DispatchMode.THINK)
    assert think.mode is DispatchMode.THINK
    for before, after in zip(timed.requests, think.requests, strict=True):
        assert after.due_s == (None if before.turn else before.due_s)
        assert dataclasses.replace(after, due_s=before.due_s) == before
    back = with_mode(think, DispatchMode.TIMESTAMP)
    assert back.mode is DispatchMode.TIMESTAMP
    assert sorted(r.due_s or 0 for r in back.requests) == pytest.approx([r.due_s or 0 for r in timed.requests])
    assert with_mode(timed, DispatchMode.TIMESTAMP) == timed
    assert with_mode(think, DispatchMode.THINK) == think


@given(made_up(), st.floats(0.1, 10))
def test_moved_sessions_keep_their_inner_distances(made: tuple[MadeUp, list[WorkloadRequest]], gap: float) -> None:
    requests = made[1]
    count = sessions_in(requests)
    after = moved(requests, np.arange(count) * gap)
    assert sorted(r.due_s or 0 for r in after if r.turn == 0) == pytest.approx([at * gap for at in range(count)])
    if made[0].turns > 1:
        old, new = by_session(requests), by_session(after)
        for session, turns in new.items():
            was = [(r.due_s or 0) - (old[session][0].due_s or 0) for r in old[session]]
            assert [(r.due_s or 0) - (turns[0].due_s or 0) for r in turns] == pytest.approx(was, abs=1e-9)
    fewer = moved(requests, np.arange(count - 1) * gap)
    assert sessions_in(fewer) == count - 1


def test_in_order_keeps_turns_that_are_due_at_once_in_their_order() -> None:
    requests = [WorkloadRequest(at, 1, 1, 1.0, session=0, turn=turn) for at, turn in enumerate((2, 0, 1))]
    assert [(r.number, r.turn) for r in in_order(requests)] == [(0, 0), (1, 1), (2, 2)]
