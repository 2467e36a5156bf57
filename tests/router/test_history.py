"""What the router remembers for operators: bounded, and right."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.router.history import (
    DECISIONS_MAX,
    GROWTH,
    LANES_MAX,
    PAIRS_MAX,
    SAMPLES_MAX,
    SPAN_S,
    STEP_S,
    TEXT_MAX,
    Decision,
    History,
    TransferSample,
    transfer_of,
)

ENGINE = {
    "transfer_id": "00" * 16,
    "prefill": "remote",
    "reason": "remote",
    "blocks_moved": 4,
    "bytes_moved": 4096,
    "lane": "cma",
    "transfer_s": 0.25,
    "seconds": {"wire": 0.2, "confirm": 0.05},
    "failure": None,
}
"""As kvxfer's own engine accounts for a transfer."""
VLLM = {"transfer_id": "00" * 16, "code": "", "lane": "ucx", "blocks": 2, "bytes": 512, "seconds": 0.5, "attempts": 1}
"""As its connector in vLLM does."""


def decision(ended_s: float = 1000.0, **changes: Any) -> Decision:
    made = Decision(
        ended_s=ended_s,
        route="/v1/completions",
        model="tiny",
        is_stream=True,
        prefill="p0",
        decode="d0",
        reason="remote",
        outcome="ok",
        is_failure=False,
        status=200,
        ttft_s=0.1,
        duration_s=0.5,
        attempts=1,
        code="",
    )
    return made._replace(**changes)


def test_the_last_decisions_are_kept_newest_first() -> None:
    history = History()
    for number in range(DECISIONS_MAX + 50):
        history.ended(decision(1000.0 + number))
    kept = history.decisions()
    assert len(kept) == DECISIONS_MAX
    assert [one.ended_s for one in kept] == sorted((one.ended_s for one in kept), reverse=True)
    assert kept[0].ended_s == 1000.0 + DECISIONS_MAX + 49
    assert history.outcomes() == {"ok": DECISIONS_MAX + 50}


def test_a_request_counts_in_the_step_in_which_it_ended() -> None:
    history = History()
    history.ended(decision(1000.0))
    history.ended(decision(1004.9, outcome="failed", is_failure=True))
    history.ended(decision(1005.0, outcome="client_error"))
    first, second = history.series(1006.0)
    assert (first["begun_s"], first["requests"], first["failures"]) == (1000.0, 2, 1)
    assert (second["begun_s"], second["requests"], second["failures"]) == (1005.0, 1, 0)
    assert first["ttft_p50_s"] is None
    assert first["ttft_count"] == 0


def test_steps_that_are_too_old_are_neither_shown_nor_added_to() -> None:
    history = History()
    history.ended(decision(1000.0))
    history.first_byte(1000.0, 0.1)
    assert len(history.series(1000.0 + SPAN_S - STEP_S)) == 1
    assert history.series(1000.0 + SPAN_S) == []
    history.ended(decision(1000.0 + SPAN_S))  # takes the old step's place
    history.ended(decision(1000.0))
    history.first_byte(1000.0, 0.1)
    [step] = history.series(1000.0 + SPAN_S)
    assert (step["requests"], step["ttft_count"]) == (1, 0)


def test_the_series_is_bounded_whatever_the_time() -> None:
    history = History()
    for number in range(1000):
        history.ended(decision(number * STEP_S))
    steps = history.series(999 * STEP_S)
    assert len(steps) == SPAN_S / STEP_S
    assert [step["begun_s"] for step in steps] == sorted(step["begun_s"] for step in steps)


@given(st.lists(st.floats(min_value=1e-5, max_value=600.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
def test_quantiles_of_first_bytes_are_near_the_nearest_rank(seconds: list[float], share: float) -> None:
    history = History()
    for one in seconds:
        history.first_byte(1000.0, one)
    [step] = history.series(1000.0)
    true = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    said = step["ttft_p50_s" if share == 0.5 else "ttft_p95_s"]
    assert step["ttft_count"] == len(seconds)
    assert true / math.sqrt(GROWTH) * 0.999 - 1e-6 <= said <= true * math.sqrt(GROWTH) * 1.001 + 1e-6


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12, 1e9])
def test_a_strange_time_is_counted_too(seconds: float) -> None:
    history = History()
    history.first_byte(0.0, seconds)
    [step] = history.series(0.0)
    assert step["ttft_count"] == 1
    assert math.isfinite(step["ttft_p50_s"])


def test_accounts_of_both_kinds_are_read() -> None:
    assert transfer_of(ENGINE) == TransferSample(0.25, 4096, 4, "cma", False)
    assert transfer_of(VLLM) == TransferSample(0.5, 512, 2, "ucx", False)


def test_what_was_computed_without_a_transfer_is_none() -> None:
    assert transfer_of({"prefill": "local", "reason": "no remote prefill was asked for", "failure": None}) is None


@pytest.mark.parametrize(
    "account", [{**ENGINE, "prefill": "local", "failure": "peer_gone"}, {**VLLM, "code": "deadline"}]
)
def test_a_transfer_that_failed_has_no_time(account: dict[str, Any]) -> None:
    sample = transfer_of(account)
    assert sample is not None
    assert sample.is_failure
    assert sample.seconds is None


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200)
NAMES = st.sampled_from(sorted({*ENGINE, *VLLM}))


@given(
    st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(), SCALARS, max_size=2))
)
def test_whatever_a_worker_says_is_read_or_left(account: dict[str, Any]) -> None:
    history = History()
    history.transferred("p0", "d0", account)
    for values in (*history.pairs(), *history.lanes()):
        assert len(values["lane"]) <= TEXT_MAX
        for name in ("transfers", "failures", "bytes", "blocks"):
            assert type(values[name]) is int
            assert values[name] >= 0
        for name in ("transfer_p50_s", "transfer_p95_s"):
            assert values[name] is None or math.isfinite(values[name])


def test_a_pair_has_its_requests_and_the_times_of_its_last_transfers() -> None:
    history = History()
    history.ended(decision())
    history.ended(decision(prefill=""))  # of no pair
    for number in range(SAMPLES_MAX + 36):
        history.transferred("p0", "d0", {**ENGINE, "transfer_s": float(number)})
    history.transferred("p0", "d0", {**ENGINE, "failure": "peer_gone"})
    history.transferred("p0", "d1", VLLM)
    first, second = history.pairs()
    assert first == {
        "prefill": "p0",
        "decode": "d0",
        "requests": 1,
        "transfers": 100,
        "failures": 1,
        "bytes": 409600,
        "blocks": 400,
        "lane": "cma",
        "transfer_p50_s": 67.0,
        "transfer_p95_s": 96.0,
    }
    assert (second["decode"], second["requests"], second["lane"]) == ("d1", 0, "ucx")
    cma, ucx = history.lanes()
    assert (cma["lane"], cma["transfers"], cma["failures"], cma["bytes"]) == ("cma", 100, 1, 409600)
    assert (ucx["lane"], ucx["transfers"]) == ("ucx", 1)


def test_pairs_that_were_used_last_are_kept() -> None:
    history = History()
    for number in range(PAIRS_MAX):
        history.ended(decision(decode=f"d{number}"))
    history.ended(decision(decode="d0"))
    history.ended(decision(decode="new"))
    kept = {pair["decode"] for pair in history.pairs()}
    assert len(kept) == PAIRS_MAX
    assert {"d0", "new"} <= kept
    assert "d1" not in kept


def test_lanes_of_any_name_are_bounded() -> None:
    history = History()
    for number in range(LANES_MAX + 10):
        history.transferred("p0", "d0", {**VLLM, "lane": f"lane-{number:03}"})
    lanes = {lane["lane"]: lane["transfers"] for lane in history.lanes()}
    assert len(lanes) == LANES_MAX + 1
    assert lanes["other"] == 10


EVENTS = st.tuples(
    st.integers(0, 2), st.sampled_from(["ended", "first", "moved"]), st.floats(0.0, 20.0), st.integers(0, 3)
)


def happened(history: History, what: str, now_s: float, number: int) -> None:
    if what == "ended":
        history.ended(decision(now_s, prefill=f"p{number}" if number else "", is_failure=number == 2))
    elif what == "first":
        history.first_byte(now_s, 0.01 * (number + 1))
    else:
        history.transferred("p0", f"d{number}", {**ENGINE, "lane": f"lane{number}", "transfer_s": now_s / 1000})


def all_of(history: History, now_s: float) -> list[Any]:
    return [history.decisions(), history.series(now_s), history.pairs(), history.lanes(), history.outcomes()]


@given(st.lists(EVENTS, max_size=60))
def test_several_processes_remember_together_what_one_would(events: list[tuple[int, str, float, int]]) -> None:
    """Each tells what happened since it told last, as a message between processes carries it."""
    one, whole, members = History(), History(), [History() for _ in range(3)]
    now_s = 1000.0
    for process, what, step_s, number in events:
        now_s += step_s + 0.001
        happened(one, what, now_s, number)
        happened(members[process], what, now_s, number)
        whole.take(json.loads(json.dumps(members[process].drain())))
    assert all_of(whole, now_s) == all_of(one, now_s)
    for member in members:
        assert all_of(member, now_s) == [[], [], [], [], {}]


@given(st.lists(EVENTS, max_size=60))
def test_it_does_not_matter_when_processes_tell(events: list[tuple[int, str, float, int]]) -> None:
    one, whole, members = History(), History(), [History() for _ in range(3)]
    now_s = 1000.0
    for process, what, step_s, number in events:
        now_s += step_s + 0.001
        happened(one, what, now_s, number)
        happened(members[process], what, now_s, number)
    for member in members:
        whole.take(json.loads(json.dumps(member.drain())))
    expected = all_of(one, now_s)
    for pair in (*expected[2], *(found := all_of(whole, now_s))[2]):
        assert pair.pop("lane") is not None  # of the last transfer, which is not known any more
    assert found == expected


def test_what_a_process_tells_is_bounded_and_the_last_decisions_of_all_are_kept() -> None:
    whole, busy, calm = History(), History(), History()
    for number in range(3 * DECISIONS_MAX):
        busy.ended(decision(1000.0 + number / 100))
    calm.ended(decision(1005.999, model="calm"))
    whole.take(calm.drain())
    told = busy.drain()
    assert len(told[0]) == DECISIONS_MAX
    whole.take(told)
    kept = whole.decisions()
    assert len(kept) == DECISIONS_MAX
    assert kept[0].model == "calm"
    assert whole.outcomes() == {"ok": 3 * DECISIONS_MAX + 1}
